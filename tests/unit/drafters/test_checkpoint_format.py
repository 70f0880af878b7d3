"""The serving bundle: names, both id conventions, round trip, refusals."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.drafters.checkpoint_format import (
    CONFIG,
    WEIGHTS,
    check_tensors,
    load_head,
    serving_config,
    serving_tensors,
    write_weights,
)
from slipstream.drafters.config import DraftGeometry
from tests.heads import make_frozen, make_geometry, make_head

FLAGS = [{}, {"fc_norm": True, "norm_output": True}, {"norm_before_fc": True}, {"draft_vocab_size": 60}]


def write(folder: Path, geometry: DraftGeometry, dtype: torch.dtype = torch.float32) -> Path:
    folder.mkdir(exist_ok=True)
    ids = (make_frozen(geometry).draft_ids_V >= 0).nonzero()[:, 0]
    t2d = torch.zeros(geometry.vocab_size, dtype=torch.bool)
    t2d[ids] = True
    d2t = ids - torch.arange(ids.numel())
    write_weights(folder / WEIGHTS, serving_tensors(make_head(geometry), d2t_W=d2t, t2d_V=t2d, dtype=dtype))
    config = serving_config(geometry, bos=0, eos=[1, 2], dtype=dtype)
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("flags", FLAGS)
def test_round_trip(flags: dict[str, object], tmp_path: Path) -> None:
    geometry = make_geometry(**flags)
    served = load_head(write(tmp_path, geometry))
    assert served.head.geometry == geometry
    for name, tensor in make_head(geometry).state_dict().items():
        assert torch.equal(served.head.state_dict()[name], tensor)
    ids = torch.arange(geometry.draft_vocab_size) + served.d2t_W
    assert torch.equal(ids, served.t2d_V.nonzero()[:, 0])


def test_config_names_boundaries_for_both_engines(tmp_path: Path) -> None:
    config = serving_config(make_geometry(), bos=0, eos=1, dtype=torch.bfloat16)
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
    config = serving_config(make_geometry(rope_parameters=rope), bos=0, eos=1, dtype=torch.float32)
    assert config["rope_parameters"] == rope
    assert config["rope_theta"] == 5e5
    assert config["rope_scaling"]["factor"] == 8.0


def test_boundary_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="boundary 0"):
        serving_config(make_geometry(aux_layers=(0, 2, 4)), bos=0, eos=1, dtype=torch.float32)


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
        ("missing d2t", "missing d2t"),
        ("absolute d2t", "d2t"),
        ("no lm_head", "missing lm_head.weight"),
        ("unknown tensor", "unexpected fc_norm.0.weight"),
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


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_unreadable_files_are_named(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path, make_geometry())
    (folder / name).write_bytes((folder / name).read_bytes()[:50])
    with pytest.raises(ValueError, match=f"{folder} is damaged .*: delete it and export again"):
        load_head(folder)
