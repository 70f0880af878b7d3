"""The in-place cache against transformers' own."""

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from slipstream.data.target.kv_cache import MIN_CAPACITY, PreallocatedCache

NUM_LAYERS, VOCAB = 2, 50


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    return LlamaForCausalLM(config).eval()


def step(model: LlamaForCausalLM, cache: DynamicCache | PreallocatedCache, input_BT: Tensor) -> Tensor:
    """Logits of the new tokens."""
    with torch.inference_mode():
        logits: Tensor = model(input_ids=input_BT, cache=cache, use_cache=True).logits
    return logits


def tokens(num_rows: int, num_tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (num_rows, num_tokens), generator=torch.Generator().manual_seed(seed))


def test_equals_dynamic_cache_through_growth(model: LlamaForCausalLM) -> None:
    ours, theirs = PreallocatedCache(NUM_LAYERS), DynamicCache()
    for i, num_new in enumerate([MIN_CAPACITY - 1, 1, 1, 5, 1, 2 * MIN_CAPACITY, 1]):
        input_BT = tokens(3, num_new, seed=i)
        torch.testing.assert_close(step(model, ours, input_BT), step(model, theirs, input_BT))
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert ours.get_mask_sizes(4, 0) == theirs.get_mask_sizes(4, 0)


def test_appending_does_not_copy_the_past(model: LlamaForCausalLM) -> None:
    cache = PreallocatedCache(NUM_LAYERS, capacity=20)
    step(model, cache, tokens(2, 5))
    place = cache.layers[0].keys.data_ptr()
    step(model, cache, tokens(2, 15))
    assert cache.layers[0].keys.data_ptr() == place


def test_crop_forgets_the_tail(model: LlamaForCausalLM) -> None:
    cache, fresh = PreallocatedCache(NUM_LAYERS), PreallocatedCache(NUM_LAYERS)
    step(model, cache, tokens(2, 9))
    step(model, cache, tokens(2, 4, seed=1))
    cache.crop(9)
    step(model, fresh, tokens(2, 9))
    after = tokens(2, 3, seed=2)
    assert torch.equal(step(model, cache, after), step(model, fresh, after))


@pytest.mark.parametrize("indices", [[0, 1, 2, 3, 4], [0, 4, 2], [3], [4, 3, 2, 1, 0]])
def test_keep_rows(model: LlamaForCausalLM, indices: list[int]) -> None:
    cache, fresh = PreallocatedCache(NUM_LAYERS), PreallocatedCache(NUM_LAYERS)
    start, after = tokens(5, 7), tokens(5, 2, seed=1)
    step(model, cache, start)
    cache.keep_rows(torch.tensor(indices))
    step(model, fresh, start[indices])
    torch.testing.assert_close(step(model, cache, after[indices]), step(model, fresh, after[indices]))
    grown = tokens(5, MIN_CAPACITY, seed=2)[indices]
    torch.testing.assert_close(step(model, cache, grown), step(model, fresh, grown))


def test_one_prefix_becomes_many_rows(model: LlamaForCausalLM) -> None:
    cache, fresh = PreallocatedCache(NUM_LAYERS), PreallocatedCache(NUM_LAYERS)
    prefix, after = tokens(1, 6), tokens(4, 3, seed=1)
    step(model, cache, prefix)
    cache.batch_repeat_interleave(4)
    step(model, fresh, prefix.expand(4, -1))
    torch.testing.assert_close(step(model, cache, after), step(model, fresh, after))
