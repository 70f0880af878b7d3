"""A moving average of the weights, which decodes better than the weights of the last steps."""

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from slipstream.train import engine as distributed
from slipstream.train.checkpoint import HEAD, read_head

SHORTEST = 10
"""After n steps the decay is at most n / (n + SHORTEST): early weights are soon forgotten."""


class Average:
    """The weights that are shown to others: a float32 average of the head's, or the head's themselves.

    It is a function of the steps done, equal on every rank.
    """

    def __init__(self, head: nn.Module, decay: float, checkpoint: Path | None = None) -> None:
        """Starts at the head's weights, or goes on from a checkpoint; a decay of 0 averages nothing."""
        self._live, self._decay = head, decay
        self.head = head if decay == 0 else copy.deepcopy(head).float().requires_grad_(False)
        """The head to save, decode with and export."""
        if decay and checkpoint is not None:
            saved = read_head(checkpoint / HEAD) if distributed.rank() == 0 else {}
            self.head.load_state_dict(distributed.from_rank_0(saved))

    def to(self, device: torch.device) -> "Average":
        """Moves it to the device of the head."""
        self.head.to(device)
        return self

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes in the weights after optimizer step `step`."""
        if self._decay:
            decay = min(self._decay, step / (step + SHORTEST))
            for mean, live in zip(self.head.parameters(), self._live.parameters(), strict=True):
                mean.lerp_(live.float(), 1 - decay)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the average in the place of the weights while the block runs."""
        if not self._decay:
            yield
            return
        pairs = list(zip(self._live.parameters(), self.head.parameters(), strict=True))
        kept = [live.detach().clone() for live, _ in pairs]
        with torch.no_grad():
            for live, mean in pairs:
                live.copy_(mean)
        try:
            yield
        finally:
            with torch.no_grad():
                for (live, _), before in zip(pairs, kept, strict=True):
                    live.copy_(before)
