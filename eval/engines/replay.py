"""The same prompts through the built-in decoder and through a serving engine, compared stage by stage.

An engine drafts in full to the end of an answer and counts every accepted draft, also those behind
a stop token or the limit. Our side therefore decodes past the end and counts likewise, so that the
numbers are equal and not only alike.

Shapes: T prompt row, L captured layer, D hidden size, K drafted token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.data.target.resolve import Target
from slipstream.data.template import render_prompt, stop_token_ids
from slipstream.data.types import Conversation, Message
from slipstream.eval.config import EvalConfig
from slipstream.eval.decoder import SpeculativeDecoder
from slipstream.eval.drafters.eagle import EagleDrafter
from slipstream.eval.drafting import Draft, Drafter
from slipstream.eval.engines.job import STATES, EngineAnswer, EngineJob, EngineResult
from slipstream.eval.verify import Sampling

NUM_TRACED = 4
"""Prompts whose captured states are compared."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference of two states, as a share of their RMS."""
MAX_EXCUSED = 0.01
"""Share of the accepted drafts that answers parting at a near-tie may change."""
NEAR_TIE = 1e-3
"""Two target logits closer than this may swap from one engine to the other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """Prompts and what the built-in decoder makes of them."""

    chats: list[list[dict[str, str]]]
    prompts: list[list[int]]
    result: EngineResult
    states: dict[str, Tensor]
    """As `STATES` of an engine."""

    def job(
        self,
        out: Path,
        *,
        target: str,
        draft: str,
        config: EvalConfig,
        stop_ids: Sequence[int],
        method: str = "eagle3",
    ) -> EngineJob:
        """The same task for an engine; `method` is vLLM's name of the way to draft."""
        out.mkdir(parents=True, exist_ok=True)
        (out / STATES).unlink(missing_ok=True)  # of an earlier comparison
        return EngineJob(
            out=str(out),
            target=target,
            draft=draft,
            prompts=self.prompts,
            chats=self.chats,
            num_draft_tokens=config.num_draft_tokens,
            max_new_tokens=config.max_new_tokens,
            stop_ids=list(stop_ids),
            method=method,
            num_traced=min(NUM_TRACED, len(self.states) // 2),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """How one stage compares."""

    stage: str
    equal: bool
    text: str


class _Recorder:
    """Drafts with a head and keeps what it drafted and from what."""

    def __init__(self, inner: Drafter) -> None:
        self.aux_layers = inner.aux_layers
        self._inner = inner
        self.drafts: list[list[int]] = []
        self.first_aux: Tensor | None = None

    def start(
        self, prompt_ids: Sequence[int], capacity: int, sampling: Sampling, generator: torch.Generator | None
    ) -> None:
        """See `Drafter`."""
        self.drafts, self.first_aux = [], None
        self._inner.start(prompt_ids, capacity, sampling, generator)

    def propose(self, next_ids_T: Tensor, aux_LTD: Sequence[Tensor], num_tokens: int) -> Draft:
        """See `Drafter`."""
        if self.first_aux is None:
            self.first_aux = torch.stack(tuple(aux_LTD), dim=1)
        draft = self._inner.propose(next_ids_T, aux_LTD, num_tokens)
        self.drafts.append(draft.ids_K.tolist())
        return draft


def decode(
    target: Target,
    model: PreTrainedModel,
    drafter: Drafter,
    config: EvalConfig,
    conversations: Sequence[Conversation],
) -> Replay:
    """Decodes every turn greedily; its answer is the history of the next turn.

    The states of the first prompts are kept if an EAGLE-3 head drafts: others read none that are fused.
    """
    tokenizer, stop_ids = target.tokenizer(), stop_token_ids(target)
    recorder = _Recorder(drafter)
    k, limit = config.num_draft_tokens, config.max_new_tokens
    decoder = SpeculativeDecoder(model, recorder, num_draft_tokens=k, sampling=Sampling(), stop_ids=())
    chats: list[list[dict[str, str]]] = []
    prompts: list[list[int]] = []
    answers: list[EngineAnswer] = []
    states: dict[str, Tensor] = {}
    accepted_K = [0] * k
    for conversation in conversations:
        history: list[Message] = []
        for message in conversation.messages:
            history.append(message)
            if message.role != "user":
                continue
            prompts.append(render_prompt(tokenizer, history))
            chats.append([{"role": m.role, "content": m.content} for m in history])
            tokens = decoder.generate(prompts[-1], limit + k).token_ids
            accepted, token_ids = _until_stop(tokens, recorder.drafts, stop_ids, limit)
            answers.append(EngineAnswer(token_ids=token_ids, drafts=recorder.drafts[: len(accepted)]))
            for depth in range(k):
                accepted_K[depth] += sum(a > depth for a in accepted)
            number, first_aux = len(states) // 2, recorder.first_aux
            if isinstance(drafter, EagleDrafter) and first_aux is not None and number < NUM_TRACED:
                states |= _states(number, drafter, first_aux)
            text = token_ids[:-1] if token_ids[-1] in stop_ids else token_ids
            content = str(tokenizer.decode(text, skip_special_tokens=False))
            history.append(Message(role="assistant", content=content))
    num_rounds = sum(len(answer.drafts) for answer in answers)
    result = EngineResult(version="built in", answers=answers, num_rounds=num_rounds, accepted_K=accepted_K)
    return Replay(chats=chats, prompts=prompts, result=result, states=states)


def _until_stop(
    tokens: Sequence[int], drafts: Sequence[Sequence[int]], stop_ids: Sequence[int], limit: int
) -> tuple[list[int], list[int]]:
    """Accepted drafts of the rounds an engine runs, the last one counted in full, and its answer.

    >>> _until_stop([5, 6, 7, 2, 9, 9], [[6, 7], [9, 9]], [2], 10)
    ([2], [5, 6, 7, 2])
    >>> _until_stop([5, 6, 7, 8, 9, 9], [[6, 1], [8, 9], [9, 9]], [2], 4)
    ([1, 2], [5, 6, 7, 8])
    """
    stop = next((i for i, token in enumerate(tokens) if token in stop_ids), len(tokens))
    length = min(stop + 1, limit)
    accepted: list[int] = []
    num_made = 1
    for draft in drafts:
        if num_made >= length:
            break
        follows = tokens[num_made : num_made + len(draft)]
        same = [a == b for a, b in zip(draft, follows, strict=False)]  # an answer may end within
        accepted.append(same.index(False) if False in same else len(same))
        num_made += accepted[-1] + 1
    return accepted, list(tokens[:length])


@torch.no_grad()
def _states(number: int, drafter: EagleDrafter, aux_TLD: Tensor) -> dict[str, Tensor]:
    return {f"{number}.aux": aux_TLD.flatten(1).clone(), f"{number}.fc": drafter.fuse(aux_TLD)}


def compare(ours: Replay, theirs: EngineResult, states_file: Path, model: PreTrainedModel) -> list[Finding]:
    """Every stage in the order in which one follows from the other."""
    findings = []
    rendered = [answer.rendered for answer in theirs.answers]
    if all(rendered):
        wrong = [i for i, (a, b) in enumerate(zip(ours.prompts, rendered, strict=True)) if a != list(b)]
        findings.append(_count("prompt ids", wrong, len(rendered), "prompts"))
    if states_file.exists():
        found = load_file(states_file)
        for stage, name in (("captured states", "aux"), ("fc output", "fc")):
            findings.append(_compare_states(stage, name, ours.states, found, model.dtype))
    pairs = list(zip(ours.result.answers, theirs.answers, strict=True))
    tokens = [i for i, (a, b) in enumerate(pairs) if list(a.token_ids) != list(b.token_ids)]
    ties = [i for i in tokens if _gap(ours.prompts[i], *pairs[i], model) < NEAR_TIE]
    first, later = _differing_drafts([pair for i, pair in enumerate(pairs) if i not in tokens])
    num_rounds = ours.result.num_rounds
    findings.append(_count("first drafts", first, num_rounds, "rounds"))
    findings.append(_count("later drafts", later, num_rounds, "rounds"))
    finding = _count("token ids", [i for i in tokens if i not in ties], len(pairs), "answers")
    if ties:
        finding = Finding(
            stage=finding.stage, equal=finding.equal, text=f"{finding.text}, {len(ties)} part at a near-tie"
        )
    findings.append(finding)
    findings.append(_compare_counts(ours.result, theirs, excused=bool(ties)))
    return findings


def _count(stage: str, wrong: Sequence[int], total: int, unit: str) -> Finding:
    text = f"{total - len(wrong):,} of {total:,} {unit} equal"
    return Finding(stage=stage, equal=not wrong, text=text + (f", first: number {wrong[0]}" if wrong else ""))


def _compare_states(
    stage: str, name: str, ours: dict[str, Tensor], theirs: dict[str, Tensor], dtype: torch.dtype
) -> Finding:
    worst = 0.0
    names = [key for key in ours if key.endswith(name) and key in theirs]
    for key in names:
        first, second = ours[key].float().cpu(), theirs[key].float()
        if first.shape != second.shape:
            text = f"shape {tuple(first.shape)} here, {tuple(second.shape)} there"
            return Finding(stage=stage, equal=False, text=text)
        worst = max(worst, float((first - second).abs().max() / first.square().mean().sqrt()))
    text = f"largest difference {worst:.1e} of their RMS, {len(names)} prompts"
    return Finding(stage=stage, equal=worst < TOLERANCE[dtype], text=text)


def _differing_drafts(
    pairs: Sequence[tuple[EngineAnswer, EngineAnswer]],
) -> tuple[list[int], list[int]]:
    """Our rounds, numbered through, whose first or whose later drafts differ.

    Rounds are compared where both sides draft behind the same token: one other draft, and from then
    on the rounds of the two sides may begin elsewhere.
    """
    first: list[int] = []
    later: list[int] = []
    number = 0
    for ours, theirs in pairs:
        known = _by_place(theirs)
        for place, draft in _by_place(ours).items():
            other = known.get(place, draft)
            if other[:1] != draft[:1]:
                first.append(number)
            elif other != draft:
                later.append(number)
            number += 1
    return first, later


def _by_place(answer: EngineAnswer) -> dict[int, list[int]]:
    """The draft of each round, by the number of tokens before it."""
    accepted, _ = _until_stop(answer.token_ids, answer.drafts, (), len(answer.token_ids))
    places = [1]
    for num in accepted:
        places.append(places[-1] + num + 1)
    return dict(zip(places, map(list, answer.drafts[: len(accepted)]), strict=False))


@torch.no_grad()
def _gap(prompt: Sequence[int], ours: EngineAnswer, theirs: EngineAnswer, model: PreTrainedModel) -> float:
    """How far the target's two best tokens are apart where two answers part."""
    both = list(zip(ours.token_ids, theirs.token_ids, strict=False))
    at = next((i for i, (a, b) in enumerate(both) if a != b), len(both))
    ids_1T = torch.tensor([[*prompt, *ours.token_ids[:at]]], device=model.device)
    best = model(input_ids=ids_1T, logits_to_keep=1).logits[0, -1].float().topk(2).values
    return float(best[0] - best[1])


def _compare_counts(ours: EngineResult, theirs: EngineResult, *, excused: bool) -> Finding:
    equal = (ours.num_rounds, list(ours.accepted_K)) == (theirs.num_rounds, list(theirs.accepted_K))
    accepted = sum(ours.accepted_K)
    excused = excused and abs(accepted - sum(theirs.accepted_K)) <= MAX_EXCUSED * accepted
    text = f"tau {_tau(theirs):.4f} there, {_tau(ours):.4f} here; accepted {_shown(theirs)}, {_shown(ours)}"
    return Finding(stage="acceptance", equal=equal or excused, text=text)


def _shown(result: EngineResult) -> str:
    return f"{'/'.join(map(str, result.accepted_K))} of {result.num_rounds}"


def _tau(result: EngineResult) -> float:
    return 1.0 + sum(result.accepted_K) / max(result.num_rounds, 1)
