"""Puts together what training needs: the target's frozen tensors, a head, the module that unrolls it."""

from pathlib import Path
from typing import Any

import torch

from slipstream.data.cache import HiddenStateCache
from slipstream.data.target.resolve import Target
from slipstream.data.target.weights import read_target_head
from slipstream.data.vocab_map import read_vocab_map
from slipstream.drafters.config import DraftGeometry, Init
from slipstream.drafters.importer import ImportedHead
from slipstream.drafters.registry import DRAFTERS
from slipstream.recipes.schema import Recipe
from slipstream.train.rivals import Eagle1Unroller, MedusaUnroller
from slipstream.train.ttt import FrozenTarget, Unroller
from slipstream.train.warm_start import regression_start

REGRESSION_DOCUMENTS = 1000
"""Documents that drafter.init=regression looks at."""


def frozen_target(target: Target, map_folder: Path) -> FrozenTarget:
    """What training reads of the target and never changes, on the CPU."""
    head, vocab_map = read_target_head(target), read_vocab_map(map_folder)
    return FrozenTarget(
        embedding_VD=head.embedding_VD,
        norm_D=head.norm_D,
        norm_eps=head.norm_eps,
        lm_head_WD=head.lm_head_VD[vocab_map.target_ids_W],
        draft_ids_V=vocab_map.draft_ids_V,
    )


def new_head(
    recipe: Recipe,
    geometry: DraftGeometry,
    frozen: FrozenTarget,
    source: HiddenStateCache,
    imported: ImportedHead | None = None,
) -> Any:
    """A head with its first weights, the same on every rank: those of an imported one, if there is one.

    Raises:
        ValueError: the imported head has another vocabulary map than the run.
    """
    if imported is not None:
        if not torch.equal(imported.t2d_V, frozen.draft_ids_V >= 0):
            raise ValueError(
                f"train.init_from={recipe.train.init_from} has another vocabulary map than this run, which "
                f"was begun with the head that was there then: set run_dir to another folder"
            )
        return imported.head.train()
    config = recipe.drafter
    head: Any = DRAFTERS[config.kind](geometry)
    head.initialise(
        config.init, lm_head_WD=frozen.lm_head_WD.float(), norm_D=frozen.norm_D.float(), seed=recipe.seed
    )
    if config.init is Init.regression and config.kind == "eagle3":
        regression_start(head, source, frozen, num_documents=REGRESSION_DOCUMENTS)
    return head


def make_unroller(recipe: Recipe, head: Any, frozen: FrozenTarget) -> Any:
    """The module that is trained."""
    if recipe.drafter.kind == "eagle1":
        return Eagle1Unroller(head, frozen)
    if recipe.drafter.kind == "medusa":
        return MedusaUnroller(head, frozen, survival=recipe.train.unroll.survival)
    return Unroller(head, frozen, recipe.train.loss)
