"""Drafters of heads that are in memory: while they are trained, before anything is exported."""

from torch import Tensor, nn

from slipstream.data.target.weights import TargetHeadWeights
from slipstream.drafters.eagle1 import Eagle1Head
from slipstream.drafters.eagle3 import Eagle3Head
from slipstream.drafters.medusa import MedusaHeads
from slipstream.eval.drafters.eagle import EagleDrafter
from slipstream.eval.drafters.eagle1 import FeatureModel
from slipstream.eval.drafters.medusa import MedusaDraftModel
from slipstream.eval.drafting import Drafter, ModelDrafter
from slipstream.eval.shapes import Chain


def make_drafter(head: nn.Module, target: TargetHeadWeights, target_ids_W: Tensor) -> Drafter:
    """A drafter of chains; head and tensors lie on the target's device in its type."""
    if isinstance(head, Eagle1Head):
        return ModelDrafter(FeatureModel(head, target), Chain())
    if isinstance(head, MedusaHeads):
        model = MedusaDraftModel(head, target_ids_W, target)
        return ModelDrafter(model, Chain(), max_depth=model.max_depth)
    assert isinstance(head, Eagle3Head)
    return EagleDrafter(head, target.embedding_VD, target_ids_W)
