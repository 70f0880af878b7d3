"""Drafts with an EAGLE-1 head; with the shape `tree` that is EAGLE-2.

Shape suffixes: T committed row, F node of the level that is being extended, X node extended so far,
L captured layer, D hidden size, V target vocabulary, W draft vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.data.target.resolve import Target
from slipstream.data.target.weights import TargetHeadWeights, read_target_head
from slipstream.drafters.eagle1 import Eagle1Head, read_eagle1
from slipstream.drafters.layers import DraftCache
from slipstream.drafters.ttt_attention import cached_attention
from slipstream.eval.drafters.eagle import MAX_EXTENDED, refuse_other_target
from slipstream.eval.drafting import ModelDrafter, Shape


class FeatureModel:
    """The head as a draft model; the target's embedding, norm and head are its own."""

    def __init__(self, head: Eagle1Head, target: TargetHeadWeights) -> None:
        """Takes all tensors on the target's device and in its type."""
        self.aux_layers: tuple[int, ...] = head.geometry.aux_layers
        self.vocab_size = len(target.lm_head_VD)
        self.target_ids_W = torch.arange(self.vocab_size, device=target.lm_head_VD.device)
        self._head, self._target = head, target

    def start(self, prompt_ids: Sequence[int], capacity: int) -> None:
        """See `DraftModel`."""
        embedding, room = self._target.embedding_VD, capacity + MAX_EXTENDED
        self._cache = DraftCache(1, room, self._head.geometry, embedding.device, embedding.dtype)
        self._position_S = torch.arange(room, device=embedding.device)
        self._num_committed = 0

    def commit(self, next_ids_T: Tensor, aux_LTD: Sequence[Tensor]) -> Tensor:
        """See `DraftModel`."""
        self._cache.truncate(self._num_committed)
        norm_D = self._target.norm_D
        feature_TD = F.rms_norm(aux_LTD[-1], norm_D.shape, norm_D, self._target.norm_eps)
        position_T = self._position_S[self._num_committed : self._num_committed + len(next_ids_T)]
        self._num_committed += len(next_ids_T)
        self._feature_TD = self._run(next_ids_T, feature_TD, position_T, None)[-1:]
        return F.linear(self._feature_TD, self._target.lm_head_VD)

    def extend(self, ids_F: Tensor, parent_F: Tensor, visible_FX: Tensor, depth: int) -> Tensor:
        """See `DraftModel`."""
        position_F = self._position_S[self._num_committed + depth - 1].expand(len(ids_F))
        visible_FS = F.pad(visible_FX, (self._num_committed, 0), value=True)
        self._feature_TD = self._run(ids_F, self._feature_TD[parent_F], position_F, visible_FS)
        return F.linear(self._feature_TD, self._target.lm_head_VD)

    def _run(
        self, ids_T: Tensor, feature_TD: Tensor, position_T: Tensor, visible_TS: Tensor | None
    ) -> Tensor:
        def attend(query_1TNH: Tensor, key_1TMH: Tensor, value_1TMH: Tensor) -> Tensor:
            key, value = self._cache.append(0, key_1TMH, value_1TMH)
            return cached_attention(query_1TNH, key, value, visible_TS)

        embed_TD = F.embedding(ids_T, self._target.embedding_VD)
        out_1TD: Tensor = self._head(embed_TD[None], feature_TD[None], position_T[None], attend)
        self._cache.advance(len(ids_T))
        return out_1TD[0]


def load_eagle1(target: Target, folder: Path, shape: Shape) -> ModelDrafter:
    """Reads a serving bundle.

    Raises:
        ValueError: it is broken, or made for a target of another shape.
    """
    head = read_eagle1(folder)
    refuse_other_target(head.geometry, target, folder)
    return ModelDrafter(
        FeatureModel(head.to(target.device, target.dtype), target_head_on_device(target)), shape
    )


def target_head_on_device(target: Target) -> TargetHeadWeights:
    """Embedding, norm and head of the target where and how it runs."""
    read = read_target_head(target)
    embedding, norm, lm_head = (
        x.to(target.device, target.dtype) for x in (read.embedding_VD, read.norm_D, read.lm_head_VD)
    )
    return TargetHeadWeights(embedding_VD=embedding, norm_D=norm, lm_head_VD=lm_head, norm_eps=read.norm_eps)
