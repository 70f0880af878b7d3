"""Where a drafter is good and where it fails: tau by suite, category, context length and position."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.eval.decoder import Round
from slipstream.eval.player import PlayedPrompt, Turn

NUM_RESAMPLES, SEED = 1000, 0
INTERVAL = (2.5, 97.5)
"""Percentiles of the bootstrap."""
CONTEXT_BOUNDS = (0, 128, 512, 1024, 2048, 4096, 8192)
POSITION_BOUNDS = (0, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tau:
    """Acceptance length of some rounds with its 95 % interval over prompts."""

    prompts: int
    rounds: int
    tau: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Breakdown:
    """tau of one drafter, cut in every direction."""

    overall: Tau
    by_suite: dict[str, Tau]
    by_category: dict[str, Tau]
    by_context: dict[str, Tau]
    """By the tokens of the prompt."""
    by_position: dict[str, Tau]
    """By the tokens of the answer before the round."""


def break_down(played: Sequence[PlayedPrompt], name: str) -> Breakdown:
    """The numbers of drafter `name`."""

    def by(key: Callable[[PlayedPrompt], str]) -> dict[str, Tau]:
        labels = sorted({key(prompt) for prompt in played})
        return {label: _tau(_rounds([p for p in played if key(p) == label], name)) for label in labels}

    return Breakdown(
        overall=_tau(_rounds(played, name)),
        by_suite=by(lambda prompt: prompt.suite),
        by_category=by(lambda prompt: prompt.category or "(none)"),
        by_context=_bucketed(played, name, CONTEXT_BOUNDS, _context_of_rounds),
        by_position=_bucketed(played, name, POSITION_BOUNDS, _position_of_rounds),
    )


def _rounds(played: Iterable[PlayedPrompt], name: str) -> list[list[Round]]:
    return [[r for turn in prompt.answers[name] for r in turn.rounds] for prompt in played]


def _context_of_rounds(turn: Turn) -> list[int]:
    return [turn.prompt_tokens] * len(turn.rounds)


def _position_of_rounds(turn: Turn) -> list[int]:
    places, place = [], 1
    for r in turn.rounds:
        places.append(place)
        place += r.accepted + 1
    return places


def _bucketed(
    played: Sequence[PlayedPrompt],
    name: str,
    bounds: Sequence[int],
    places: Callable[[Turn], list[int]],
) -> dict[str, Tau]:
    buckets: list[list[list[Round]]] = [[] for _ in bounds]
    for prompt in played:
        own: list[list[Round]] = [[] for _ in bounds]
        for turn in prompt.answers[name]:
            for place, r in zip(places(turn), turn.rounds, strict=True):
                own[int(np.searchsorted(bounds, place, side="right")) - 1].append(r)
        for bucket, rounds in zip(buckets, own, strict=True):
            if rounds:
                bucket.append(rounds)
    labels = [f"{a}-{b - 1}" for a, b in zip(bounds[:-1], bounds[1:], strict=True)] + [f"{bounds[-1]}+"]
    return {label: _tau(bucket) for label, bucket in zip(labels, buckets, strict=True) if bucket}


def _tau(rounds_by_prompt: Sequence[Sequence[Round]]) -> Tau:
    """Resamples whole prompts, since the rounds of one are not independent.

    >>> _tau([[Round(drafted=3, accepted=1)], [Round(drafted=3, accepted=1)]])
    Tau(prompts=2, rounds=2, tau=2.0, low=2.0, high=2.0)
    """
    counts = np.array([len(rounds) for rounds in rounds_by_prompt], dtype=np.float64)
    accepted = np.array([sum(r.accepted for r in rounds) for rounds in rounds_by_prompt], dtype=np.float64)
    num_prompts, total = len(counts), max(counts.sum(), 1.0)
    tau = 1.0 + accepted.sum() / total
    draws = np.random.default_rng(SEED).integers(num_prompts, size=(NUM_RESAMPLES, num_prompts))
    resampled = 1.0 + accepted[draws].sum(1) / np.maximum(counts[draws].sum(1), 1.0)
    low, high = np.percentile(resampled, INTERVAL)
    return Tau(
        prompts=num_prompts, rounds=int(counts.sum()), tau=float(tau), low=float(low), high=float(high)
    )
