"""Key-value cache that writes in place: no copy of the past at every step.

Shape suffixes: B batch row, N key-value head, T token, C capacity, H head size.
"""

from typing import Any

import torch
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
        self.capacity, self.length, self.rows = capacity, 0, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates for the shapes of the first call."""
        self.rows = key_states.shape[0]
        self.capacity = max(self.capacity, key_states.shape[2], MIN_CAPACITY)
        self.keys = self._allocate(key_states)
        self.values = self._allocate(value_states)
        self.is_initialized = True

    def _allocate(self, like_BNTH: Tensor) -> Tensor:
        _, heads, _, size = like_BNTH.shape
        return like_BNTH.new_empty(self.rows, heads, self.capacity, size)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends [B, N, T, H] states; returns views of everything kept."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        if end > self.capacity:
            self._grow(end)
        self.keys[: self.rows, :, self.length : end] = key_states
        self.values[: self.rows, :, self.length : end] = value_states
        self.length = end
        return self.keys[: self.rows, :, :end], self.values[: self.rows, :, :end]

    def _grow(self, needed: int) -> None:
        self.capacity = max(2 * self.capacity, needed)
        self._move(self.keys[: self.rows], self.values[: self.rows])

    def _move(self, *old: Tensor) -> None:
        """Allocates anew for keys and values and copies what is filled."""
        self.keys, self.values = (self._allocate(old_BNTH) for old_BNTH in old)
        for new_BNCH, old_BNTH in zip((self.keys, self.values), old, strict=True):
            new_BNCH[:, :, : self.length] = old_BNTH[:, :, : self.length]

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
        filled = [states_BNCH[: self.rows, :, : self.length] for states_BNCH in (self.keys, self.values)]
        self.rows *= repeats
        self._move(*(states_BNTH.repeat_interleave(repeats, dim=0) for states_BNTH in filled))

    def keep_rows(self, moves: tuple[Tensor, Tensor], rows: int) -> None:
        """Copies rows `moves[0]` onto rows `moves[1]`, then forgets all but the first `rows`."""
        source, destination = moves
        if source.numel():
            for states_BNCH in (self.keys, self.values):
                filled_BNTH = states_BNCH[:, :, : self.length]
                filled_BNTH[destination] = filled_BNTH[source]
        self.rows = rows


class PreallocatedCache(Cache):
    """Cache of a decoder: appends in place, drops a tail or rows at no cost.

    Sliding-window layers keep everything, so that a tail can be dropped; the mask limits what
    they see.
    """

    def __init__(self, num_layers: int, capacity: int = 0) -> None:
        """Begins empty.

        Args:
            num_layers: `config.num_hidden_layers`.
            capacity: tokens to allocate at first; more are allocated by doubling.
        """
        self._own_layers = [_Layer(capacity) for _ in range(num_layers)]
        super().__init__(layers=list(self._own_layers))

    def crop(self, length: int) -> None:
        """Keeps the first `length` tokens (transformers' own caches take how many to remove)."""
        for layer in self._own_layers:
            layer.length = min(layer.length, length)

    @torch.inference_mode()
    def keep_rows(self, indices: Tensor) -> None:
        """Row i becomes the old row `indices[i]`; the others are forgotten.

        Only rows that change place are copied: put the last rows into the gaps.
        """
        place = torch.arange(indices.numel(), device=indices.device)
        destination = (indices != place).nonzero()[:, 0]
        moves = (indices[destination], destination)
        for layer in self._own_layers:
            layer.keep_rows(moves, indices.numel())
