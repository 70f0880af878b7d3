"""The small forms of the cache: states in one byte an element, teachers as their likeliest tokens.

Shape suffixes as in `slipstream.data.types`.
"""

import torch
from torch import Tensor

from slipstream.data.config import Store

PEAKS = {Store.int8: 127.0, Store.fp8: 448.0}
"""Largest value of a code."""
CODES = {Store.int8: torch.int8, Store.fp8: torch.float8_e4m3fn}
LEAST_SCALE = 1e-30
"""Of a state that is all zeros."""
LOG_PROB_STEPS = 64.0
"""A log-probability is kept as round(64 sqrt(-log p)): within 1/64 nat near p = 1/e, finer above,
and down to p = 1e-7."""
UINT16_VOCABULARY = 1 << 16


def quantise(states_TLD: Tensor, store: Store) -> tuple[Tensor, Tensor]:
    """Codes [T, L, D] of one byte and bfloat16 scales [T, L]: state = code * scale."""
    states_TLD, peak = states_TLD.float(), PEAKS[store]
    scale_TL = (states_TLD.abs().amax(-1) / peak).clamp_min(LEAST_SCALE).bfloat16()
    # The rounded scale may be the smaller one, so the largest element is cut, by a 256th at most.
    codes_TLD = (states_TLD / scale_TL.float()[..., None]).clamp(-peak, peak)
    if store is Store.int8:
        codes_TLD = codes_TLD.round()
    return codes_TLD.to(CODES[store]), scale_TL


def dequantise(codes_TLD: Tensor, scale_TL: Tensor) -> Tensor:
    """The states, in bfloat16."""
    return codes_TLD.to(scale_TL.dtype) * scale_TL[..., None]


def top_tokens(log_probs_CV: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The likeliest `num` tokens, the likeliest first, and their log-probabilities, [C, E] each."""
    top = log_probs_CV.topk(min(num, log_probs_CV.shape[-1]))
    return top.indices, top.values


def id_type(vocab_size: int) -> torch.dtype:
    """Type in which token ids of top tokens are stored."""
    return torch.uint16 if vocab_size <= UINT16_VOCABULARY else torch.int32


def pack_log_probs(log_probs_PE: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [P, E] of one byte, and float32 [P], the mass of all other tokens."""
    codes_PE = (-log_probs_PE).clamp_min(0).sqrt().mul(LOG_PROB_STEPS).round().clamp(max=255)
    tail_P = 1 - log_probs_PE.double().exp().sum(-1)
    return codes_PE.to(torch.uint8), tail_P.clamp_min(0).float()


def unpack_log_probs(codes_PE: Tensor, tail_P: Tensor) -> Tensor:
    """Log-probabilities whose sum and the tail's mass make 1 exactly, whatever rounding did to each."""
    log_probs_PE = -(codes_PE.float() / LOG_PROB_STEPS).square()
    return log_probs_PE + torch.log1p(-tail_P)[:, None] - log_probs_PE.logsumexp(-1, keepdim=True)


def top_teacher(ids_PE: Tensor, log_probs_PE: Tensor) -> dict[str, Tensor]:
    """The teacher's fields of a sample that holds top tokens instead of last states."""
    return {
        "last_hidden_PD": log_probs_PE.new_empty(len(ids_PE), 0),
        "argmax_P": ids_PE[:, 0],
        "logsumexp_P": log_probs_PE.new_zeros(len(ids_PE)),  # of log-probabilities
        "top_ids_PE": ids_PE,
        "top_log_probs_PE": log_probs_PE,
    }
