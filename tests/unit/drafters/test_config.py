"""Geometry of a head and its refusals."""

import pytest

from slipstream.drafters.config import DrafterConfig, resolve_aux_layers, resolve_geometry

TARGET = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
}


def test_default_boundaries() -> None:
    assert resolve_aux_layers([], 30) == (2, 15, 27)
    assert resolve_aux_layers([1, 8], 8) == (1, 8)


@pytest.mark.parametrize("chosen", [[3, 2, 5], [2, 2, 5], [2, 4, 9], [-1, 2, 3]])
def test_bad_boundaries(chosen: list[int]) -> None:
    with pytest.raises(ValueError, match="drafter.aux_layers"):
        resolve_aux_layers(chosen, 8)


def test_small_targets_name_theirs() -> None:
    with pytest.raises(ValueError, match="7 layers"):
        resolve_aux_layers([], 6)


def test_geometry_follows_target_and_recipe() -> None:
    geometry = resolve_geometry(DrafterConfig(draft_vocab_size=40, head_dim=32), TARGET)
    assert (geometry.hidden_size, geometry.head_dim, geometry.num_key_value_heads) == (64, 32, 2)
    assert geometry.has_vocab_map
    assert not resolve_geometry(DrafterConfig(), TARGET).has_vocab_map


def test_refusals_name_the_key() -> None:
    with pytest.raises(ValueError, match="drafter.draft_vocab_size=101"):
        resolve_geometry(DrafterConfig(draft_vocab_size=101), TARGET)
    with pytest.raises(ValueError, match="num_key_value_heads=3"):
        resolve_geometry(DrafterConfig(num_key_value_heads=3), TARGET)
    assert any("exclude" in p for p in DrafterConfig(fc_norm=True, norm_before_fc=True).problems())
    with pytest.raises(ValueError, match="config.json has no rms_norm_eps, vocab_size"):
        resolve_geometry(DrafterConfig(), {k: v for k, v in TARGET.items() if k[0] not in "rv"})
