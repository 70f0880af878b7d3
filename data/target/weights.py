"""Reads the target's embedding, final norm and head without building the model.

Shape suffixes: V target vocabulary, D target hidden size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from slipstream.data.files import read_json
from slipstream.data.target.resolve import Target

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

PREFIXES = ("model.", "model.language_model.", "language_model.model.", "language_model.", "")
"""Where decoder tensors live: a plain model, then wrappers for images and others."""

SCALE_MINUS_ONE = (
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
)
"""Model types whose RMSNorm multiplies by 1 + weight."""

HEAD_PREFIXES = ("", "language_model.", "model.language_model.", "model.")


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetHeadWeights:
    """What turns token ids into embeddings and the state before the final norm into logits.

    logits = lm_head_VD @ (norm_D * x / rms(x)); tensors are on the CPU in the checkpoint's type.
    """

    embedding_VD: Tensor
    norm_D: Tensor
    lm_head_VD: Tensor
    norm_eps: float
    tied: bool
    """The head is the embedding."""


def read_target_head(target: Target) -> TargetHeadWeights:
    """Reads the three tensors; only the files that hold them are opened.

    Raises:
        ValueError: one of them is not there; lists what was looked for.
    """
    files = _files_by_name(target.path)
    embedding_VD = _read(files, [f"{p}embed_tokens.weight" for p in PREFIXES], target.path)
    norm_D = _read(files, [f"{p}norm.weight" for p in PREFIXES], target.path)
    if target.config.model_type in SCALE_MINUS_ONE:
        norm_D = norm_D + 1
    tied = bool(target.config.tie_word_embeddings)
    lm_head_VD = embedding_VD
    if not tied:
        lm_head_VD = _read(files, [f"{p}lm_head.weight" for p in HEAD_PREFIXES], target.path)
    return TargetHeadWeights(
        embedding_VD=embedding_VD,
        norm_D=norm_D,
        lm_head_VD=lm_head_VD,
        norm_eps=target.config.rms_norm_eps,
        tied=tied,
    )


def _files_by_name(folder: Path) -> Mapping[str, Path]:
    """Tensor name -> file that holds it."""
    if (folder / INDEX).exists():
        names: dict[str, str] = read_json(folder / INDEX)["weight_map"]
        return {name: folder / file for name, file in names.items()}
    if not (folder / SINGLE).exists():
        raise ValueError(f"{folder} holds neither {SINGLE} nor {INDEX}")
    with safe_open(folder / SINGLE, framework="pt") as tensors:
        return dict.fromkeys(tensors.keys(), folder / SINGLE)


def _read(files: Mapping[str, Path], names: list[str], folder: Path) -> Tensor:
    name = next((name for name in names if name in files), None)
    if name is None:
        raise ValueError(f"{folder} holds none of the tensors {', '.join(names)}")
    with safe_open(files[name], framework="pt") as tensors:
        tensor: Tensor = tensors.get_tensor(name)
    return tensor
