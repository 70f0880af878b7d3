"""Key-value caches for rows of different lengths: a token's column is its position.

What a rejected draft left behind lies at columns that the next tokens of that row overwrite before
they see them, so nothing is dropped and nothing is padded.

Shape suffixes: B row, N key-value head, T new token, S column, H head size, P draft layer.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from slipstream.drafters.config import DraftGeometry
from slipstream.drafters.ttt_attention import cached_attention


class Columns:
    """Where the next forward pass writes, and how far it sees; shared by all layers."""

    def __init__(self, num_rows: int, capacity: int, device: torch.device) -> None:
        self.num_rows, self.capacity, self.device = num_rows, capacity, device
        self.rows, self.end = slice(0, 0), 0
        self.position_BT = torch.empty(0, 0, dtype=torch.int64, device=device)

    def place(self, rows: slice, position_BT: Tensor, end: int) -> None:
        """The next pass is of `rows`, its tokens at these positions, all of them below `end`."""
        self.rows, self.position_BT, self.end = rows, position_BT, end
        self._row_B1 = torch.arange(rows.start, rows.stop, device=self.device)[:, None]

    def visible_BTS(self) -> Tensor:
        """bool; every token sees its row up to itself."""
        return torch.arange(self.end, device=self.device) <= self.position_BT[..., None]

    def write(self, buffer_BSNH: Tensor, states_BTNH: Tensor) -> Tensor:
        """Puts new states in their places; a view [B, S, N, H] of what the rows hold."""
        buffer_BSNH[self._row_B1, self.position_BT] = states_BTNH
        return buffer_BSNH[self.rows, : self.end]


class _RaggedLayer(CacheLayerMixin):
    is_sliding = False

    def __init__(self, columns: Columns) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._columns = columns

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        columns, (_, heads, _, size) = self._columns, key_states.shape
        shape = (columns.num_rows, columns.capacity, heads, size)
        self.keys, self.values = (key_states.new_zeros(shape) for _ in range(2))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        pairs = ((self.keys, key_states), (self.values, value_states))
        key, value = (
            self._columns.write(buffer, new.transpose(1, 2)).transpose(1, 2) for buffer, new in pairs
        )
        return key, value

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._columns.end, 0

    def get_seq_length(self) -> int:
        return self._columns.end

    def get_max_length(self) -> int:
        return self._columns.capacity


class RaggedCache(Cache):
    """The target's cache of `columns.num_rows` rows."""

    def __init__(self, num_layers: int, columns: Columns) -> None:
        self.columns = columns
        self._own_layers = [_RaggedLayer(columns) for _ in range(num_layers)]
        super().__init__(layers=list(self._own_layers))

    def inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Mask and positions of the pass that was placed."""
        visible_BTS = self.columns.visible_BTS()
        mask_BTS = torch.zeros(visible_BTS.shape, dtype=dtype, device=visible_BTS.device)
        mask_BTS.masked_fill_(~visible_BTS, torch.finfo(dtype).min)
        return {"attention_mask": mask_BTS[:, None], "position_ids": self.columns.position_BT}

    def move_row(self, source: int, destination: int) -> None:
        """Row `destination` becomes a copy of row `source`."""
        for layer in self._own_layers:
            assert layer.keys is not None and layer.values is not None
            for buffer in (layer.keys, layer.values):
                buffer[destination] = buffer[source]


class RaggedDraftCache:
    """The same for the layers of a draft head (`slipstream.drafters.layers.DraftCache`)."""

    def __init__(self, geometry: DraftGeometry, columns: Columns, dtype: torch.dtype) -> None:
        shape = (columns.num_rows, columns.capacity, geometry.num_key_value_heads, geometry.head_dim)
        self.columns = columns
        self._buffers = [
            [torch.zeros(shape, dtype=dtype, device=columns.device) for _ in range(2)]
            for _ in range(geometry.num_layers)
        ]

    def attend(
        self, layer: int, query_BTNH: Tensor, key_BTMH: Tensor, value_BTMH: Tensor, visible_TS: Tensor | None
    ) -> Tensor:
        """See `DraftCache`; every token sees its row up to itself."""
        pairs = zip(self._buffers[layer], (key_BTMH, value_BTMH), strict=True)
        key, value = (self.columns.write(buffer, new).transpose(1, 2) for buffer, new in pairs)
        return cached_attention(query_BTNH, key, value, self.columns.visible_BTS()[:, None])

    def advance(self, num_rows: int) -> None:
        """See `DraftCache`; here positions say where rows stand."""

    def move_row(self, source: int, destination: int) -> None:
        """Row `destination` becomes a copy of row `source`."""
        for buffers in self._buffers:
            for buffer in buffers:
                buffer[destination] = buffer[source]


def pad_rows(rows: list[Tensor], fill: int | float) -> Tensor:
    """Rows [T_b, ...] of different lengths as one [B, T, ...], filled behind their ends.

    >>> pad_rows([torch.tensor([1, 2]), torch.tensor([3])], 0)
    tensor([[1, 2],
            [3, 0]])
    """
    longest = max(map(len, rows))
    padded = [F.pad(row, (0, 0) * (row.dim() - 1) + (0, longest - len(row)), value=fill) for row in rows]
    return torch.stack(padded)
