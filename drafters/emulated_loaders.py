"""What vLLM and SGLang make of a serving bundle, without the engines: their rules, and stricter.

Each engine reads its own keys and names of the one file (docs/serving.md), with its own defaults.
Both accept bundles that then draft nonsense, so everything that does not fit is refused here:
vLLM leaves a missing norm at one and a wrong map at acceptance 0, SGLang skips unknown and
missing tensors alike. What is returned is the head as that engine would run it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from slipstream.drafters.checkpoint_format import (
    CONFIG,
    FLAGS,
    FORMS,
    WEIGHTS,
    ServedHead,
    assemble,
    geometry_from_config,
    read_config,
    read_tensors,
    twin_norms,
)
from slipstream.drafters.config import Engine


def load_as(engine: Engine, folder: Path) -> ServedHead:
    """Reads a bundle by an engine's rules.

    Raises:
        ValueError: the engine would refuse it, or run something other than what was trained.
    """
    return check_as(engine, read_config(folder), read_tensors(folder), folder)


def check_as(engine: Engine, config: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> ServedHead:
    """The head that an engine makes of this config and these tensors, read from `folder`.

    Raises:
        ValueError: as `load_as`.
    """
    try:
        _check_keys(config, tensors)
        seen = _as_vllm(config) if engine is Engine.vllm else _as_sglang(config)
        geometry = geometry_from_config(seen, folder / CONFIG)
        if engine is Engine.sglang:
            # The norm before attention of further layers is the one that vLLM does not read.
            tensors |= {name: tensors[twin] for name, twin in _present_twins(geometry.num_layers, tensors)}
        return assemble(geometry, tensors, folder / WEIGHTS)
    except ValueError as error:
        raise ValueError(f"as {engine.value} loads it: {error}") from None


def _check_keys(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    if "draft_vocab_size" not in config:
        raise ValueError(f"{CONFIG}: draft_vocab_size is missing, which SGLang stops at")
    if config.get("tie_word_embeddings", True):
        raise ValueError(
            f"{CONFIG}: tie_word_embeddings is not false, so the embedding would be used as the lm_head"
        )
    if missing := [flag for flag in FLAGS if flag not in config]:
        raise ValueError(f"{CONFIG}: {', '.join(missing)} is missing, and engines differ in the default")
    found = {str(t.dtype).removeprefix("torch.") for t in tensors.values() if t.is_floating_point()}
    if found != {config.get("torch_dtype")}:
        raise ValueError(f"{CONFIG}: torch_dtype is {config.get('torch_dtype')}, the tensors are {found}")


def _as_vllm(config: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM: boundaries from the top-level list, sorted, each once; fc width from num_aux_hidden_states."""
    architectures = [architecture for architecture, _ in FORMS.values()]
    if "speculators_model_type" in config:
        architectures = ["Eagle3Speculator"]
    if config["architectures"][0] not in architectures:
        raise ValueError(f"{CONFIG}: architectures is {config['architectures']}, not one of {architectures}")
    aux = sorted(set(config.get("eagle_aux_hidden_state_layer_ids") or ()))
    return {**config, "eagle_aux_hidden_state_layer_ids": _checked_aux(config, aux)}


def _as_sglang(config: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang: the nested list names layer outputs, one less than the boundary."""
    if config["architectures"] != [FORMS[False][0]] or config.get("model_type") != FORMS[False][1]:
        raise ValueError(f"{CONFIG}: architectures is {config['architectures']}, not [{FORMS[False][0]!r}]")
    nested = config.get("eagle_config", {})
    for flag in ("norm_before_residual", "attention_bias"):
        if config[flag]:
            raise ValueError(f"{CONFIG}: {flag} is set, which SGLang does not read")
    aux = [1 + i for i in nested.get("eagle_aux_hidden_state_layer_ids") or ()]
    return {
        **config,
        "norm_before_fc": nested.get("norm_before_fc", config["norm_before_fc"]),
        "eagle_aux_hidden_state_layer_ids": _checked_aux(config, aux),
    }


def _checked_aux(config: Mapping[str, Any], aux: list[int]) -> list[int]:
    if aux != config.get("eagle_aux_hidden_state_layer_ids"):
        raise ValueError(
            f"{CONFIG}: the engine captures the boundaries {aux}, and the head was trained on "
            f"{config.get('eagle_aux_hidden_state_layer_ids')} (eagle_aux_hidden_state_layer_ids)"
        )
    if len(aux) != config.get("num_aux_hidden_states"):
        raise ValueError(
            f"{CONFIG}: num_aux_hidden_states is {config.get('num_aux_hidden_states')}, and there are "
            f"{len(aux)} eagle_aux_hidden_state_layer_ids"
        )
    return aux


def _present_twins(num_layers: int, tensors: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    return [(name, twin) for name, twin in twin_norms(num_layers).items() if twin in tensors]
