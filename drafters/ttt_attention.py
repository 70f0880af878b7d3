"""Attention of the draft layer: over the cache when decoding, over base and chain when unrolling.

Shapes: B batch, T rows of the pack, R unrolled rows, S cached rows, N query heads, M key/value
heads, G = N/M, H head size, J chain steps.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


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


def unrolled_attention(
    query_RNH: Tensor,
    key_TMH: Tensor,
    value_TMH: Tensor,
    chain: Sequence[tuple[Tensor, Tensor]],
    row_R: Tensor,
    segments: Sequence[tuple[int, int, int, int]],
) -> Tensor:
    """Attention of some rows over the step-0 keys before them and over their own chain.

    Row t sees the step-0 keys of rows <= t of its document and the keys that row t itself made at
    the steps since (ALGORITHMS.md section 2), so the chain adds one score per step and row, never
    a matrix.

    Args:
        query_RNH: queries of the unrolled rows, in pack order.
        key_TMH: step-0 keys of every row of the pack.
        value_TMH: step-0 values.
        chain: for each step 1..k the keys and values [R, M, H] of these same rows.
        row_R: index of each row in the pack.
        segments: for each document with unrolled rows: first and end row in R, first row in T and
            the end of the keys these rows can see in T.

    Returns:
        [R, N*H].
    """
    num_heads, num_kv_heads = query_RNH.shape[1], key_TMH.shape[1]
    query_RMGH = (query_RNH / math.sqrt(query_RNH.shape[-1])).unflatten(1, (num_kv_heads, -1))
    chain_scores, chain_values = None, None
    if chain:
        chain_keys_RMJH = torch.stack([key for key, _ in chain], dim=2)
        chain_values = torch.stack([value for _, value in chain], dim=2)
        chain_scores = query_RMGH @ chain_keys_RMJH.transpose(-1, -2)
    pieces = []
    for first, end, key_first, key_end in segments:
        query_MXH = query_RMGH[first:end].transpose(0, 1).flatten(1, 2)
        keys_MSH = key_TMH[key_first:key_end].transpose(0, 1)
        scores_MRGS = (query_MXH @ keys_MSH.transpose(-1, -2)).unflatten(1, (end - first, -1))
        column_S = torch.arange(key_first, key_end, device=row_R.device)
        hidden_RS = column_S > row_R[first:end, None]
        scores_MRGS = scores_MRGS.masked_fill(hidden_RS[:, None], -torch.inf)
        if chain_scores is not None:
            own_MRGJ = chain_scores[first:end].transpose(0, 1)
            scores_MRGS = torch.cat((scores_MRGS, own_MRGJ), dim=-1)
        weights = torch.softmax(scores_MRGS.float(), dim=-1).to(query_RNH.dtype)
        base = weights[..., : key_end - key_first].flatten(1, 2)
        values_MSH = value_TMH[key_first:key_end].transpose(0, 1)
        out_MRGH = (base @ values_MSH).unflatten(1, (end - first, -1))
        out_RMGH = out_MRGH.transpose(0, 1)
        if chain_values is not None:
            own_RMGJ = weights[..., key_end - key_first :].transpose(0, 1)
            out_RMGH = out_RMGH + own_RMGJ @ chain_values[first:end]
        pieces.append(out_RMGH.reshape(end - first, num_heads, -1))
    return torch.cat(pieces).flatten(1)
