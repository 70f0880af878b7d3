"""At which load a server should stop to speculate: the same requests in batches of several sizes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from slipstream.data.progress import Meter
from slipstream.eval.batched import GREEDY, BatchedDecoder, BatchedHead, Served
from slipstream.eval.guard import SpeculationGuard
from slipstream.eval.verify import Sampling

REQUESTS_PER_ROW = 2
ALWAYS = SpeculationGuard(off_above=1 << 30, on_at=1 << 30)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadPoint:
    """One batch size."""

    batch_size: int
    acceptance_length: float
    tokens_per_second: float
    plain_tokens_per_second: float
    step_seconds: float
    """Plain target pass of the batch."""
    draft_seconds: float
    """Of a round."""
    verify_seconds: float
    """Of a round."""

    @property
    def speedup(self) -> float:
        """Measured, over all the work."""
        return self.tokens_per_second / self.plain_tokens_per_second

    @property
    def expected_speedup(self) -> float:
        """tau plain steps against one round, from the measured times; less noisy than the whole."""
        return self.acceptance_length * self.step_seconds / (self.draft_seconds + self.verify_seconds)


def measure_load(
    model: PreTrainedModel,
    head: BatchedHead,
    prompts: Sequence[Sequence[int]],
    *,
    batch_sizes: Sequence[int],
    num_draft_tokens: int,
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    sampling: Sampling = GREEDY,
) -> list[LoadPoint]:
    """Serves batches of every size, with twice as many requests, so that a free row is filled again."""
    points, generator = [], torch.Generator(model.device).manual_seed(0)
    with Meter("load", 2 * len(batch_sizes), unit="batch") as meter:
        for size in batch_sizes:
            chosen = [prompts[i % len(prompts)] for i in range(REQUESTS_PER_ROW * size)]
            results = []
            for num_drafts in (0, num_draft_tokens):
                decoder = BatchedDecoder(
                    model,
                    head,
                    num_draft_tokens=num_drafts,
                    max_batch=size,
                    max_new_tokens=max_new_tokens,
                    guard=ALWAYS,
                    stop_ids=stop_ids,
                    sampling=sampling,
                )
                results.append(decoder.serve(chosen, generator))
                meter.advance(1)
            points.append(_point(size, *results))
    return points


def _point(size: int, plain: Served, drafted: Served) -> LoadPoint:
    return LoadPoint(
        batch_size=size,
        acceptance_length=drafted.acceptance_length,
        tokens_per_second=drafted.num_tokens / drafted.seconds,
        plain_tokens_per_second=plain.num_tokens / plain.seconds,
        step_seconds=plain.verify_seconds / plain.rounds,
        draft_seconds=drafted.draft_seconds / drafted.rounds,
        verify_seconds=drafted.verify_seconds / drafted.rounds,
    )


def threshold(points: Sequence[LoadPoint]) -> int | None:
    """The largest concurrency at which speculation pays; None when it pays at every measured size.

    Between two measured sizes the crossing is taken from a straight line; 0: it never pays.
    """
    points = sorted(points, key=lambda point: point.batch_size)
    below = (0, 1.0)
    for point in points:
        gain = point.expected_speedup
        if gain < 1.0:
            size, before = below
            share = (before - 1.0) / max(before - gain, 1e-9)
            return int(size + share * (point.batch_size - size))
        below = (point.batch_size, gain)
    return None


def engine_settings(limit: int | None, *, num_draft_tokens: int, largest: int) -> Mapping[str, str]:
    """The engines' own settings for a threshold (vLLM: from, to, draft tokens)."""
    steps = [[1, largest, num_draft_tokens]]
    if limit is not None:
        steps = [[1, limit, num_draft_tokens], [limit + 1, max(largest, limit + 1), 0]]
        steps = [step for step in steps if step[0] <= step[1]]
    return {
        "vllm": f"--speculative-config '{json.dumps({'num_speculative_tokens_per_batch_size': steps})}'",
        "sglang": "--speculative-adaptive" if limit is not None else "",
    }
