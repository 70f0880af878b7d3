"""The stand-in kernels against their definitions."""

import pytest
import torch

from slipstream.eval.engines import sglang_kernels as kernels


def attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One query over all keys, head by head."""
    heads = []
    for n in range(query.shape[0]):
        weights = (keys[:, n // 2] @ query[n] * 0.5).softmax(0)
        heads.append(weights @ values[:, n // 2])
    return torch.stack(heads)


def test_extend_and_decode_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    key_pool, value_pool = torch.randn(2, 12, 2, 4, generator=generator)
    slots = torch.tensor([[0, 0, 0, 0, 0], [7, 3, 9, 1, 5]], dtype=torch.int32)
    query, out = torch.randn(3, 4, 4, generator=generator), torch.zeros(3, 4, 4)
    request = torch.tensor([1])
    kernels.extend_attention_cpu(
        query, query, query, out, key_pool, value_pool, 1.0, 1.0, slots, request,
        torch.tensor([5]), torch.tensor([3]), torch.tensor([0]), 3, 0.5, 0.0, False, 0, None, None, None,
        True,
    )  # fmt: skip
    rows = slots[1].long()
    for i in range(3):
        seen = rows[: 3 + i]
        torch.testing.assert_close(out[i], attention(query[i], key_pool[seen], value_pool[seen]))
    new_key, new_value = torch.randn(2, 1, 2, 4, generator=generator)
    kernels.decode_attention_cpu(
        query[:1], key_pool, value_pool, 1.0, 1.0, out[:1], new_key, new_value, torch.tensor([5]),
        torch.empty(0), slots, request, torch.tensor([5]), 0.5, 0.0, False, 0, None, None,
    )  # fmt: skip
    assert torch.equal(key_pool[5], new_key[0])
    torch.testing.assert_close(out[0], attention(query[0], key_pool[rows], value_pool[rows]))


def test_a_chain_is_accepted_up_to_its_first_miss() -> None:
    width = 4
    index, child, sibling = (torch.zeros(2, width, dtype=torch.int64) for _ in range(3))
    positions, mask = torch.zeros(8, dtype=torch.int64), torch.zeros(32, dtype=torch.bool)
    kernels.build_tree_kernel_efficient_cpu(
        torch.empty(0), torch.empty(0), torch.tensor([5, 9]), mask, positions, index, child, sibling,
        1, 3, width, 1,
    )  # fmt: skip
    assert positions.tolist() == [5, 6, 7, 8, 9, 10, 11, 12]
    assert child.tolist() == [[1, 2, 3, -1]] * 2
    assert mask.view(2, 4, 4)[1].sum(1).tolist() == [1, 2, 3, 4]
    predicts = torch.zeros(8, dtype=torch.int32)
    accept_index, accepted = torch.full((2, width), -1), torch.zeros(2, dtype=torch.int64)
    kernels.verify_tree_greedy_cpu(
        predicts=predicts, accept_index=accept_index, accept_token_num=accepted,
        candidates=torch.tensor([[1, 2, 3, 4], [1, 7, 8, 9]]),
        retrive_index=index, retrive_next_token=child, retrive_next_sibling=sibling,
        target_predict=torch.tensor([2, 3, 5, 6, 7, 8, 9, 4]),
    )  # fmt: skip
    assert accepted.tolist() == [2, 3]
    assert accept_index.tolist() == [[0, 1, 2, -1], [4, 5, 6, 7]]
    assert predicts.tolist() == [2, 3, 5, 0, 7, 8, 9, 4]


def test_slots_follow_the_requests() -> None:
    pool = torch.arange(20, dtype=torch.int32).view(2, 10)
    out = torch.zeros(5, dtype=torch.int64)
    start, end = torch.tensor([2, 0]), torch.tensor([5, 2])
    kernels.assign_extend_cache_locs_cpu(torch.tensor([1, 0]), pool, start, end, out, 10)
    assert out.tolist() == [12, 13, 14, 0, 1]
    kernels.assign_req_to_token_pool_cpu(torch.tensor([1, 0]), pool, start, end, torch.arange(50, 55), 10)
    assert pool[1, 2:5].tolist() == [50, 51, 52]
    bonus = torch.zeros(2, dtype=torch.int64)
    tokens = torch.tensor([[5, 6, 0], [7, 8, 9]])
    kernels.fill_bonus_tokens_cpu(tokens, torch.tensor([2, 3]), bonus, 3)
    assert bonus.tolist() == [6, 9]


def test_trees_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="chains only"):
        kernels.build_draft_decode_metadata_cpu(torch.empty(0), torch.empty(0), torch.empty(0), 2, 3, 4)
