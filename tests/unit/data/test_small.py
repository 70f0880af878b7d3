"""Small forms: what comes back is as near as their bytes allow."""

import pytest
import torch

from slipstream.data.config import Store
from slipstream.data.small import (
    dequantise,
    pack_log_probs,
    quantise,
    top_tokens,
    unpack_log_probs,
)


@pytest.mark.parametrize("store", [Store.int8, Store.fp8])
def test_a_state_comes_back_near_itself(store: Store) -> None:
    """Every token and layer has its own scale: a huge state beside a small one costs it nothing."""
    states_TLD = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(0))
    states_TLD *= torch.tensor([1e-4, 1.0, 3e4])[:, None]
    states_TLD[2] = 0
    codes_TLD, scale_TL = quantise(states_TLD, store)
    assert codes_TLD.element_size() == 1
    found_TLD = dequantise(codes_TLD, scale_TL)
    assert found_TLD.dtype is torch.bfloat16
    error_TL = (found_TLD.float() - states_TLD).norm(dim=-1)
    assert (error_TL <= {Store.int8: 0.012, Store.fp8: 0.04}[store] * states_TLD.norm(dim=-1)).all()
    assert (found_TLD[2] == 0).all()


def test_int8_by_hand() -> None:
    codes, scale = quantise(torch.tensor([[[127.0, -63.6, 0.4, 0.6]]]), Store.int8)
    assert (codes.tolist(), scale.tolist()) == ([[[127, -64, 0, 1]]], [[1.0]])


def test_top_tokens_and_their_tail() -> None:
    probability = torch.tensor([[0.5, 0.05, 0.25, 0.15, 0.05], [0.0, 0.001, 0.999, 0.0, 0.0]])
    ids, log_probs = top_tokens(probability.log(), 2)
    assert ids.tolist() == [[0, 2], [2, 1]]
    codes, tail = pack_log_probs(log_probs)
    assert codes.dtype is torch.uint8
    torch.testing.assert_close(tail, torch.tensor([0.25, 0.0]), rtol=0, atol=1e-6)
    found = unpack_log_probs(codes, tail).exp()
    torch.testing.assert_close(found.sum(-1), 1 - tail)
    torch.testing.assert_close(found, probability.gather(1, ids), rtol=0.03, atol=0)


def test_impossible_tokens_stay_almost_impossible() -> None:
    codes, tail = pack_log_probs(torch.tensor([[0.0, -torch.inf]]))
    assert unpack_log_probs(codes, tail).exp()[0, 1] < 1e-6
