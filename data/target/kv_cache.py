"""Key-value cache that writes in place: no copy of the past at every step.

Shape suffixes: B batch row, N key-value head, T token, C capacity, H head size.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

MIN_CAPACITY = 64
"""Tokens of the first allocation."""


class _Layer(CacheLayerMixin):
    """Keys and values of one layer: the first `length` tokens of the first `rows` rows count."""

    keys: Tensor
    values: Tensor
    is_sliding = False
    is_croppable = True

    def __init__(self, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.capacity, self.length, self.rows = max(capacity, MIN_CAPACITY), 0, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Takes the shapes of the first call."""
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.rows = key_states.shape[0]
        self.is_initialized = True

    def filled(self) -> tuple[Tensor, Tensor]:
        """Views [B, N, T, H] of what counts."""
        return self.keys[: self.rows, :, : self.length], self.values[: self.rows, :, : self.length]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends [B, N, T, H] states; returns views of everything kept."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        if end > self.keys.shape[2]:
            room = max(self.capacity, 2 * self.keys.shape[2], end) - self.length
            self.keys, self.values = (F.pad(old_BNTH, (0, 0, 0, room)) for old_BNTH in self.filled())
        self.keys[: self.rows, :, self.length : end] = key_states
        self.values[: self.rows, :, self.length : end] = value_states
        self.length = end
        return self.filled()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that the next `query_length` tokens will see."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens kept."""
        return self.length

    def get_max_length(self) -> int:
        """-1: grows without limit."""
        return -1

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Gives every row `repeats` times: one common prefix becomes a batch."""
        self.keys, self.values = (
            states_BNCH[: self.rows].repeat_interleave(repeats, dim=0)
            for states_BNCH in (self.keys, self.values)
        )
        self.rows *= repeats


class PreallocatedCache(Cache):
    """Cache of `num_layers` layers: appends in place, drops a tail or rows at no cost.

    It begins with room for `capacity` tokens and doubles it when needed. Sliding-window layers keep
    everything, so that a tail can be dropped; the mask limits what they see.
    """

    def __init__(self, num_layers: int, capacity: int = 0) -> None:
        self._own_layers = [_Layer(capacity) for _ in range(num_layers)]
        super().__init__(layers=list(self._own_layers))

    def crop(self, length: int) -> None:
        """Keeps the first `length` tokens (transformers' own caches take how many to remove)."""
        for layer in self._own_layers:
            layer.length = min(layer.length, length)

    @torch.inference_mode()
    def keep_tail(self, start: int, places: Sequence[int]) -> None:
        """Keeps the tokens before `start`, where they are, and of those behind it the named ones.

        `places` ascend and count from `start`. Tokens that stay in their place are not copied.
        """
        first = next((i for i, place in enumerate(places) if place != i), len(places))
        moved = [start + place for place in places[first:]]
        for layer in self._own_layers:
            if moved:
                index = torch.tensor(moved, device=layer.keys.device)
                for states_BNCH in (layer.keys, layer.values):
                    target = states_BNCH[: layer.rows, :, start + first : start + len(places)]
                    target.copy_(states_BNCH[: layer.rows].index_select(2, index))
            layer.length = start + len(places)

    @torch.inference_mode()
    def keep_rows(self, indices: Tensor) -> None:
        """Row i becomes the old row `indices[i]`; the others are forgotten.

        Only rows that change place are copied: put the last rows into the gaps.
        """
        place = torch.arange(indices.numel(), device=indices.device)
        destination = (indices != place).nonzero()[:, 0]
        source = indices[destination]
        for layer in self._own_layers:
            for states_BNTH in layer.filled():
                states_BNTH[destination] = states_BNTH[source]
            layer.rows = indices.numel()
