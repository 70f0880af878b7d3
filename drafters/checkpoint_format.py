"""The serving bundle of a draft head: the config.json and tensors that vLLM and SGLang load.

The form is a contract (docs/serving.md): every behaviour flag is written, ids are written in both
engines' conventions, and the tensors are compared with the required list before any file is
written and after any file is read.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipstream.drafters.config import DraftGeometry, Engine
from slipstream.drafters.eagle3 import Eagle3Head

CONFIG, WEIGHTS = "config.json", "model.safetensors"
MAPS = ("d2t", "t2d")
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Keys that change what a head computes; each is always written."""
NORM_FLAGS = {"fc_norm": "fc_norm", "input_norm": "norm_before_fc"}
"""First word of the tensors that exist only with a flag."""
FORMS = {
    False: ("LlamaForCausalLMEagle3", "llama"),
    True: ("Eagle3Qwen3ForCausalLM", "qwen3"),
}
"""Architecture and model_type without and with q/k norms."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedHead:
    """A head read back from its serving bundle."""

    head: Eagle3Head
    d2t_W: Tensor
    """int64 offsets: target id = i + d2t[i]."""
    t2d_V: Tensor
    """bool."""


def serving_config(
    geometry: DraftGeometry, *, engines: Collection[Engine], bos: Any, eos: Any, dtype: torch.dtype
) -> dict[str, Any]:
    """The config.json that the engines read.

    Boundary b is b in vLLM's list (top level) and b-1 in SGLang's (nested).
    """
    aux = list(geometry.aux_layers)
    rope = dict(geometry.rope_parameters)
    architecture, model_type = FORMS[geometry.qk_norm]
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
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
        **{flag: getattr(geometry, flag) for flag in FLAGS},
        "eagle_aux_hidden_state_layer_ids": aux,
        "eagle_config": {"use_aux_hidden_state": True},
    }
    if Engine.sglang in engines:
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [b - 1 for b in aux]
    if rope["rope_type"] != "default":
        config["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    return config


def speculators_config(
    config: Mapping[str, Any],
    *,
    target_name: str,
    target_architectures: Sequence[str],
    num_draft_tokens: int,
) -> dict[str, Any]:
    """The same in the speculators form, whose `vllm serve FOLDER` finds the target by itself."""
    outer = ("draft_vocab_size", "target_hidden_size", "torch_dtype", "eagle_aux_hidden_state_layer_ids")
    left_out = ("architectures", "eagle_config", *FLAGS)
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        **{key: config[key] for key in (*outer, *FLAGS)},
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_draft_tokens}],
            "verifier": {"name_or_path": target_name, "architectures": list(target_architectures)},
        },
        "transformer_layer_config": {k: v for k, v in config.items() if k not in left_out},
    }


def read_config(folder: Path) -> dict[str, Any]:
    """config.json in the plain form, whichever it was written in.

    Raises:
        ValueError: it is missing.
    """
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder / CONFIG} does not exist: export a trained head into {folder} first")
    config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    return {**config.get("transformer_layer_config", {}), **config}


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
            qk_norm=config["model_type"] == "qwen3",
            **{flag: config[flag] for flag in FLAGS},
        )
    except KeyError as error:
        raise ValueError(f"{source}: key {error} is missing: export the head again") from None


def required_shapes(geometry: DraftGeometry) -> dict[str, tuple[int, ...]]:
    """Every tensor a bundle holds, no more and no less, with its shape."""
    with torch.device("meta"):
        head = Eagle3Head(geometry)
    shapes = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    shapes |= {twin: shapes[name] for name, twin in twin_norms(geometry.num_layers).items()}
    if geometry.has_vocab_map:
        shapes["d2t"] = (geometry.draft_vocab_size,)
        shapes["t2d"] = (geometry.vocab_size,)
    return shapes


def check_tensors(geometry: DraftGeometry, tensors: Mapping[str, Tensor], source: str) -> None:
    """Compares tensors with the contract.

    Raises:
        ValueError: lists what is missing, unexpected, of a wrong shape or type or not finite, and a
            vocabulary map that is not in offset form.
    """
    required = required_shapes(geometry)
    found = [_why_missing(name, geometry) for name in sorted(required.keys() - tensors.keys())]
    found += [_why_unexpected(name, geometry) for name in sorted(tensors.keys() - required.keys())]
    dtypes = {tensors[name].dtype for name in required.keys() & tensors.keys() if name not in MAPS}
    if len(dtypes) > 1:
        found.append(f"tensors are of several types: {', '.join(sorted(map(str, dtypes)))}")
    for name in sorted(required.keys() & tensors.keys()):
        shape, wanted = tuple(tensors[name].shape), required[name]
        if shape != wanted:
            reason = f" ({len(geometry.aux_layers)} captured states)" if name == "fc.weight" else ""
            found.append(f"{name} is {shape}, not {wanted}{reason}")
        elif not torch.isfinite(tensors[name]).all():
            found.append(f"{name} holds values that are not finite")
    if not found and geometry.has_vocab_map:
        found += _map_problems(tensors["d2t"], tensors["t2d"])
    if found:
        raise ValueError(f"{source}: {'; '.join(found)}")


def _why_missing(name: str, geometry: DraftGeometry) -> str:
    if name in MAPS:
        sizes = f"draft_vocab_size={geometry.draft_vocab_size} is below vocab_size={geometry.vocab_size}"
        return f"{name} is missing although {sizes}"
    if (flag := NORM_FLAGS.get(name.split(".")[0])) is not None:
        return f"{name} is missing although {flag} is set"
    if name.startswith("layers."):
        return f"{name} is missing although there are {geometry.num_layers} layers"
    return f"{name} is missing"


def _why_unexpected(name: str, geometry: DraftGeometry) -> str:
    if name in MAPS:
        return f"{name} is unexpected, since the draft vocabulary is the target's"
    if (flag := NORM_FLAGS.get(name.split(".")[0])) is not None:
        return f"{name} is unexpected, since {flag} is not set for it"
    if name.startswith("layers."):
        return f"{name} is unexpected with {geometry.num_layers} layers"
    return f"{name} is unexpected"


def _map_problems(d2t_W: Tensor, t2d_V: Tensor) -> list[str]:
    index_W, ids_W = torch.arange(d2t_W.numel()), t2d_V.nonzero().flatten()
    if torch.equal(index_W + d2t_W, ids_W):
        return []
    if torch.equal(d2t_W, ids_W):
        return ["d2t holds target ids, and engines read offsets: target id = i + d2t[i]"]
    if torch.equal(d2t_W, index_W):
        return ["d2t is 0, 1, 2, ..., the place-holder of an export without a map"]
    return ["d2t (offsets: target id = i + d2t[i]) and t2d name different tokens"]


def serving_tensors(
    head: Eagle3Head, *, d2t_W: Tensor, t2d_V: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The head's tensors under the names the engines read; no map when the vocabularies are equal."""
    tensors = {name: tensor.detach().cpu().to(dtype) for name, tensor in head.state_dict().items()}
    # The norm before attention of layers above the first has two names: vLLM's and SGLang's.
    tensors |= {twin: tensors[name].clone() for name, twin in twin_norms(head.geometry.num_layers).items()}
    if head.geometry.has_vocab_map:
        tensors |= {"d2t": d2t_W.to(torch.int64), "t2d": t2d_V.to(torch.bool)}
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def twin_norms(num_layers: int) -> dict[str, str]:
    """Name in vLLM -> name in SGLang of tensors that are written twice."""
    layers = [f"layers.{i}" for i in range(1, num_layers)]
    return {f"{layer}.input_layernorm.weight": f"{layer}.hidden_norm.weight" for layer in layers}


def write_weights(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes the tensors of a bundle."""
    save_file(tensors, path, metadata={"format": "pt"})


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a bundle.

    Raises:
        ValueError: there is no weight file.
    """
    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"{folder / WEIGHTS} does not exist: export a trained head into {folder} first")
    with safe_open(folder / WEIGHTS, framework="pt") as stored:
        return {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118


def load_head(folder: Path) -> ServedHead:
    """Reads a serving bundle, refusing what does not keep the contract.

    Raises:
        ValueError: a file, key or tensor is missing or wrong.
    """
    geometry = geometry_from_config(read_config(folder), folder / CONFIG)
    return assemble(geometry, read_tensors(folder), folder / WEIGHTS)


def assemble(geometry: DraftGeometry, tensors: dict[str, Tensor], source: Path) -> ServedHead:
    """A head from checked tensors.

    Raises:
        ValueError: they do not keep the contract.
    """
    check_tensors(geometry, tensors, str(source))
    for twin in twin_norms(geometry.num_layers).values():
        del tensors[twin]
    d2t = tensors.pop("d2t", torch.zeros(geometry.draft_vocab_size, dtype=torch.int64))
    t2d = tensors.pop("t2d", torch.ones(geometry.vocab_size, dtype=torch.bool))
    head = Eagle3Head(geometry)
    head.load_state_dict(tensors)
    return ServedHead(head=head.eval(), d2t_W=d2t, t2d_V=t2d)
