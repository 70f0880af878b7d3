"""Merged attention against a dense softmax, for every type and for the pieces of both backends."""

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_mask, flex_attention

from slipstream.drafters import ttt_attention
from slipstream.drafters.ttt_attention import (
    AttentionRows,
    Chain,
    attention_rows,
    merge_chain,
    unrolled_attention,
    visible,
)

STARTS = (0, 150, 153, 300)
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16


def make_inputs(
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[Chain], AttentionRows]:
    """Every second row of a first chain step, every fourth at the step that asks."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    before = np.arange(0, 300, 2)
    now = np.arange(0, 300, 4)
    rows = attention_rows(now, STARTS)
    chain = [
        Chain(random(150, KV_HEADS, HEAD_DIM), random(150, KV_HEADS, HEAD_DIM), torch.from_numpy(now // 2)),
        Chain(random(75, KV_HEADS, HEAD_DIM), random(75, KV_HEADS, HEAD_DIM), torch.arange(75)),
    ]
    assert len(before) == 150 and len(now) == 75
    key, value = (random(300, KV_HEADS, HEAD_DIM) for _ in range(2))
    return random(75, HEADS, HEAD_DIM), key, value, chain, rows


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chain: list[Chain], rows: AttentionRows
) -> torch.Tensor:
    groups, row = HEADS // KV_HEADS, rows.row_R
    document = torch.bucketize(torch.arange(300), torch.tensor(STARTS[1:]), right=True)
    sees = (document[row][:, None] == document) & (torch.arange(300) <= row[:, None])
    scores = torch.einsum("rnh,tnh->nrt", query, key.repeat_interleave(groups, 1)).masked_fill(
        ~sees, -torch.inf
    )
    own = [c.key_PMH[c.place_R].repeat_interleave(groups, 1) for c in chain]
    scores = torch.cat([scores, *[(query * k).sum(-1).T[..., None] for k in own]], -1)
    weights = (scores / HEAD_DIM**0.5).softmax(-1)
    out = torch.einsum("nrt,tnh->rnh", weights[..., :300], value.repeat_interleave(groups, 1))
    for j, c in enumerate(chain):
        out = out + weights[..., 300 + j].T[..., None] * c.value_PMH[c.place_R].repeat_interleave(groups, 1)
    return out.flatten(1)


@pytest.mark.parametrize("num_chain", [0, 1, 2])
def test_equals_a_dense_softmax(num_chain: int) -> None:
    query, key, value, chain, rows = make_inputs(torch.float32)
    chain = chain[:num_chain]
    leaves = [query, key, value, *[x for c in chain for x in c[:2]]]
    out, wanted = (f(query, key, value, chain, rows) for f in (unrolled_attention, dense))
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    found, expected = (torch.autograd.grad((x * weights).sum(), leaves) for x in (out, wanted))
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() < 1e-5 * b.norm()


def test_bfloat16_stays_bfloat16_and_close() -> None:
    query, key, value, chain, rows = make_inputs(torch.bfloat16)
    out = unrolled_attention(query, key, value, chain, rows)
    out.sum().backward()
    exact = dense(*(x.detach().float() for x in (query, key, value)), [
        Chain(c.key_PMH.detach().float(), c.value_PMH.detach().float(), c.place_R) for c in chain
    ], rows)  # fmt: skip
    assert out.dtype is query.grad.dtype is chain[0].key_PMH.grad.dtype is torch.bfloat16  # type: ignore[union-attr]
    torch.testing.assert_close(out.float(), exact, rtol=0.05, atol=0.05)


def test_only_queries_outputs_and_log_sum_exps_are_kept() -> None:
    """Nothing of the size rows x keys, and no copy of the base keys, survives the forward pass."""
    query, key, value, chain, rows = make_inputs(torch.float32)
    kept: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        unrolled_attention(query, key, value, chain, rows)
    given = [query, key, value, *[x for c in chain for x in c]]
    inputs = {x.untyped_storage().data_ptr() for x in given}
    assert sum(size for place, size in kept.items() if place not in inputs) == 4 * (
        query.numel() + 75 * HEADS
    )


def test_the_cuda_mask_sees_the_same_keys() -> None:
    *_, rows = make_inputs(torch.float32)
    mask = create_mask(visible(rows), 1, 1, 75, 300, device="cpu")[0, 0]
    for row, sees in zip(rows.row_R.tolist(), mask, strict=True):
        first = max(start for start in STARTS if start <= row)
        assert sees.nonzero()[:, 0].tolist() == list(range(first, row + 1))


def test_the_cuda_merge_is_differentiable_in_everything() -> None:
    """Merging with autograd, as the CUDA backend does, gives the gradients of the CPU backend."""
    query, key, value, chain, rows = make_inputs(torch.float32)
    leaves = [query, key, value, *[x for c in chain for x in c[:2]]]
    scores = torch.einsum("rnh,tnh->rnt", query, key.repeat_interleave(3, 1)) / HEAD_DIM**0.5
    sees = create_mask(visible(rows), 1, 1, 75, 300, device="cpu")[0, 0]
    scores = scores.masked_fill(~sees[:, None], -torch.inf)
    base = torch.einsum("rnt,tnh->rnh", scores.softmax(-1), value.repeat_interleave(3, 1))
    own = [torch.stack([c[i][c.place_R] for c in chain], 2) for i in (0, 1)]
    merged, _ = merge_chain(base, scores.logsumexp(-1), query, *own)
    wanted = unrolled_attention(query, key, value, chain, rows)
    torch.testing.assert_close(merged.flatten(1), wanted, rtol=1e-5, atol=1e-5)
    found, expected = (torch.autograd.grad(x.square().sum(), leaves) for x in (merged, wanted))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cuda_backend_without_its_compiler(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole CUDA path forwards on a CPU, where FlexAttention runs eagerly and has no gradient."""
    monkeypatch.setattr(ttt_attention, "_compiled_flex", lambda: flex_attention)
    query, key, value, chain, rows = make_inputs(dtype)
    chain = [Chain(*(x.detach() for x in step)) for step in chain]
    inputs = (query.detach(), key.detach(), value.detach(), chain, rows)
    out, wanted = ttt_attention._flex_attention(*inputs), unrolled_attention(*inputs)
    assert out.dtype is dtype
    tolerance = 1e-5 if dtype is torch.float32 else 0.05
    torch.testing.assert_close(out, wanted, rtol=tolerance, atol=tolerance)
