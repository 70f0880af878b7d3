"""Attention of the draft layer: over the cache when decoding, over base and chain when unrolling.

Shapes: B batch, T rows of the pack, R unrolled rows, X rows of one block, S keys that the block
sees, N query heads, M key/value heads, G = N/M, H head size, J chain steps.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from slipstream.drafters.fused import apply

BLOCK_ROWS = 128
"""Query rows attended to at a time: enough for the matrix products, little for the mask."""

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def cached_attention(
    query_BTNH: Tensor, key_BMSH: Tensor, value_BMSH: Tensor, visible_TS: Tensor | None = None
) -> Tensor:
    """Attention of the T newest rows over all S cached rows: causal, or where `visible_TS` is true.

    Returns:
        [B, T, N*H].
    """
    num_new, num_all = query_BTNH.shape[1], key_BMSH.shape[2]
    mask_TS = visible_TS
    if num_new > 1 and mask_TS is None:
        mask_TS = torch.ones(num_new, num_all, dtype=torch.bool, device=query_BTNH.device)
        mask_TS = mask_TS.tril(num_all - num_new)
    out_BNTH = F.scaled_dot_product_attention(
        query_BTNH.transpose(1, 2), key_BMSH, value_BMSH, attn_mask=mask_TS, enable_gqa=True
    )
    return out_BNTH.transpose(1, 2).flatten(2)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRows:
    """Which base keys the unrolled rows see."""

    row_R: Tensor
    """int64; index of each row in the pack, ascending."""
    first_R: Tensor
    """int64; first row of each row's document."""
    blocks: Sequence[tuple[slice, slice]]
    """Rows of R that are attended to at a time, all of one document, and the keys of T that the
    last of them sees."""

    def to(self, device: torch.device) -> "AttentionRows":
        """Moves the indices to a device."""
        row_R, first_R = (x.to(device, non_blocking=True) for x in (self.row_R, self.first_R))
        return AttentionRows(row_R=row_R, first_R=first_R, blocks=self.blocks)


def attention_rows(rows: npt.NDArray[np.int64], document_starts: Sequence[int]) -> AttentionRows:
    """Some rows of a pack, ascending, and what they see.

    >>> attention_rows(np.array([1, 2, 5]), (0, 4, 8)).blocks
    [(slice(0, 2, None), slice(0, 3, None)), (slice(2, 3, None), slice(4, 6, None))]
    """
    starts = np.asarray(document_starts)
    bounds = np.searchsorted(rows, starts).tolist()
    return AttentionRows(
        row_R=torch.from_numpy(rows),
        first_R=torch.from_numpy(starts[np.searchsorted(starts, rows, side="right") - 1]),
        blocks=[
            (slice(start, stop), slice(key_first, int(rows[stop - 1]) + 1))
            for first, end, key_first in zip(bounds[:-1], bounds[1:], document_starts[:-1], strict=True)
            for start in range(first, end, BLOCK_ROWS)
            for stop in (min(start + BLOCK_ROWS, end),)
        ],
    )


class Chain(NamedTuple):
    """Keys and values of one earlier chain step, and where the rows of now stand among its rows."""

    key_PMH: Tensor
    value_PMH: Tensor
    place_R: Tensor


def unrolled_attention(
    query_RNH: Tensor, key_TMH: Tensor, value_TMH: Tensor, chain: Sequence[Chain], rows: AttentionRows
) -> Tensor:
    """Attention of some rows over the step-0 keys before them and over their own chain.

    Row t sees the step-0 keys of rows <= t of its document and the keys that row t itself made at
    the steps since (ALGORITHMS.md section 2), so the chain adds one score per step and row, never
    a matrix. Keys stay unexpanded under grouped queries and are never copied whole; memory is
    linear in R and T.

    Args:
        query_RNH: queries of the unrolled rows, in pack order.
        key_TMH: step-0 keys of every row of the pack.
        value_TMH: step-0 values.
        chain: steps 1..k.
        rows: which rows these are.

    Returns:
        [R, N*H].
    """
    if query_RNH.is_cuda:
        return _flex_attention(query_RNH, key_TMH, value_TMH, chain, rows)
    flat = [tensor for step in chain for tensor in step]
    out_RNH: Tensor = apply(_MergedAttention, rows, query_RNH, key_TMH, value_TMH, *flat)
    return out_RNH.flatten(1)


def _mask(row_X: Tensor, keys: slice, dtype: torch.dtype) -> Tensor:
    """[X, S]; minus infinity where a key lies behind the row."""
    column_S = torch.arange(keys.start, keys.stop)
    mask_XS = torch.zeros(row_X.numel(), column_S.numel(), dtype=dtype)
    return mask_XS.masked_fill_(column_S > row_X[:, None], -torch.inf)


def _heads(states_XNH: Tensor) -> Tensor:
    """[X, N, H] as the view [1, N, X, H] that the kernel reads."""
    return states_XNH.transpose(0, 1)[None]


def _chain_block(chain: Sequence[Chain], rows: slice) -> tuple[Tensor, Tensor]:
    """Chain keys and values of a block of rows, [X, M, J, H] each."""
    places = [step.place_R[rows] for step in chain]
    keys = [step.key_PMH.index_select(0, p) for step, p in zip(chain, places, strict=True)]
    values = [step.value_PMH.index_select(0, p) for step, p in zip(chain, places, strict=True)]
    return torch.stack(keys, dim=2), torch.stack(values, dim=2)


class _MergedAttention(torch.autograd.Function):
    """Flash attention over the base keys, merged with the chain by its log-sum-exp.

    The merged output and log-sum-exp handed to the flash backward give the exact gradients of the
    base part, so only queries, output and log-sum-exp are kept of a step.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: AttentionRows, query_RNH: Tensor, key_TMH: Tensor, value_TMH: Tensor, *flat: Tensor
    ) -> Tensor:
        chain = [Chain(*flat[i : i + 3]) for i in range(0, len(flat), 3)]
        out_RNH = torch.empty_like(query_RNH, memory_format=torch.contiguous_format)
        lse_RN = out_RNH.new_empty(out_RNH.shape[:2], dtype=torch.float32)
        for block, keys in rows.blocks:
            query_XNH = query_RNH[block]
            base, lse = flash(
                _heads(query_XNH),
                _heads(key_TMH[keys]),
                _heads(value_TMH[keys]),
                attn_mask=_mask(rows.row_R[block], keys, query_RNH.dtype),
            )
            out_XNH, lse_XN = base[0].transpose(0, 1), lse[0].T
            if chain:
                out_XNH, lse_XN = merge_chain(out_XNH, lse_XN, query_XNH, *_chain_block(chain, block))
            out_RNH[block], lse_RN[block] = out_XNH, lse_XN
        ctx.rows = rows
        ctx.save_for_backward(query_RNH, key_TMH, value_TMH, out_RNH, lse_RN, *flat)
        return out_RNH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RNH: Tensor) -> tuple[Tensor | None, ...]:
        query_RNH, key_TMH, value_TMH, out_RNH, lse_RN, *flat = ctx.saved_tensors
        chain = [Chain(*flat[i : i + 3]) for i in range(0, len(flat), 3)]
        grad_query = torch.empty_like(query_RNH)
        grad_key, grad_value = torch.zeros_like(key_TMH), torch.zeros_like(value_TMH)
        grad_chain = [(torch.zeros_like(step.key_PMH), torch.zeros_like(step.value_PMH)) for step in chain]
        for block, keys in ctx.rows.blocks:
            states = [_heads(x[block]) for x in (grad_RNH, query_RNH, out_RNH)]
            base = flash_backward(
                states[0],
                states[1],
                _heads(key_TMH[keys]),
                _heads(value_TMH[keys]),
                states[2],
                lse_RN[block].T[None],
                0.0,
                False,
                attn_mask=_mask(ctx.rows.row_R[block], keys, query_RNH.dtype),
            )
            grad_query[block] = base[0][0].transpose(0, 1)
            grad_key[keys] += base[1][0].transpose(0, 1)
            grad_value[keys] += base[2][0].transpose(0, 1)
            if chain:
                query_XNH, keys_XMJH, values_XMJH = _chain_backward(
                    query_RNH[block],
                    out_RNH[block],
                    lse_RN[block],
                    grad_RNH[block],
                    *_chain_block(chain, block),
                )
                grad_query[block] += query_XNH
                for j, (step, (to_key, to_value)) in enumerate(zip(chain, grad_chain, strict=True)):
                    place_X = step.place_R[block]
                    to_key.index_copy_(0, place_X, keys_XMJH[:, :, j])
                    to_value.index_copy_(0, place_X, values_XMJH[:, :, j])
        flat_grads = [grad for pair in grad_chain for grad in (*pair, None)]
        return None, grad_query, grad_key, grad_value, *flat_grads


def _chain_backward(
    query_XNH: Tensor,
    out_XNH: Tensor,
    lse_XN: Tensor,
    grad_XNH: Tensor,
    keys_XMJH: Tensor,
    values_XMJH: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the chain part with respect to query, chain keys and chain values."""
    groups, scale = (keys_XMJH.shape[1], -1), 1 / math.sqrt(query_XNH.shape[-1])
    query_XMGH, grad_XMGH = query_XNH.unflatten(1, groups), grad_XNH.unflatten(1, groups)
    scores_XMGJ = (query_XMGH @ keys_XMJH.transpose(-1, -2)).float() * scale
    weights_XMGJ = (scores_XMGJ - lse_XN.unflatten(1, groups)[..., None]).exp()
    delta_XN = (grad_XNH.float() * out_XNH).sum(-1)
    grad_weights = (grad_XMGH @ values_XMJH.transpose(-1, -2)).float()
    grad_scores = grad_weights - delta_XN.unflatten(1, groups)[..., None]
    grad_scores = (grad_scores * weights_XMGJ * scale).to(query_XNH.dtype)
    grad_values = weights_XMGJ.to(grad_XNH.dtype).transpose(-1, -2) @ grad_XMGH
    return (grad_scores @ keys_XMJH).flatten(1, 2), grad_scores.transpose(-1, -2) @ query_XMGH, grad_values


def _flex_attention(
    query_RNH: Tensor, key_TMH: Tensor, value_TMH: Tensor, chain: Sequence[Chain], rows: AttentionRows
) -> Tensor:
    """The same on CUDA: FlexAttention skips the blocks of keys that no row of a tile sees."""
    block_mask = create_block_mask(
        visible(rows), None, None, query_RNH.shape[0], key_TMH.shape[0], device=query_RNH.device
    )
    base, aux = _compiled_flex()(
        _heads(query_RNH),
        _heads(key_TMH),
        _heads(value_TMH),
        block_mask=block_mask,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    out_RNH: Tensor = base[0].transpose(0, 1)
    if chain:
        out_RNH, _ = merge_chain(out_RNH, aux.lse[0].T, query_RNH, *_chain_block(chain, slice(None)))
    return out_RNH.flatten(1)


@functools.cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention)


def visible(rows: AttentionRows) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """FlexAttention's mask function: from the first row of the document to the row itself."""

    def mask(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        sees: Tensor = (key >= rows.first_R[query]) & (key <= rows.row_R[query])
        return sees

    return mask


def merge_chain(
    base_XNH: Tensor, lse_XN: Tensor, query_XNH: Tensor, keys_XMJH: Tensor, values_XMJH: Tensor
) -> tuple[Tensor, Tensor]:
    """Adds the chain to base attention and its log-sum-exp; differentiable in everything."""
    groups, scale = (keys_XMJH.shape[1], -1), 1 / math.sqrt(query_XNH.shape[-1])
    scores_XMGJ = query_XNH.unflatten(1, groups) @ keys_XMJH.transpose(-1, -2)
    scores_XNJ = scores_XMGJ.flatten(1, 2).float() * scale
    merged_XN = torch.logaddexp(lse_XN, scores_XNJ.logsumexp(-1))
    weights_XNJ = (scores_XNJ - merged_XN[..., None]).exp().to(query_XNH.dtype)
    own_XNH = (weights_XNJ.unflatten(1, groups) @ values_XMJH).flatten(1, 2)
    share_XN = (lse_XN - merged_XN).exp().to(query_XNH.dtype)
    return torch.addcmul(own_XNH, base_XNH, share_XN[..., None]), merged_XN
