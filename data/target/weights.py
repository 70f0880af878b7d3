"""Reads the target's embedding, final norm and head without building the model.

Shape suffixes: V target vocabulary, D target hidden size.
"""

from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from slipstream.data.files import read_json, reading
from slipstream.data.target.resolve import MEND_TARGET, Target

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

PREFIXES = ("model.", "model.language_model.", "language_model.model.", "language_model.", "")
"""Where decoder tensors live: a plain model, then wrappers for images and others."""

PLUS_ONE = ("gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Model types whose RMSNorm multiplies by 1 + weight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetHeadWeights:
    """What turns token ids into embeddings and the state before the final norm into logits.

    logits = lm_head_VD @ (norm_D * x / rms(x)); tensors are on the CPU in the checkpoint's type.
    """

    embedding_VD: Tensor
    norm_D: Tensor
    lm_head_VD: Tensor
    """The embedding itself when the two are tied."""
    norm_eps: float


def read_target_head(target: Target) -> TargetHeadWeights:
    """Reads the three tensors; only the files that hold them are opened.

    Raises:
        ValueError: one of them is not there, which lists what was looked for, or a file is damaged.
    """
    embedding_VD = _read(target.path, "embed_tokens.weight")
    norm_D = _read(target.path, "norm.weight")
    return TargetHeadWeights(
        embedding_VD=embedding_VD,
        norm_D=norm_D + 1 if target.config.model_type in PLUS_ONE else norm_D,
        lm_head_VD=embedding_VD
        if target.config.tie_word_embeddings
        else _read(target.path, "lm_head.weight"),
        norm_eps=target.config.rms_norm_eps,
    )


def _read(folder: Path, suffix: str) -> Tensor:
    """The tensor called `suffix` behind one of the prefixes."""
    names = [prefix + suffix for prefix in PREFIXES]
    if (folder / INDEX).exists():
        index = read_json(folder / INDEX)
        with reading(folder / INDEX, way_out=MEND_TARGET):
            files: dict[str, str] = dict(index["weight_map"])
    elif (folder / SINGLE).exists():
        path = folder / SINGLE
        with reading(path, way_out=MEND_TARGET), safe_open(path, framework="pt") as tensors:
            files = dict.fromkeys(tensors.keys(), SINGLE)
    else:
        raise ValueError(f"{folder} holds neither {SINGLE} nor {INDEX}")
    name = next((name for name in names if name in files), None)
    if name is None:
        raise ValueError(f"{folder} holds none of the tensors {', '.join(names)}")
    path = folder / files[name]
    with reading(path, way_out=MEND_TARGET), safe_open(path, framework="pt") as tensors:
        tensor: Tensor = tensors.get_tensor(name)
    return tensor
