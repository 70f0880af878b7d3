"""Rotary angles and the draft cache."""

import pytest
import torch

from slipstream.drafters.layers import DraftCache, Rotary
from tests.heads import make_geometry, make_head


def test_rotary_keeps_relative_positions() -> None:
    rotary = Rotary(make_geometry())
    query, key = torch.randn(2, 1, 4, 16, generator=torch.Generator().manual_seed(0))

    def score(q: int, k: int) -> torch.Tensor:
        return (rotary(query, torch.tensor([q])) * rotary(key, torch.tensor([k]))).sum(-1)

    torch.testing.assert_close(score(7, 3), score(107, 103), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(score(0, 0), (query * key).sum(-1))


def test_a_bfloat16_head_keeps_float32_angles() -> None:
    """DeepSpeed casts buffers as well; angles of bfloat16 frequencies are wrong by radians."""
    head = make_head(make_geometry())
    states, position = torch.randn(1, 4, 16), torch.tensor([200])
    exact = head.rotary(states, position)
    cast = head.to(torch.bfloat16).rotary(states, position)
    torch.testing.assert_close(cast, exact)


@pytest.mark.parametrize("old", [{"rope_theta": 1e6}, {"rope_parameters": {"rope_theta": 1e6}}])
def test_old_and_new_rope_settings_agree(old: dict[str, object]) -> None:
    from slipstream.drafters.config import DrafterConfig, resolve_geometry

    base = {
        "vocab_size": 60,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
    }
    geometry = resolve_geometry(DrafterConfig(), base | old)
    assert dict(geometry.rope_parameters) == {"rope_type": "default", "rope_theta": 1e6}


def test_unknown_rope_type_is_an_error() -> None:
    with pytest.raises(ValueError, match="spiral"):
        Rotary(make_geometry(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}))


def test_cache_overwrites_what_was_truncated() -> None:
    geometry = make_geometry()
    cache = DraftCache(1, 8, geometry, torch.device("cpu"), torch.float32)
    first = torch.ones(1, 3, geometry.num_key_value_heads, geometry.head_dim)
    cache.append(0, first, first)
    cache.advance(3)
    cache.truncate(1)
    keys, _ = cache.append(0, 2 * first[:, :2], 2 * first[:, :2])
    cache.advance(2)
    assert cache.length == 3
    assert keys[0, 0, :, 0].tolist() == [1, 2, 2]
