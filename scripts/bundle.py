"""Writes the serving bundle: config.json and model.safetensors (the card: `slipstream.scripts.card`)."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.data.config import Dtype
from slipstream.data.files import atomic_path, write_text
from slipstream.data.types import VocabMap
from slipstream.drafters.checkpoint_format import (
    CONFIG,
    WEIGHTS,
    check_tensors,
    serving_config,
    serving_tensors,
    speculators_config,
    write_weights,
)
from slipstream.drafters.config import DraftGeometry, Form
from slipstream.drafters.eagle1 import eagle1_config
from slipstream.drafters.eagle3 import Eagle3Head
from slipstream.drafters.medusa import medusa_config, medusa_tensors
from slipstream.recipes.schema import Recipe

if TYPE_CHECKING:
    from slipstream.data.target.resolve import Target


def write_bundle(
    folder: Path,
    *,
    tensors: dict[str, Tensor],
    geometry: DraftGeometry,
    vocab_map: VocabMap,
    target: "Target",
    recipe: Recipe,
) -> list[str]:
    """Writes the two files; nothing is written unless the tensors keep the contract.

    Args:
        folder: of the bundle.
        tensors: the head's state.
        geometry: the head's geometry.
        vocab_map: d2t and t2d.
        target: the model the head was trained for.
        recipe: of the export.

    Returns:
        Names of the files.
    """
    chosen = recipe.export.dtype if recipe.export.dtype is not Dtype.auto else recipe.train.deepspeed.dtype
    dtype = getattr(torch, chosen.value)
    bundle = _BUNDLES[recipe.drafter.kind]
    served, config = bundle(tensors, geometry, vocab_map, target, recipe, dtype)
    with atomic_path(folder / WEIGHTS) as temporary:
        write_weights(temporary, served)
    write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")
    return [CONFIG, WEIGHTS]


def _eagle3(
    tensors: dict[str, Tensor],
    geometry: DraftGeometry,
    vocab_map: VocabMap,
    target: "Target",
    recipe: Recipe,
    dtype: torch.dtype,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    head = Eagle3Head(geometry)
    head.load_state_dict(tensors)
    served = serving_tensors(head, d2t_W=vocab_map.d2t_W, t2d_V=vocab_map.t2d_V, dtype=dtype)
    check_tensors(geometry, served, WEIGHTS)
    config = serving_config(
        geometry,
        engines=recipe.export.engines,
        bos=target.config.bos_token_id,
        eos=target.config.eos_token_id,
        dtype=dtype,
    )
    if recipe.export.format is Form.speculators:
        config = speculators_config(
            config,
            target_name=recipe.export.target_id or target.name,
            target_architectures=target.config.architectures or [],
            num_draft_tokens=recipe.eval.num_draft_tokens,
        )
    return served, config


def _eagle1(
    tensors: dict[str, Tensor],
    geometry: DraftGeometry,
    vocab_map: VocabMap,
    target: "Target",
    recipe: Recipe,
    dtype: torch.dtype,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    bos, eos = target.config.bos_token_id, target.config.eos_token_id
    served = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    return served, eagle1_config(geometry, bos=bos, eos=eos, dtype=dtype)


def _medusa(
    tensors: dict[str, Tensor],
    geometry: DraftGeometry,
    vocab_map: VocabMap,
    target: "Target",
    recipe: Recipe,
    dtype: torch.dtype,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    served = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    served = medusa_tensors(served, vocab_map.target_ids_W, geometry.vocab_size)
    return served, medusa_config(geometry, dtype=dtype)


_BUNDLES = {"eagle3": _eagle3, "eagle1": _eagle1, "medusa": _medusa}
METHODS = {"eagle3": "eagle3", "eagle1": "eagle", "medusa": "medusa"}
"""Kind of head -> vLLM's name of the method."""


def served_depth(geometry: DraftGeometry, recipe: Recipe) -> int:
    """Positions an engine drafts: of Medusa no more than it has heads, or vLLM makes up further ones."""
    k = recipe.eval.num_draft_tokens
    return min(k, geometry.num_heads) if recipe.drafter.kind == "medusa" else k
