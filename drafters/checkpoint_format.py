"""The serving bundle of a draft head: the config.json and tensors that vLLM and SGLang load.

The form is a contract (ENGINES.md section 4): every behaviour flag is written, ids are written in
both engines' conventions, and the tensors are compared with the required list before any file is
written and after any file is read.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipstream.drafters.config import DraftGeometry
from slipstream.drafters.eagle3 import Eagle3Head

CONFIG, WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedHead:
    """A head read back from its serving bundle."""

    head: Eagle3Head
    d2t_W: Tensor
    """int64 offsets: target id = i + d2t[i]."""
    t2d_V: Tensor
    """bool."""


def serving_config(geometry: DraftGeometry, *, bos: Any, eos: Any, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json that both engines read.

    Boundary b is b in vLLM's list (top level) and b-1 in SGLang's (nested).

    Raises:
        ValueError: a captured boundary that SGLang cannot express.
    """
    if geometry.aux_layers[0] < 1:
        raise ValueError("drafter.aux_layers holds boundary 0, which the engines' id lists cannot name")
    aux = list(geometry.aux_layers)
    rope = dict(geometry.rope_parameters)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": geometry.hidden_size,
        "intermediate_size": geometry.intermediate_size,
        "num_hidden_layers": geometry.num_layers,
        "num_attention_heads": geometry.num_attention_heads,
        "num_key_value_heads": geometry.num_key_value_heads,
        "head_dim": geometry.head_dim,
        "vocab_size": geometry.vocab_size,
        "draft_vocab_size": geometry.draft_vocab_size,
        "target_hidden_size": geometry.hidden_size,
        "num_aux_hidden_states": len(aux),
        "rms_norm_eps": geometry.rms_norm_eps,
        "hidden_act": "silu",
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "max_position_embeddings": geometry.max_position_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "norm_before_residual": geometry.norm_before_residual,
        "norm_before_fc": geometry.norm_before_fc,
        "fc_norm": geometry.fc_norm,
        "norm_output": geometry.norm_output,
        "eagle_aux_hidden_state_layer_ids": aux,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [b - 1 for b in aux],
        },
    }
    if rope["rope_type"] != "default":
        config["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    return config


def geometry_from_config(config: Mapping[str, Any], source: Path) -> DraftGeometry:
    """Reads the geometry back.

    Raises:
        ValueError: names the missing key.
    """
    try:
        return DraftGeometry(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_attention_heads=config["num_attention_heads"],
            num_key_value_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            vocab_size=config["vocab_size"],
            draft_vocab_size=config["draft_vocab_size"],
            aux_layers=tuple(config["eagle_aux_hidden_state_layer_ids"]),
            rms_norm_eps=config["rms_norm_eps"],
            max_position_embeddings=config["max_position_embeddings"],
            rope_parameters=config["rope_parameters"],
            norm_before_residual=config["norm_before_residual"],
            norm_before_fc=config["norm_before_fc"],
            fc_norm=config["fc_norm"],
            norm_output=config["norm_output"],
        )
    except KeyError as error:
        raise ValueError(f"{source}: key {error} is missing, so it is no export of this project") from None


def required_shapes(geometry: DraftGeometry) -> dict[str, tuple[int, ...]]:
    """Every tensor a bundle holds, no more and no less, with its shape."""
    with torch.device("meta"):
        head = Eagle3Head(geometry)
    shapes = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    if geometry.has_vocab_map:
        shapes["d2t"] = (geometry.draft_vocab_size,)
        shapes["t2d"] = (geometry.vocab_size,)
    return shapes


def check_tensors(geometry: DraftGeometry, tensors: Mapping[str, Tensor], source: str) -> None:
    """Compares tensors with the contract.

    Raises:
        ValueError: lists missing and unexpected names, wrong shapes, non-finite values and a
            vocabulary map that is not in offset form.
    """
    required = required_shapes(geometry)
    found = []
    if missing := sorted(required.keys() - tensors.keys()):
        found.append(f"missing {', '.join(missing)}")
    if unexpected := sorted(tensors.keys() - required.keys()):
        found.append(f"unexpected {', '.join(unexpected)}")
    for name in sorted(required.keys() & tensors.keys()):
        if tuple(tensors[name].shape) != required[name]:
            found.append(f"{name} is {tuple(tensors[name].shape)}, not {required[name]}")
        elif not torch.isfinite(tensors[name]).all():
            found.append(f"{name} holds values that are not finite")
    if not found and geometry.has_vocab_map:
        ids_W = torch.arange(geometry.draft_vocab_size) + tensors["d2t"]
        if not torch.equal(ids_W, tensors["t2d"].nonzero().flatten()):
            found.append("d2t (offsets: target id = i + d2t[i]) and t2d name different tokens")
    if found:
        raise ValueError(f"{source}: {'; '.join(found)}")


def serving_tensors(
    head: Eagle3Head, *, d2t_W: Tensor, t2d_V: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The head's tensors under the names the engines read; no map when the vocabularies are equal."""
    tensors = {name: tensor.detach().cpu().to(dtype) for name, tensor in head.state_dict().items()}
    if head.geometry.has_vocab_map:
        tensors |= {"d2t": d2t_W.to(torch.int64), "t2d": t2d_V.to(torch.bool)}
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def write_weights(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes the tensors of a bundle."""
    save_file(tensors, path, metadata={"format": "pt"})


def load_head(folder: Path) -> ServedHead:
    """Reads a serving bundle, refusing what does not keep the contract.

    Raises:
        ValueError: a file, key or tensor is missing or wrong.
    """
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} does not exist: export a trained head into {folder} first")
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        with safe_open(folder / WEIGHTS, framework="pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except (ValueError, SafetensorError) as error:
        raise ValueError(f"{folder} is damaged ({error}): delete it and export again") from None
    geometry = geometry_from_config(config, folder / CONFIG)
    check_tensors(geometry, tensors, str(folder / WEIGHTS))
    d2t = tensors.pop("d2t", torch.zeros(geometry.draft_vocab_size, dtype=torch.int64))
    t2d = tensors.pop("t2d", torch.ones(geometry.vocab_size, dtype=torch.bool))
    head = Eagle3Head(geometry)
    head.load_state_dict(tensors)
    return ServedHead(head=head.eval(), d2t_W=d2t, t2d_V=t2d)
