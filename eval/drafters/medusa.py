"""Drafts with Medusa heads: the tokens of a level do not depend on the branch they stand in.

Shape suffixes: T committed row, F node of the level that is being extended, X node extended so far,
L captured layer, D hidden size, W draft vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from slipstream.data.target.resolve import Target
from slipstream.data.target.weights import TargetHeadWeights
from slipstream.drafters.medusa import MedusaHeads, read_medusa
from slipstream.eval.drafters.eagle import refuse_other_target
from slipstream.eval.drafters.eagle1 import target_head_on_device
from slipstream.eval.drafting import ModelDrafter, Shape


class MedusaDraftModel:
    """The heads as a draft model: head k gives the logits of level k + 1."""

    def __init__(self, heads: MedusaHeads, target_ids_W: Tensor, target: TargetHeadWeights) -> None:
        """Takes all tensors on the target's device and in its type."""
        self.aux_layers: tuple[int, ...] = heads.geometry.aux_layers
        self.target_ids_W, self.vocab_size = target_ids_W, heads.geometry.vocab_size
        self.max_depth = heads.geometry.num_heads
        self._heads, self._target = heads, target

    def start(self, prompt_ids: Sequence[int], capacity: int) -> None:
        """See `DraftModel`."""

    def commit(self, next_ids_T: Tensor, aux_LTD: Sequence[Tensor]) -> Tensor:
        """See `DraftModel`."""
        norm_D = self._target.norm_D
        self._feature_1D = F.rms_norm(aux_LTD[-1][-1:], norm_D.shape, norm_D, self._target.norm_eps)
        logits_1W: Tensor = self._heads(0, self._feature_1D)
        return logits_1W

    def extend(self, ids_F: Tensor, parent_F: Tensor, visible_FX: Tensor, depth: int) -> Tensor:
        """See `DraftModel`."""
        logits_1W: Tensor = self._heads(depth, self._feature_1D)
        return logits_1W.expand(len(ids_F), -1)


def load_medusa(target: Target, folder: Path, shape: Shape) -> ModelDrafter:
    """Reads a serving bundle.

    Raises:
        ValueError: it is broken, or made for a target of another shape.
    """
    served = read_medusa(folder)
    refuse_other_target(served.heads.geometry, target, folder)
    model = MedusaDraftModel(
        served.heads.to(target.device, target.dtype),
        served.target_ids_W.to(target.device),
        target_head_on_device(target),
    )
    return ModelDrafter(model, shape, max_depth=model.max_depth)
