"""Random draft heads, cached documents and targets' tensors for tests."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from slipstream.data.cache import RowInfo
from slipstream.data.types import HiddenStateSample
from slipstream.drafters.checkpoint_format import (
    CONFIG,
    WEIGHTS,
    serving_config,
    serving_tensors,
    write_weights,
)
from slipstream.drafters.config import DraftGeometry, Engine, Init
from slipstream.drafters.eagle3 import Eagle3Head
from slipstream.train.ttt import FrozenTarget

VOCAB, DRAFT_VOCAB, HIDDEN = 60, 40, 32


def make_geometry(**overrides: Any) -> DraftGeometry:
    """A small geometry with grouped queries."""
    values: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
        "aux_layers": (2, 4, 5),
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "qk_norm": False,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
    }
    return DraftGeometry(**(values | overrides))


def make_head(geometry: DraftGeometry, seed: int = 0) -> Eagle3Head:
    """A head whose every weight matters: large random matrices and uneven norms."""
    head = Eagle3Head(geometry)
    head.initialise(Init.random, lm_head_WD=torch.empty(0), norm_D=torch.empty(0), seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.empty(parameter.shape).normal_(generator=generator)
            parameter.copy_(0.15 * noise if parameter.dim() > 1 else 1 + 0.3 * noise)
    return head


def make_frozen(geometry: DraftGeometry, seed: int = 0) -> FrozenTarget:
    """Target tensors; the draft vocabulary is every third-but-one id."""
    generator = torch.Generator().manual_seed(seed + 2)
    ids = torch.randperm(geometry.vocab_size, generator=generator)[: geometry.draft_vocab_size].sort().values
    draft_ids = torch.full((geometry.vocab_size,), -1)
    draft_ids[ids] = torch.arange(geometry.draft_vocab_size)
    normal = torch.empty(geometry.vocab_size, geometry.hidden_size).normal_(generator=generator)
    return FrozenTarget(
        embedding_VD=normal,
        norm_D=1 + 0.2 * torch.empty(geometry.hidden_size).normal_(generator=generator),
        norm_eps=1e-5,
        lm_head_WD=0.3 * normal[ids],
        draft_ids_V=draft_ids,
    )


def make_sample(name: str, mask: list[int], *, geometry: DraftGeometry, seed: int = 0) -> HiddenStateSample:
    """A document with random states and the given generated-token mask."""
    generator = torch.Generator().manual_seed(seed + 7)
    loss_mask = torch.tensor(mask, dtype=torch.bool)
    num_tokens, num_teachers = len(mask), int(loss_mask.sum())
    width = geometry.hidden_size
    return HiddenStateSample(
        id=name,
        input_ids_T=torch.randint(geometry.vocab_size, (num_tokens,), generator=generator),
        loss_mask_T=loss_mask,
        aux_TLD=torch.empty(num_tokens, len(geometry.aux_layers), width).normal_(generator=generator),
        last_hidden_PD=torch.empty(num_teachers, width).normal_(generator=generator),
        argmax_P=torch.randint(geometry.vocab_size, (num_teachers,), generator=generator),
        logsumexp_P=6 + torch.empty(num_teachers).uniform_(generator=generator),
    )


def write_export(
    folder: Path,
    head: Eagle3Head,
    target_ids_W: torch.Tensor,
    *,
    engines: Sequence[Engine] = tuple(Engine),
    dtype: torch.dtype = torch.float32,
) -> Path:
    """A serving bundle of a head in the plain form."""
    geometry = head.geometry
    t2d = torch.zeros(geometry.vocab_size, dtype=torch.bool)
    t2d[target_ids_W] = True
    d2t = target_ids_W - torch.arange(target_ids_W.numel())
    folder.mkdir(exist_ok=True)
    write_weights(folder / WEIGHTS, serving_tensors(head, d2t_W=d2t, t2d_V=t2d, dtype=dtype))
    config = serving_config(geometry, engines=engines, bos=0, eos=[1, 2], dtype=dtype)
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


class MemorySource:
    """A hidden-state source in memory."""

    def __init__(self, train: list[HiddenStateSample], validation: list[HiddenStateSample]) -> None:
        self._samples = {sample.id: sample for sample in [*train, *validation]}
        self._splits = {"train": train, "validation": validation}

    def rows(self, split: str) -> list[RowInfo]:
        """See `HiddenStateSource`."""
        return [
            RowInfo(
                id=sample.id,
                split=split,
                num_tokens=sample.input_ids_T.numel(),
                num_supervised=int(sample.loss_mask_T.sum()),
            )
            for sample in self._splits[split]
        ]

    def load(self, id: str) -> HiddenStateSample:
        """See `HiddenStateSource`."""
        return self._samples[id]
