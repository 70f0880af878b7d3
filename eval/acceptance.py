"""Measures an exported head: acceptance length, speed and losslessness on held-out prompts.

Every prompt is decoded twice in a row by the same code, without and with the head, so that both
times see the same machine. The `evaluation` stage keeps one line for each finished prompt and
continues behind them.
"""

import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from slipstream.data.files import Stage, file_hash, read_json, value_hash, write_json
from slipstream.data.progress import Meter
from slipstream.data.target.resolve import Target
from slipstream.data.target.weights import read_target_head
from slipstream.data.template import stop_token_ids
from slipstream.data.types import Conversation, Message
from slipstream.drafters.checkpoint_format import CONFIG, WEIGHTS, load_head
from slipstream.eval.config import EvalConfig
from slipstream.eval.decoder import (
    DecodeResult,
    Drafter,
    EagleDrafter,
    NoDrafter,
    Round,
    Sampling,
    SpeculativeDecoder,
)

ROUNDS, REPORT = "rounds.jsonl", "acceptance.json"
NUM_WARM_UP_TOKENS = 8
NOT_COMPARED = "sampled answers differ by chance; the verifier's distribution is tested on its own"


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
    """K."""
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
    lossless_note: str
    mismatches: tuple[str, ...]
    """Ids of the prompts whose answers differ."""
    acceptance_length_by_category: dict[str, float]


def acceptance_length(rounds: Sequence[Round]) -> float:
    """tau.

    >>> acceptance_length([Round(drafted=3, accepted=a) for a in (3, 0, 2, 1)])
    2.5
    """
    return 1.0 + sum(r.accepted for r in rounds) / max(len(rounds), 1)


def position_rates(
    rounds: Sequence[Round], num_draft_tokens: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Unconditional and conditional acceptance rate of each draft position.

    >>> position_rates([Round(drafted=2, accepted=a) for a in (2, 0, 1, 1)], 2)
    ((0.75, 0.25), (0.75, 0.3333333333333333))
    """
    unconditional, conditional = [], []
    for position in range(num_draft_tokens):
        accepted = sum(r.accepted > position for r in rounds)
        reached = sum(r.accepted >= position and r.drafted > position for r in rounds)
        unconditional.append(accepted / max(len(rounds), 1))
        conditional.append(accepted / max(reached, 1))
    return tuple(unconditional), tuple(conditional)


def summarise(results: Sequence[PromptResult], *, num_draft_tokens: int, is_greedy: bool) -> AcceptanceReport:
    """Puts the results of all prompts together."""
    rounds = _rounds(results)
    drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    unconditional_K, conditional_K = position_rates(rounds, num_draft_tokens)
    speed = _rate(sum(r.new_tokens for r in results), sum(r.seconds for r in results))
    baseline_speed = _rate(
        sum(r.baseline_new_tokens for r in results), sum(r.baseline_seconds for r in results)
    )
    mismatches = tuple(r.id for r in results if not r.identical) if is_greedy else ()
    categories = sorted({r.category for r in results})
    return AcceptanceReport(
        num_draft_tokens=num_draft_tokens,
        prompts=len(results),
        rounds=len(rounds),
        drafted=drafted,
        accepted=accepted,
        acceptance_length=acceptance_length(rounds),
        accepted_per_round=_rate(accepted, len(rounds)),
        acceptance_rate=_rate(accepted, drafted),
        unconditional_K=unconditional_K,
        conditional_K=conditional_K,
        new_tokens=sum(r.new_tokens for r in results),
        tokens_per_second=speed,
        baseline_tokens_per_second=baseline_speed,
        speedup=_rate(speed, baseline_speed),
        lossless=not mismatches if is_greedy else None,
        lossless_note="" if is_greedy else NOT_COMPARED,
        mismatches=mismatches,
        acceptance_length_by_category={
            name: acceptance_length(_rounds([r for r in results if r.category == name]))
            for name in categories
        },
    )


def _rounds(results: Iterable[PromptResult]) -> list[Round]:
    return [r for result in results for r in result.rounds]


def _rate(amount: float, of: float) -> float:
    return amount / of if of else 0.0


def measure(
    target: Target,
    export_folder: Path,
    config: EvalConfig,
    conversations: Sequence[Conversation],
    folder: Path,
) -> AcceptanceReport:
    """The evaluation stage: always of the exported head, read as a server reads it.

    Args:
        target: the model the head was trained for.
        export_folder: serving bundle.
        config: how to decode; `prompts` and `limit` were applied to `conversations` already.
        conversations: held-out prompts, user turns only.
        folder: of this stage.

    Raises:
        ValueError: the bundle is broken or made for another target, a prompt is too long, or the
            folder holds another measurement.
    """
    drafter = load_drafter(target, export_folder)
    stage = Stage(folder, "evaluation", _settings(target, export_folder, config, conversations))
    if stage.is_complete:
        return read_report(folder / REPORT)
    results = _read_results(folder / ROUNDS)
    todo = [c for c in conversations if c.id not in results]
    with (
        Meter("evaluation", len(conversations), unit="prompt") as meter,
        (folder / ROUNDS).open("a", encoding="utf-8") as log,
    ):
        meter.skip(len(results))
        if todo:
            player = _Player(target, drafter, config)
            player.warm_up(todo[0])
        for conversation in todo:
            results[conversation.id] = player.play(conversation)
            line = json.dumps(dataclasses.asdict(results[conversation.id]), ensure_ascii=False)
            log.write(line + "\n")
            log.flush()
            os.fsync(log.fileno())
            meter.advance(1, f"tau {acceptance_length(_rounds(results.values())):.3f}")
    report = summarise(
        [results[c.id] for c in conversations],
        num_draft_tokens=config.num_draft_tokens,
        is_greedy=_sampling(config).is_greedy,
    )
    write_json(folder / REPORT, dataclasses.asdict(report))
    stage.complete([ROUNDS, REPORT], acceptance_length=report.acceptance_length)
    return report


def load_drafter(target: Target, export_folder: Path) -> EagleDrafter:
    """Reads a serving bundle for decoding beside `target`.

    Raises:
        ValueError: it is broken, or made for a target of another shape.
    """
    served = load_head(export_folder)
    geometry, model = served.head.geometry, target.config
    for key, found, wanted in (
        ("hidden_size", geometry.hidden_size, model.hidden_size),
        ("vocab_size", geometry.vocab_size, model.vocab_size),
    ):
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


def _settings(
    target: Target, export_folder: Path, config: EvalConfig, conversations: Sequence[Conversation]
) -> dict[str, Any]:
    return {
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "target_dtype": str(target.dtype),
        "export": value_hash([file_hash(export_folder / name) for name in (CONFIG, WEIGHTS)]),
        "prompt_ids": value_hash([c.id for c in conversations]),
        **dataclasses.asdict(config),
    }


def _sampling(config: EvalConfig) -> Sampling:
    return Sampling(temperature=config.temperature, top_p=config.top_p, top_k=config.top_k)


class _Player:
    """Plays prompts turn by turn, each turn without and with the head."""

    def __init__(self, target: Target, drafter: Drafter, config: EvalConfig) -> None:
        model = target.model()
        self._tokenizer, self._device = target.tokenizer(), target.device
        self._max_new_tokens = config.max_new_tokens
        self._stop_ids = stop_token_ids(target)
        self._baseline, self._speculative = (
            SpeculativeDecoder(
                model,
                each,
                num_draft_tokens=config.num_draft_tokens,
                sampling=_sampling(config),
                stop_ids=self._stop_ids,
            )
            for each in (NoDrafter(), drafter)
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
        turns: list[tuple[DecodeResult, DecodeResult]] = []
        for message in conversation.messages:
            history.append(message)
            if message.role != "user":
                continue
            prompt_ids = render_prompt(self._tokenizer, history)
            baseline = self._baseline.generate(prompt_ids, self._max_new_tokens, generator)
            speculative = self._speculative.generate(prompt_ids, self._max_new_tokens, generator)
            turns.append((baseline, speculative))
            history.append(Message(role="assistant", content=self._text(baseline.token_ids)))
        return PromptResult(
            id=conversation.id,
            category=conversation.category,
            rounds=tuple(r for _, speculative in turns for r in speculative.rounds),
            new_tokens=sum(len(speculative.token_ids) for _, speculative in turns),
            baseline_new_tokens=sum(len(baseline.token_ids) for baseline, _ in turns),
            seconds=sum(speculative.seconds for _, speculative in turns),
            baseline_seconds=sum(baseline.seconds for baseline, _ in turns),
            identical=all(baseline.token_ids == other.token_ids for baseline, other in turns),
        )

    def _text(self, token_ids: tuple[int, ...]) -> str:
        stop = token_ids[-1] in self._stop_ids
        kept = token_ids[:-1] if stop else token_ids
        return str(self._tokenizer.decode(list(kept), skip_special_tokens=False))


def render_prompt(tokenizer: PreTrainedTokenizerFast, history: Sequence[Message]) -> list[int]:
    """Token ids of a chat up to where the next answer begins."""
    chat = [{"role": message.role, "content": message.content} for message in history]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    token_ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return token_ids


def _read_results(path: Path) -> dict[str, PromptResult]:
    """Results of an interrupted run; a line it did not finish is cut off."""
    if not path.exists():
        return {}
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    rows = [json.loads(line) for line in whole.splitlines()]
    return {
        row["id"]: PromptResult(**{**row, "rounds": tuple(Round(**r) for r in row["rounds"])}) for row in rows
    }


def read_report(path: Path) -> AcceptanceReport:
    """Reads acceptance.json."""
    row: dict[str, Any] = read_json(path)
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}
    return AcceptanceReport(**fields)
