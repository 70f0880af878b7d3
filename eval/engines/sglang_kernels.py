"""Stand-ins for SGLang's compiled CPU kernels, which no package registry has: plain torch, chains only.

Everything else of SGLang runs unchanged. `install` makes a module `sgl_kernel` of them, and an inert
`torchvision`, whose published binaries do not load beside the CPU build of torch.

Shapes: X new rows of all requests, B requests, S cached rows, N query heads, M key/value heads, H head
size, W draft tokens of a request, the root included.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

INERT = ("sgl_kernel", "torchvision")


def extend_attention_cpu(
    query_XNH: Tensor,
    key_XMH: Tensor,
    value_XMH: Tensor,
    out_XNH: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    key_scale: float,
    value_scale: float,
    req_to_token: Tensor,
    request_B: Tensor,
    length_B: Tensor,
    num_new_B: Tensor,
    first_B: Tensor,
    max_new: int,
    scale: float,
    *others: Any,
) -> None:
    """Causal attention of each request's newest rows over all its rows, which the pool holds."""
    for b, length in enumerate(length_B.tolist()):
        first, num_new = int(first_B[b]), int(num_new_B[b])
        slots_S = req_to_token[request_B[b], :length].long()
        rows = slice(first, first + num_new)
        out_XNH[rows] = _attend(query_XNH[rows], key_pool[slots_S], value_pool[slots_S], scale)


def decode_attention_cpu(
    query_BNH: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    key_scale: float,
    value_scale: float,
    out_BNH: Tensor,
    key_BMH: Tensor,
    value_BMH: Tensor,
    slot_B: Tensor,
    scratch: Tensor,
    req_to_token: Tensor,
    request_B: Tensor,
    length_B: Tensor,
    scale: float,
    *others: Any,
) -> None:
    """Writes one new row per request and attends from it to all the request's rows."""
    key_pool[slot_B.long()] = key_BMH.view(-1, *key_pool.shape[1:])
    value_pool[slot_B.long()] = value_BMH.view(-1, *value_pool.shape[1:])
    for b, length in enumerate(length_B.tolist()):
        slots_S = req_to_token[request_B[b], :length].long()
        out_BNH[b : b + 1] = _attend(query_BNH[b : b + 1], key_pool[slots_S], value_pool[slots_S], scale)


def _attend(query_XNH: Tensor, key_SMH: Tensor, value_SMH: Tensor, scale: float) -> Tensor:
    num_new, num_all = query_XNH.shape[0], key_SMH.shape[0]
    mask_XS = torch.ones(num_new, num_all, dtype=torch.bool).tril(num_all - num_new)
    query, key, value = (x.transpose(0, 1)[None] for x in (query_XNH, key_SMH, value_SMH))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask_XS, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor, request_B: Tensor, length_B: Tensor, topk: int, steps: int, pool_length: int
) -> Tensor:
    """Slot table of a chain: what the request holds, the drafts behind it included."""
    _chains_only(topk)
    return req_to_token[request_B.long()]


def build_tree_kernel_efficient_cpu(
    parents: Tensor,
    chosen: Tensor,
    length_B: Tensor,
    tree_mask: Tensor,
    position_X: Tensor,
    index_BW: Tensor,
    next_token_BW: Tensor,
    next_sibling_BW: Tensor,
    topk: int,
    depth: int,
    width: int,
    mode: int,
) -> None:
    """A chain as a tree: each node's only child is the next one; the mask is causal."""
    _chains_only(topk)
    step_W = torch.arange(width)
    num_requests = length_B.shape[0]
    position_X.copy_((length_B[:, None] + step_W).flatten())
    index_BW.copy_(torch.arange(num_requests * width).view(num_requests, width))
    next_token_BW.copy_(torch.where(step_W + 1 < width, step_W + 1, -1))
    next_sibling_BW.fill_(-1)
    causal_WW = torch.ones(width, width, dtype=tree_mask.dtype).tril()
    tree_mask.view(-1)[: num_requests * width * width] = causal_WW.flatten().repeat(num_requests)


def verify_tree_greedy_cpu(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Accepts drafts while each equals the target's choice at the node before it."""
    target_BW = target_predict.view(candidates.shape)
    for b in range(candidates.shape[0]):
        same_W = candidates[b, 1:] == target_BW[b, :-1]
        num_accepted = int(same_W.long().cumprod(0).sum())
        kept_W = retrive_index[b, : num_accepted + 1].long()
        accept_index[b, : num_accepted + 1] = kept_W.to(accept_index.dtype)
        predicts[kept_W] = target_BW[b, : num_accepted + 1].to(predicts.dtype)
        accept_token_num[b] = num_accepted


def assign_req_to_token_pool_cpu(
    request_B: Tensor, req_to_token: Tensor, start_B: Tensor, end_B: Tensor, slots: Tensor, pool_length: int
) -> None:
    """Gives each request its new slots."""
    for request, start, end, part in _parts(request_B, start_B, end_B, slots):
        req_to_token[request, start:end] = part.to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    request_B: Tensor, req_to_token: Tensor, start_B: Tensor, end_B: Tensor, out: Tensor, pool_length: int
) -> None:
    """Reads the slots of a stretch of each request."""
    for request, start, end, part in _parts(request_B, start_B, end_B, out):
        part.copy_(req_to_token[request, start:end])


def _parts(
    request_B: Tensor, start_B: Tensor, end_B: Tensor, flat: Tensor
) -> list[tuple[int, int, int, Tensor]]:
    starts, ends = start_B.tolist(), end_B.tolist()
    sizes = [end - start for start, end in zip(starts, ends, strict=True)]
    return list(zip(request_B.tolist(), starts, ends, flat[: sum(sizes)].split(sizes), strict=True))


def assign_draft_cache_locs_contiguous_cpu(
    request_B: Tensor,
    req_to_token: Tensor,
    length_B: Tensor,
    out: Tensor,
    pool_length: int,
    topk: int,
    steps: int,
) -> None:
    """Slots of the drafts: those behind what the request holds."""
    _chains_only(topk)
    assign_extend_cache_locs_cpu(request_B, req_to_token, length_B, length_B + steps, out, pool_length)


def fill_bonus_tokens_cpu(tokens: Tensor, num_tokens_B: Tensor, bonus_B: Tensor, stride: int) -> None:
    """The last accepted token of each request."""
    last_B = torch.arange(num_tokens_B.shape[0]) * stride + num_tokens_B.long() - 1
    bonus_B.copy_(tokens.flatten()[last_B].view_as(bonus_B))


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, slots: Tensor, out: Tensor) -> None:
    """Slots of the accepted rows, one behind the other."""
    kept = accept_index.flatten()
    kept = kept[kept >= 0].long()
    out[: kept.numel()] = slots[kept].to(out.dtype)


def copy_all_layer_kv_cache_cpu(pointers: Tensor, strides: Tensor, to: Tensor, source: Tensor) -> None:
    """Moves accepted rows together; those of a chain already are."""
    if not torch.equal(to, source):
        raise NotImplementedError("the stand-in kernels verify chains only: topk 1")


def _chains_only(topk: int) -> None:
    if topk != 1:
        raise NotImplementedError("the stand-in kernels draft chains only: topk 1")


class _Inert(type):
    """Classes whose every attribute is such a class: imports succeed, use gives nothing."""

    def __getattr__(cls, name: str) -> "_Inert":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Inert(name, (), {})


class _InertModule(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> _Inert:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Inert(name, (), {})


class _InertFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        inert = name.split(".")[0] in INERT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if inert else None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _InertModule(spec.name)
        if spec.name == "sgl_kernel":
            kernels = {name: value for name, value in globals().items() if name.endswith("_cpu")}
            module.__dict__.update(kernels)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def install() -> None:
    """Makes the stand-ins importable in this process."""
    from transformers.utils import import_utils

    for name in ("is_torchvision_available", "is_torchvision_v2_available"):
        getattr(import_utils, name)()  # remembers the true answer, before the stand-in exists
    sys.meta_path.insert(0, _InertFinder())
    for kernel in (extend_attention_cpu, decode_attention_cpu):
        setattr(torch.ops.sgl_kernel, kernel.__name__, kernel)
