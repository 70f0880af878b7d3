"""The serving bundle: names, both id conventions, round trip, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.drafters.checkpoint_format import (
    CONFIG,
    WEIGHTS,
    check_tensors,
    load_head,
    serving_config,
    speculators_config,
)
from slipstream.drafters.config import DraftGeometry, Engine
from tests.heads import make_frozen, make_geometry, make_head, write_export

FLAGS = [
    {},
    {"fc_norm": True, "norm_output": True},
    {"norm_before_fc": True},
    {"draft_vocab_size": 60},
    {"qk_norm": True, "norm_before_residual": True},
    {"num_layers": 3},
    {"aux_layers": (1, 2, 4, 5, 7), "fc_norm": True},
]


def make_config(geometry: DraftGeometry, **overrides: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"engines": list(Engine), "bos": 0, "eos": [1, 2], "dtype": torch.float32}
    return serving_config(geometry, **(settings | overrides))


def write(folder: Path, geometry: DraftGeometry) -> Path:
    ids = (make_frozen(geometry).draft_ids_V >= 0).nonzero()[:, 0]
    return write_export(folder, make_head(geometry), ids)


@pytest.mark.parametrize("flags", FLAGS)
def test_round_trip(flags: dict[str, object], tmp_path: Path) -> None:
    geometry = make_geometry(**flags)
    served = load_head(write(tmp_path, geometry))
    assert served.head.geometry == geometry
    for name, tensor in make_head(geometry).state_dict().items():
        assert torch.equal(served.head.state_dict()[name], tensor)
    ids = torch.arange(geometry.draft_vocab_size) + served.d2t_W
    assert torch.equal(ids, served.t2d_V.nonzero()[:, 0])


def test_speculators_form(tmp_path: Path) -> None:
    """The same head in the form that names its target."""
    geometry = make_geometry(fc_norm=True, num_layers=2)
    folder = write(tmp_path, geometry)
    plain = json.loads((folder / CONFIG).read_text())
    config = speculators_config(
        plain, target_name="a/b", target_architectures=["LlamaForCausalLM"], num_draft_tokens=4
    )
    assert config["speculators_config"]["verifier"]["name_or_path"] == "a/b"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert config["norm_before_residual"] is False  # its default is true
    assert config["transformer_layer_config"]["num_aux_hidden_states"] == 3
    (folder / CONFIG).write_text(json.dumps(config))
    assert load_head(folder).head.geometry == geometry


def test_qwen3_form() -> None:
    config = make_config(make_geometry(qk_norm=True), engines=[Engine.vllm])
    assert config["architectures"] == ["Eagle3Qwen3ForCausalLM"]
    assert config["model_type"] == "qwen3"
    assert "eagle_aux_hidden_state_layer_ids" not in config["eagle_config"]  # SGLang's


def test_further_layers_have_both_norms(tmp_path: Path) -> None:
    """vLLM reads one before their attention, SGLang the other."""
    tensors = load_file(write(tmp_path, make_geometry(num_layers=2)) / WEIGHTS)
    first, second = (tensors[f"layers.1.{name}.weight"] for name in ("input_layernorm", "hidden_norm"))
    assert torch.equal(first, second)
    assert "midlayer.hidden_norm.weight" in tensors


def test_config_names_boundaries_for_both_engines(tmp_path: Path) -> None:
    config = make_config(make_geometry(), dtype=torch.bfloat16)
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert config["num_aux_hidden_states"] == 3
    assert config["torch_dtype"] == "bfloat16"
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        assert config[flag] is False


def test_tensor_names(tmp_path: Path) -> None:
    names = load_file(write(tmp_path, make_geometry()) / WEIGHTS).keys()
    assert {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"} <= names
    assert "midlayer.self_attn.q_proj.weight" in names
    assert not any(name.startswith("model.") or "embed" in name for name in names)
    assert "d2t" not in load_file(write(tmp_path / "all", make_geometry(draft_vocab_size=60)) / WEIGHTS)


def test_llama3_rope_is_carried_over() -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = make_config(make_geometry(rope_parameters=rope))
    assert config["rope_parameters"] == rope
    assert config["rope_theta"] == 5e5
    assert config["rope_scaling"]["factor"] == 8.0


def damaged(name: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if name == "missing d2t":
        del tensors["d2t"]
    elif name == "absolute d2t":
        tensors["d2t"] += torch.arange(tensors["d2t"].numel())
    elif name == "no lm_head":
        del tensors["lm_head.weight"]
    elif name == "unknown tensor":
        tensors["fc_norm.0.weight"] = torch.ones(32)
    elif name == "fc width":
        tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()
    elif name == "nan":
        tensors["norm.weight"][0] = torch.nan
    return tensors


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing d2t", "d2t is missing although draft_vocab_size=40"),
        ("absolute d2t", "d2t"),
        ("no lm_head", "lm_head.weight is missing"),
        ("unknown tensor", "fc_norm.0.weight is unexpected, since fc_norm is not set"),
        ("fc width", "fc.weight is"),
        ("nan", "not finite"),
    ],
)
def test_damaged_bundles_are_refused(name: str, words: str, tmp_path: Path) -> None:
    folder = write(tmp_path, make_geometry())
    tensors = damaged(name, load_file(folder / WEIGHTS))
    with pytest.raises(ValueError, match=words):
        check_tensors(make_geometry(), tensors, "x")
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ValueError, match=words):
        load_head(folder)


def test_missing_key_and_file_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path, make_geometry())
    config = json.loads((folder / CONFIG).read_text())
    del config["draft_vocab_size"]
    (folder / CONFIG).write_text(json.dumps(config))
    with pytest.raises(ValueError, match="draft_vocab_size"):
        load_head(folder)
    (folder / CONFIG).unlink()
    with pytest.raises(ValueError, match=CONFIG):
        load_head(folder)
