"""Both engines' readings of a bundle give the trained head, and damaged bundles are named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.drafters.checkpoint_format import CONFIG, WEIGHTS
from slipstream.drafters.config import DrafterConfig, Engine, sglang_refusals
from slipstream.drafters.emulated_loaders import load_as
from slipstream.drafters.layers import DraftCache
from tests.heads import make_frozen, make_geometry, make_head, write_export

BOTH, VLLM = list(Engine), [Engine.vllm]
VARIANTS: list[tuple[dict[str, Any], list[Engine]]] = [
    ({}, BOTH),
    ({"draft_vocab_size": 60}, BOTH),
    ({"fc_norm": True, "norm_output": True}, BOTH),
    ({"norm_before_fc": True}, BOTH),
    ({"num_layers": 2}, BOTH),
    ({"aux_layers": (1, 2, 4, 5, 7)}, BOTH),
    ({"norm_before_residual": True}, VLLM),
    ({"qk_norm": True}, VLLM),
    ({"aux_layers": (2, 4, 8)}, VLLM),
]


def draft_ids(geometry: Any) -> torch.Tensor:
    return (make_frozen(geometry).draft_ids_V >= 0).nonzero()[:, 0]


def logits(head: Any) -> torch.Tensor:
    geometry, generator = head.geometry, torch.Generator().manual_seed(0)
    aux = torch.randn(1, 9, len(geometry.aux_layers), geometry.hidden_size, generator=generator)
    embed = torch.randn(1, 9, geometry.hidden_size, generator=generator)
    cache = DraftCache(1, 9, geometry, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        carried, final = head(embed, head.fuse(aux), torch.arange(9)[None], cache)
        return torch.cat((head.logits(final), head.logits(carried)))


@pytest.mark.parametrize(("flags", "engines"), VARIANTS)
def test_an_engine_runs_what_was_trained(
    flags: dict[str, Any], engines: list[Engine], tmp_path: Path
) -> None:
    geometry = make_geometry(**flags)
    head, ids = make_head(geometry), draft_ids(geometry)
    folder = write_export(tmp_path, head, ids, engines=engines)
    refused = bool(sglang_refusals(geometry, num_target_layers=8))
    assert refused == (Engine.sglang not in engines)
    for engine in engines:
        served = load_as(engine, folder)
        assert torch.equal(logits(served.head), logits(head)), engine
        assert torch.equal(torch.arange(geometry.draft_vocab_size) + served.d2t_W, ids)
    if refused:
        with pytest.raises(ValueError, match="as sglang loads it"):
            load_as(Engine.sglang, folder)


def test_refusals_name_setting_and_way_out() -> None:
    for config in (DrafterConfig(qk_norm=True), DrafterConfig(norm_before_residual=True)):
        (line,) = sglang_refusals(config, num_target_layers=None)
        assert "drafter." in line
        assert "export.engines=[vllm]" in line
    assert sglang_refusals(DrafterConfig(), num_target_layers=None) == []


Damage = Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]


def _absolute(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"] += torch.arange(tensors["d2t"].numel())


def _arange(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"] = torch.arange(tensors["d2t"].numel())


def _one_nan(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["midlayer.mlp.up_proj.weight"][3, 4] = torch.nan


def _second_layer(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["layers.1.mlp.up_proj.weight"] = torch.ones(48, 32)


DAMAGE: dict[str, tuple[Damage, str]] = {
    "missing d2t": (lambda c, t: t.pop("d2t"), "d2t is missing although draft_vocab_size=40"),
    "absolute d2t": (_absolute, "d2t holds target ids"),
    "arange d2t": (_arange, "d2t is 0, 1, 2"),
    "lm_head missing": (lambda c, t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
    "tied": (lambda c, t: c.update(tie_word_embeddings=True), "tie_word_embeddings is not false"),
    "one layer too many": (lambda c, t: c.update(num_hidden_layers=2), "although there are 2 layers"),
    "one layer too few": (_second_layer, "is unexpected with 1 layers"),
    "norm without flag": (
        lambda c, t: t.update({"fc_norm.0.weight": torch.ones(32)}),
        "fc_norm.0.weight is unexpected, since fc_norm is not set",
    ),
    "flag without norm": (lambda c, t: c.update(fc_norm=True), "missing although fc_norm is set"),
    "wide norm without flag": (
        lambda c, t: t.update({"input_norm.weight": torch.ones(96)}),
        "since norm_before_fc is not set",
    ),
    "other dtype": (lambda c, t: c.update(torch_dtype="bfloat16"), "torch_dtype is bfloat16"),
    "fc width": (
        lambda c, t: t.update({"fc.weight": t["fc.weight"][:, :64].contiguous()}),
        r"fc.weight is \(32, 64\), not \(32, 96\) \(3 captured states\)",
    ),
    "captured states": (lambda c, t: c.update(num_aux_hidden_states=4), "num_aux_hidden_states is 4"),
    "NaN": (_one_nan, "up_proj.weight holds values that are not finite"),
    "draft_vocab_size absent": (lambda c, t: c.pop("draft_vocab_size"), "draft_vocab_size is missing"),
    "flag absent": (lambda c, t: c.pop("norm_output"), "norm_output is missing"),
    "architecture": (lambda c, t: c.update(architectures=["LlamaForCausalLM"]), "architectures is"),
}


def damage(folder: Path, change: Damage) -> None:
    config, tensors = json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)
    change(config, tensors)
    (folder / CONFIG).write_text(json.dumps(config))
    save_file(tensors, folder / WEIGHTS)


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("engine", Engine)
def test_damaged_bundles_are_named(engine: Engine, name: str, tmp_path: Path) -> None:
    change, words = DAMAGE[name]
    geometry = make_geometry()
    folder = write_export(tmp_path, make_head(geometry), draft_ids(geometry))
    load_as(engine, folder)
    damage(folder, change)
    with pytest.raises(ValueError, match=words) as caught:
        load_as(engine, folder)
    assert str(caught.value).startswith(f"as {engine.value} loads it: ")
    assert "\n" not in str(caught.value)


def test_messages_differ() -> None:
    assert len({words for _, words in DAMAGE.values()}) == len(DAMAGE)


def test_ids_are_read_from_each_engines_own_list(tmp_path: Path) -> None:
    """The two lists differ by one; where they do not, one engine captures other layers."""
    geometry = make_geometry()
    folder = write_export(tmp_path, make_head(geometry), draft_ids(geometry))
    damage(folder, lambda c, t: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[2, 4, 5]))
    assert load_as(Engine.vllm, folder).head.geometry == geometry
    with pytest.raises(ValueError, match=r"captures the boundaries \[3, 5, 6\]"):
        load_as(Engine.sglang, folder)
