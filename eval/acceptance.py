"""Measures an exported head: acceptance length, speed and losslessness on held-out prompts.

Every prompt is decoded twice in a row by the same code, without and with the head, so that both
times see the same machine. The `evaluation` stage keeps one line for each finished prompt and
continues behind them.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slipstream.data.files import Stage, append_jsonl, file_hash, read_jsonl, value_hash, write_json
from slipstream.data.progress import Meter
from slipstream.data.target.resolve import Target
from slipstream.data.target.weights import read_target_head
from slipstream.data.template import RefusedError, render_prompt, stop_token_ids
from slipstream.data.types import Conversation, Message
from slipstream.drafters.checkpoint_format import CONFIG, WEIGHTS, load_head
from slipstream.eval.config import EvalConfig
from slipstream.eval.decoder import DecodeResult, EagleDrafter, Round, SpeculativeDecoder
from slipstream.eval.verify import Sampling

ROUNDS, REPORT = "rounds.jsonl", "acceptance.json"
NUM_WARM_UP_TOKENS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptResult:
    """One prompt, all its turns; a line of rounds.jsonl."""

    id: str
    category: str
    rounds: tuple[Round, ...]
    new_tokens: int
    baseline_new_tokens: int
    seconds: float
    baseline_seconds: float
    identical: bool
    """Whether both ways gave the same tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptanceReport:
    """What the head is worth on these prompts (definitions: ALGORITHMS.md section 4)."""

    num_draft_tokens: int
    prompts: int
    rounds: int
    """Target passes after the prompts'."""
    drafted: int
    accepted: int
    acceptance_length: float
    """tau: mean tokens of a round, the target's own token included; 1 + accepted / rounds."""
    accepted_per_round: float
    acceptance_rate: float
    """accepted / drafted."""
    unconditional_K: tuple[float, ...]
    """Share of all rounds that accepted the draft at each position; what vLLM reports."""
    conditional_K: tuple[float, ...]
    """Share of the rounds that came so far: all drafts before accepted, and one made here."""
    new_tokens: int
    tokens_per_second: float
    baseline_tokens_per_second: float
    speedup: float
    lossless: bool | None
    """Every greedy answer equals plain decoding token for token; None when sampled."""
    mismatches: tuple[str, ...]
    """Ids of the prompts whose answers differ."""
    acceptance_length_by_category: dict[str, float]


def acceptance_length(rounds: Sequence[Round]) -> float:
    """tau of these rounds."""
    return 1.0 + sum(r.accepted for r in rounds) / max(len(rounds), 1)


def summarise(results: Sequence[PromptResult], *, num_draft_tokens: int, is_greedy: bool) -> AcceptanceReport:
    """Puts the results of all prompts together."""
    rounds = _rounds(results)
    drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    accepted_K = [sum(r.accepted > k for r in rounds) for k in range(num_draft_tokens)]
    reached_K = [sum(r.accepted >= k and r.drafted > k for r in rounds) for k in range(num_draft_tokens)]
    num_tokens, num_baseline = sum(r.new_tokens for r in results), sum(r.baseline_new_tokens for r in results)
    speed = num_tokens / sum(r.seconds for r in results)
    baseline_speed = num_baseline / sum(r.baseline_seconds for r in results)
    mismatches = tuple(r.id for r in results if not r.identical) if is_greedy else ()
    return AcceptanceReport(
        num_draft_tokens=num_draft_tokens,
        prompts=len(results),
        rounds=len(rounds),
        drafted=drafted,
        accepted=accepted,
        acceptance_length=acceptance_length(rounds),
        accepted_per_round=accepted / max(len(rounds), 1),
        acceptance_rate=accepted / max(drafted, 1),
        unconditional_K=tuple(accepted / max(len(rounds), 1) for accepted in accepted_K),
        conditional_K=tuple(a / max(reached, 1) for a, reached in zip(accepted_K, reached_K, strict=True)),
        new_tokens=num_tokens,
        tokens_per_second=speed,
        baseline_tokens_per_second=baseline_speed,
        speedup=speed / baseline_speed,
        lossless=not mismatches if is_greedy else None,
        mismatches=mismatches,
        acceptance_length_by_category={
            name: acceptance_length(_rounds([r for r in results if r.category == name]))
            for name in sorted({r.category for r in results})
        },
    )


def _rounds(results: Iterable[PromptResult]) -> list[Round]:
    return [r for result in results for r in result.rounds]


def measure(
    target: Target,
    export_folder: Path,
    config: EvalConfig,
    conversations: Sequence[Conversation],
    folder: Path,
) -> AcceptanceReport:
    """The evaluation stage in `folder`: always of the exported head, read as a server reads it.

    `conversations` are held-out prompts, user turns only; the `prompts` and `limit` of `config` were
    applied to them already.

    Raises:
        ValueError: the bundle is broken or made for another target, a prompt is too long, or the
            folder holds another measurement.
    """
    drafter = load_drafter(target, export_folder)
    settings = {
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "target_dtype": str(target.dtype),
        "export": value_hash([file_hash(export_folder / name) for name in (CONFIG, WEIGHTS)]),
        "prompt_ids": value_hash([c.id for c in conversations]),
        **dataclasses.asdict(config),
    }
    stage = Stage(folder, "evaluation", settings)
    rows = read_jsonl(folder / ROUNDS, _parse_result) if (folder / ROUNDS).exists() else []
    results = {row.id: row for row in rows}
    todo = [c for c in conversations if c.id not in results]
    if todo:
        check_room(target, todo, config.max_new_tokens)
        player = _Player(target, drafter, config)
        player.warm_up(todo[0])
        stage.begin()
        with Meter("evaluation", len(conversations), unit="prompt") as meter:
            meter.skip(len(results))
            for conversation in todo:
                result = results[conversation.id] = player.play(conversation)
                append_jsonl(folder / ROUNDS, [dataclasses.asdict(result)])
                meter.advance(1, f"tau {acceptance_length(_rounds(results.values())):.3f}")
    report = summarise(
        [results[c.id] for c in conversations],
        num_draft_tokens=config.num_draft_tokens,
        is_greedy=config.temperature == 0,
    )
    if not stage.is_complete:
        write_json(folder / REPORT, dataclasses.asdict(report))
        stage.complete([ROUNDS, REPORT], acceptance_length=report.acceptance_length)
    return report


def _parse_result(row: dict[str, Any]) -> PromptResult:
    return PromptResult(**{**row, "rounds": tuple(Round(**r) for r in row["rounds"])})


def check_room(target: Target, conversations: Sequence[Conversation], max_new_tokens: int) -> None:
    """Holds every chat with its answers against the target's positions.

    Raises:
        ValueError: one does not fit, or the chat template refuses it.
    """
    tokenizer, room = target.tokenizer(), target.config.max_position_embeddings
    for conversation in conversations:
        roles = [message.role for message in conversation.messages]
        first, num_turns = roles.index("user") + 1, roles.count("user")
        try:
            needed = len(render_prompt(tokenizer, conversation.messages[:first])) + num_turns * max_new_tokens
        except RefusedError as refused:
            raise ValueError(
                f"eval.prompts: the target's template refuses {conversation.id} ({refused}): leave it out"
            ) from None
        later = conversation.messages[first:]
        needed += sum(len(tokenizer(message.content, verbose=False)["input_ids"]) for message in later)
        if needed > room:
            raise ValueError(
                f"eval.prompts: {conversation.id} with {num_turns} answers of eval.max_new_tokens="
                f"{max_new_tokens} takes {needed} tokens, and target.name={target.name} has {room} "
                f"positions: lower eval.max_new_tokens, or leave the prompt out"
            )


def load_drafter(target: Target, export_folder: Path) -> EagleDrafter:
    """Reads a serving bundle for decoding beside `target`.

    Raises:
        ValueError: it is broken, or made for a target of another shape.
    """
    served = load_head(export_folder)
    geometry, model = served.head.geometry, target.config
    for key in ("hidden_size", "vocab_size"):
        found, wanted = getattr(geometry, key), getattr(model, key)
        if found != wanted:
            raise ValueError(
                f"{export_folder / CONFIG}: {key} is {found}, and {wanted} in target.name={target.name}: "
                f"evaluate with the target the head was trained for"
            )
    if geometry.aux_layers[-1] > model.num_hidden_layers:
        raise ValueError(
            f"{export_folder / CONFIG}: boundary {geometry.aux_layers[-1]} lies beyond the "
            f"{model.num_hidden_layers} layers of target.name={target.name}"
        )
    embedding_VD = read_target_head(target).embedding_VD.to(target.device, target.dtype)
    target_ids_W = torch.arange(geometry.draft_vocab_size) + served.d2t_W
    head = served.head.to(target.device, target.dtype)
    return EagleDrafter(head, embedding_VD, target_ids_W.to(target.device))


class _Player:
    """Plays prompts turn by turn, each turn without and with the head."""

    def __init__(self, target: Target, drafter: EagleDrafter, config: EvalConfig) -> None:
        model, self._device = target.model(), target.device
        self._tokenizer, self._stop_ids = target.tokenizer(), stop_token_ids(target)
        self._max_new_tokens = config.max_new_tokens
        self._baseline, self._speculative = (
            SpeculativeDecoder(
                model,
                drafter,
                num_draft_tokens=num_draft_tokens,
                sampling=Sampling(temperature=config.temperature, top_p=config.top_p, top_k=config.top_k),
                stop_ids=self._stop_ids,
            )
            for num_draft_tokens in (0, config.num_draft_tokens)
        )

    def warm_up(self, conversation: Conversation) -> None:
        """Takes one-time costs out of the first times."""
        first_user = next(message for message in conversation.messages if message.role == "user")
        prompt_ids = render_prompt(self._tokenizer, [first_user])
        for decoder in (self._baseline, self._speculative):
            decoder.generate(prompt_ids, min(NUM_WARM_UP_TOKENS, self._max_new_tokens))

    def play(self, conversation: Conversation) -> PromptResult:
        """Decodes every turn; plain decoding's answers are the history of the next turn."""
        seed = int(value_hash(conversation.id), 16) >> 1
        generator = torch.Generator(self._device).manual_seed(seed)
        history: list[Message] = []
        baseline: list[DecodeResult] = []
        speculative: list[DecodeResult] = []
        for message in conversation.messages:
            history.append(message)
            if message.role != "user":
                continue
            prompt_ids = render_prompt(self._tokenizer, history)
            baseline.append(self._baseline.generate(prompt_ids, self._max_new_tokens, generator))
            speculative.append(self._speculative.generate(prompt_ids, self._max_new_tokens, generator))
            answer = list(baseline[-1].token_ids)
            if answer[-1] in self._stop_ids:
                answer.pop()
            text = str(self._tokenizer.decode(answer, skip_special_tokens=False))
            history.append(Message(role="assistant", content=text))
        return PromptResult(
            id=conversation.id,
            category=conversation.category,
            rounds=tuple(r for result in speculative for r in result.rounds),
            new_tokens=sum(len(result.token_ids) for result in speculative),
            baseline_new_tokens=sum(len(result.token_ids) for result in baseline),
            seconds=sum(result.seconds for result in speculative),
            baseline_seconds=sum(result.seconds for result in baseline),
            identical=[r.token_ids for r in baseline] == [r.token_ids for r in speculative],
        )
