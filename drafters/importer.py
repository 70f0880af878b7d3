"""Reads a head that training shall go on from: of our export, of a vLLM, SGLang or speculators form.

Other exporters spell some things differently, and mean by them what the engines make of them
(docs/serving.md). Here they are put into our own spelling; then the same checks run as on a bundle
of ours, so a head that an engine would serve otherwise than it was trained is refused.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from slipstream.drafters.checkpoint_format import (
    CONFIG,
    FORMS,
    WEIGHTS,
    read_config,
    read_tensors,
    twin_norms,
)
from slipstream.drafters.config import DrafterConfig, DraftGeometry, Engine
from slipstream.drafters.eagle3 import Eagle3Head
from slipstream.drafters.emulated_loaders import check_as

IDS = "eagle_aux_hidden_state_layer_ids"
EMBEDDING = "embed_tokens.weight"
LAYER_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
    "hidden_act",
)
"""What transformers fills in where a config.json has only what differs from its defaults."""
NEWER_FLAGS = ("norm_before_fc", "fc_norm", "norm_output")
"""Missing all together in what older versions of speculators wrote: then none is set."""
NOT_COMPARED = ("max_position_embeddings", "num_heads")
"""The first does not enter the computation; an export has the target's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportedHead:
    """A head with its vocabulary map, whatever form it was in."""

    head: Eagle3Head
    """float32."""
    d2t_W: Tensor
    """int64 offsets."""
    t2d_V: Tensor
    """bool."""
    dtype: torch.dtype
    """Of the stored tensors."""


def import_head(folder: Path, *, embedding_VD: Tensor, num_target_layers: int) -> ImportedHead:
    """Reads the head in `folder`, trained for the target of this embedding.

    Raises:
        ValueError: it is damaged, ambiguous, or something our head cannot be.
    """
    config, tensors = read_config(folder), read_tensors(folder)
    _own_embedding(tensors, embedding_VD, folder)
    config = _own_keys(config, num_target_layers, folder)
    tensors = _own_names(tensors, config["num_hidden_layers"], folder)
    served = check_as(Engine.vllm, config, tensors, folder)
    dtype: torch.dtype = getattr(torch, config["torch_dtype"])
    return ImportedHead(head=served.head, d2t_W=served.d2t_W, t2d_V=served.t2d_V, dtype=dtype)


def _own_embedding(tensors: dict[str, Tensor], embedding_VD: Tensor, folder: Path) -> None:
    """Takes a copy of the target's embedding out; our heads read the target's."""
    own_VD = tensors.pop(EMBEDDING, None)
    if own_VD is not None and not (
        own_VD.shape == embedding_VD.shape and torch.equal(own_VD, embedding_VD.to(own_VD.dtype))
    ):
        raise ValueError(
            f"{folder / WEIGHTS}: {EMBEDDING} is not the target's, and our heads read the target's: choose a "
            f"head that was trained on this target with its embedding frozen"
        )


def _own_keys(config: dict[str, Any], num_target_layers: int, folder: Path) -> dict[str, Any]:
    """config.json with every key that our own has."""
    layer = config.get("transformer_layer_config")
    try:
        known = AutoConfig.for_model(**_with_type(layer or config)).to_dict()
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / CONFIG}: no draft layer can be read from it ({error})") from None
    config = config | {key: known[key] for key in LAYER_KEYS}
    config.setdefault("torch_dtype", config.get("dtype"))
    if layer is not None:
        config["model_type"] = layer["model_type"]
        # Copied from the target with its other settings, and not said of the draft's own head.
        if config.get("tie_word_embeddings") == layer.get("tie_word_embeddings"):
            config["tie_word_embeddings"] = False
        if not config.keys() & set(NEWER_FLAGS[1:]):
            config |= dict.fromkeys(NEWER_FLAGS, False)
        config.setdefault("norm_before_fc", False)
    config[IDS] = _own_ids(config, layer is not None, num_target_layers, folder)
    config.setdefault("num_aux_hidden_states", len(config[IDS]))
    for key, only in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
        if config[key] != only:
            raise ValueError(f"{folder / CONFIG}: {key} is {config[key]}, and our heads have {only} alone")
    return config


def _with_type(layer: dict[str, Any]) -> dict[str, Any]:
    """The keys of the draft layer alone, none of which is an option of another kind to transformers."""
    types = {model_type for _, model_type in FORMS.values()}
    if layer["model_type"] not in types:
        raise ValueError(f"model_type is {layer['model_type']}, not one of {', '.join(sorted(types))}")
    old_rope = () if "rope_parameters" in layer else ("rope_theta", "rope_scaling")
    return {key: layer[key] for key in ("model_type", *LAYER_KEYS, *old_rope) if key in layer}


def _own_ids(config: dict[str, Any], is_speculators: bool, num_target_layers: int, folder: Path) -> list[int]:
    """The captured boundaries: SGLang's own list names layer outputs, one less."""
    nested = (config.get("eagle_config") or {}).get(IDS)
    ids, shifted = config.get(IDS), [1 + i for i in nested or ()]
    if ids and nested and list(ids) != shifted:
        raise ValueError(
            f"{folder / CONFIG}: {IDS} is {ids} for vLLM and {nested} for SGLang, which captures {shifted}: "
            f"keep the list that the head was trained with"
        )
    if is_speculators and not ids:  # what vLLM takes for such a head
        return [2, num_target_layers // 2, num_target_layers - 3]
    if not ids and not nested:
        raise ValueError(
            f"{folder / CONFIG}: {IDS} is missing, and engines differ in what they then capture: add the "
            f"boundaries that the head was trained with"
        )
    return list(ids or shifted)


def _own_names(tensors: dict[str, Tensor], num_layers: int, folder: Path) -> dict[str, Tensor]:
    """The first layer as `midlayer`; further layers' norms under both engines' names."""
    named = {
        "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name: tensor
        for name, tensor in tensors.items()
    }
    for ours, twin in twin_norms(num_layers).items():
        for there, missing in ((ours, twin), (twin, ours)):
            if there in named:
                named.setdefault(missing, named[there])
        if twin in named and not torch.equal(named[ours], named[twin]):
            raise ValueError(
                f"{folder / WEIGHTS}: {ours} and {twin} differ, so vLLM and SGLang would run two heads"
            )
    return named


def refuse_other_geometry(found: DraftGeometry, wanted: DraftGeometry, source: str) -> None:
    """Compares an imported head's geometry with that of the recipe.

    Raises:
        ValueError: they differ; the message has the settings that fit.
    """
    names = [name for name in DraftGeometry.__dataclass_fields__ if name not in NOT_COMPARED]
    differing = {
        name: (getattr(found, name), getattr(wanted, name))
        for name in names
        if getattr(found, name) != getattr(wanted, name)
    }
    if not differing:
        return
    told = ", ".join(f"{name} is {there} there and {here} here" for name, (there, here) in differing.items())
    settings = DrafterConfig.__dataclass_fields__
    if all(name in settings for name in differing):
        words = " ".join(f"drafter.{name}={_word(there)}" for name, (there, _) in differing.items())
        raise ValueError(f"{source}: {told}: add {words}")
    raise ValueError(f"{source}: {told}: the head was made for another target")


def _word(value: Any) -> str:
    """A value as the command line takes it."""
    return str(list(value)).replace(" ", "") if isinstance(value, tuple) else str(value).lower()
