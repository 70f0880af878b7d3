"""The numbers of a measurement, from what each prompt gave (definitions: docs/evaluation.md)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slipstream.eval.decoder import Round


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptResult:
    """One prompt, all its turns, by one drafter."""

    id: str
    category: str
    rounds: tuple[Round, ...]
    new_tokens: int
    baseline_new_tokens: int
    seconds: float
    baseline_seconds: float
    identical: bool
    """Whether both ways gave the same tokens, but for near-ties."""
    near_ties: int = 0
    """Answers that part where two logits of a half-precision target are all but equal."""


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
    """Every greedy answer equals plain decoding token for token, but for the `near_ties` of half
    precision; None when sampled."""
    near_ties: int
    mismatches: tuple[str, ...]
    """Ids of the prompts whose answers differ otherwise."""
    acceptance_length_by_category: dict[str, float]


def acceptance_length(rounds: Sequence[Round]) -> float:
    """tau of these rounds."""
    return 1.0 + sum(r.accepted for r in rounds) / max(len(rounds), 1)


def summarise(results: Sequence[PromptResult], *, num_draft_tokens: int, is_greedy: bool) -> AcceptanceReport:
    """Puts the results of all prompts together."""
    rounds = _rounds(results)
    drafted, accepted = sum(r.num_tokens for r in rounds), sum(r.accepted for r in rounds)
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
        near_ties=sum(r.near_ties for r in results) if is_greedy else 0,
        mismatches=mismatches,
        acceptance_length_by_category={
            name: acceptance_length(_rounds([r for r in results if r.category == name]))
            for name in sorted({r.category for r in results})
        },
    )


def _rounds(results: Iterable[PromptResult]) -> list[Round]:
    return [r for result in results for r in result.rounds]
