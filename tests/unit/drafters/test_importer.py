"""Heads of every form are read as what they are; what is damaged or ambiguous is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.drafters.checkpoint_format import (
    CONFIG,
    WEIGHTS,
    serving_config,
    serving_tensors,
    speculators_config,
    write_weights,
)
from slipstream.drafters.config import Engine
from slipstream.drafters.importer import ImportedHead, import_head, refuse_other_geometry
from tests.heads import VOCAB, make_frozen, make_geometry, make_head, write_export
from tests.unit.drafters.test_emulated_loaders import DAMAGE, VARIANTS, damage, draft_ids

EMBEDDING = make_frozen(make_geometry()).embedding_VD
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def read(folder: Path) -> ImportedHead:
    return import_head(folder, embedding_VD=EMBEDDING, num_target_layers=8)


def export(folder: Path, engines: Any = tuple(Engine), dtype: Any = torch.float32, **flags: Any) -> Path:
    geometry = make_geometry(**flags)
    return write_export(folder, make_head(geometry), draft_ids(geometry), engines=engines, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("flags", "engines"), [*VARIANTS, ({"rope_parameters": LLAMA3}, list(Engine))])
def test_export_import_export(
    flags: dict[str, Any], engines: list[Engine], dtype: Any, tmp_path: Path
) -> None:
    """The same bytes, config and weights."""
    folder = export(tmp_path / "a", engines, dtype, **flags)
    found = read(folder)
    tensors = serving_tensors(found.head, d2t_W=found.d2t_W, t2d_V=found.t2d_V, dtype=found.dtype)
    write_weights(tmp_path / WEIGHTS, tensors)
    assert (tmp_path / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
    config = serving_config(found.head.geometry, engines=engines, bos=0, eos=[1, 2], dtype=found.dtype)
    assert json.dumps(config) == (folder / CONFIG).read_text()


def speculators(folder: Path, **flags: Any) -> Path:
    """Our own export in that form."""
    export(folder, [Engine.vllm], **flags)
    plain = json.loads((folder / CONFIG).read_text())
    names = {"target_name": "a/b", "target_architectures": ["LlamaForCausalLM"]}
    (folder / CONFIG).write_text(json.dumps(speculators_config(plain, **names, num_draft_tokens=3)))
    return folder


@pytest.mark.parametrize(
    "flags", [{}, {"fc_norm": True, "norm_output": True}, {"norm_before_residual": True}]
)
def test_speculators_form(flags: dict[str, Any], tmp_path: Path) -> None:
    found = read(speculators(tmp_path, **flags))
    assert found.head.geometry == make_geometry(**flags)
    for name, tensor in make_head(make_geometry(**flags)).state_dict().items():
        assert torch.equal(found.head.state_dict()[name], tensor)


def test_as_the_speculators_library_writes_it(tmp_path: Path) -> None:
    """What differs from defaults, the first layer as layers.0, a copy of the embedding, no newer flag."""
    folder = speculators(tmp_path, rms_norm_eps=1e-6, num_attention_heads=2, num_key_value_heads=2)

    def rewrite(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        layer = config["transformer_layer_config"]
        for key in (
            "rms_norm_eps",
            "num_key_value_heads",
            "head_dim",
            "num_aux_hidden_states",
            "torch_dtype",
        ):
            del layer[key]
        for key in ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids"):
            layer.pop(key, None)
        layer["tie_word_embeddings"] = True  # the target's
        for key in ("norm_before_fc", "fc_norm", "norm_output", "tie_word_embeddings"):
            del config[key]
        config |= {"model_type": "speculators", "eagle_aux_hidden_state_layer_ids": None}
        for name in [name for name in tensors if name.startswith("midlayer.")]:
            tensors["layers.0." + name.removeprefix("midlayer.")] = tensors.pop(name)
        tensors["embed_tokens.weight"] = EMBEDDING.clone()

    damage(folder, rewrite)
    wanted = make_geometry(
        rms_norm_eps=1e-6, num_attention_heads=2, num_key_value_heads=2, aux_layers=(2, 4, 5)
    )
    assert read(folder).head.geometry == wanted


def test_as_sglang_trainers_write_it(tmp_path: Path) -> None:
    """Layer outputs instead of boundaries, rope in the old spelling, `dtype`."""
    folder = export(tmp_path, num_layers=2)

    def rewrite(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for key in ("eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states", "rope_parameters"):
            del config[key]
        config["dtype"] = config.pop("torch_dtype")
        del tensors["layers.1.input_layernorm.weight"]

    damage(folder, rewrite)
    assert read(folder).head.geometry == make_geometry(num_layers=2)


@pytest.mark.parametrize("name", DAMAGE)
def test_what_the_exporter_refuses_is_refused(name: str, tmp_path: Path) -> None:
    change, words = DAMAGE[name]
    folder = export(tmp_path)
    damage(folder, change)
    with pytest.raises(ValueError, match=words) as caught:
        read(folder)
    assert "\n" not in str(caught.value)


IN_THE_LAYER = {"draft_vocab_size absent", "one layer too many"}
"""Our export has the first key twice in this form; the second is read from the draft layer's settings."""


@pytest.mark.parametrize("name", sorted(DAMAGE.keys() - IN_THE_LAYER))
def test_so_it_is_in_the_speculators_form(name: str, tmp_path: Path) -> None:
    change, words = DAMAGE[name]
    folder = speculators(tmp_path)
    damage(folder, change)
    with pytest.raises(ValueError, match=words):
        read(folder)


def _other_embedding(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["embed_tokens.weight"] = EMBEDDING + 1


def _other_twin(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["layers.1.hidden_norm.weight"] += 1


def _same_ids(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [2, 4, 5]


def _no_ids(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    del config["eagle_aux_hidden_state_layer_ids"], config["eagle_config"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_other_embedding, "embed_tokens.weight is not the target's"),
        (_other_twin, "vLLM and SGLang would run two heads"),
        (_same_ids, r"is \[2, 4, 5\] for vLLM and \[2, 4, 5\] for SGLang, which captures \[3, 5, 6\]"),
        (_no_ids, "engines differ in what they then capture"),
        (lambda c, t: c.update(hidden_act="gelu"), "hidden_act is gelu"),
        (lambda c, t: c.update(attention_bias=True), "attention_bias is True"),
        (lambda c, t: c.update(num_hidden_layers=3), "although there are 3 layers"),
        (lambda c, t: c.update(model_type="gpt2"), "model_type is gpt2, not one of llama, qwen3"),
    ],
)
def test_ambiguous_heads_are_refused(change: Any, words: str, tmp_path: Path) -> None:
    folder = export(tmp_path, num_layers=2)
    damage(folder, change)
    with pytest.raises(ValueError, match=words):
        read(folder)


def test_a_head_of_another_shape_is_told_by_settings() -> None:
    ours = make_geometry()
    refuse_other_geometry(make_geometry(max_position_embeddings=2), ours, "x")
    other = make_geometry(aux_layers=(1, 2, 3), fc_norm=True)
    with pytest.raises(ValueError, match=r"add drafter.aux_layers=\[1,2,3\] drafter.fc_norm=true$"):
        refuse_other_geometry(other, ours, "x")
    with pytest.raises(ValueError, match="x: vocab_size is 61 there and 60 here: .* another target"):
        refuse_other_geometry(make_geometry(vocab_size=VOCAB + 1), ours, "x")
