"""Drafts with an EAGLE-3 or EAGLE-3.1 head over its own key-value cache.

Shape suffixes: T committed row, F node of the level that is being extended, X node extended so far,
S cached row, L captured layer, D hidden size, V target vocabulary, W draft vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.data.target.resolve import Target
from slipstream.data.target.weights import read_target_head
from slipstream.drafters.checkpoint_format import CONFIG, load_head
from slipstream.drafters.config import DraftGeometry
from slipstream.drafters.eagle3 import Eagle3Head
from slipstream.drafters.layers import DraftCache
from slipstream.eval.drafting import Draft, ModelDrafter, Shape
from slipstream.eval.shapes import Chain
from slipstream.eval.verify import Sampling

MAX_EXTENDED = 128
"""Nodes a tree may extend beyond the tokens of a sequence."""


class EagleModel:
    """The head as a draft model: rows of the draft are replaced by rows of true target states."""

    def __init__(self, head: Eagle3Head, embedding_VD: Tensor, target_ids_W: Tensor) -> None:
        self.aux_layers: tuple[int, ...] = head.geometry.aux_layers
        self.target_ids_W, self.vocab_size = target_ids_W, len(embedding_VD)
        self._head, self._embedding_VD = head, embedding_VD
        self.cache_type = DraftCache

    def start(self, prompt_ids: Sequence[int], capacity: int) -> None:
        """See `DraftModel`."""
        embedding = self._embedding_VD
        # Room for the nodes of a tree, which are more than the tokens that are kept.
        room = capacity + MAX_EXTENDED
        self.cache = self.cache_type(1, room, self._head.geometry, embedding.device, embedding.dtype)
        self._position_S = torch.arange(room, device=embedding.device)
        self._num_committed = 0

    def commit(self, next_ids_T: Tensor, aux_LTD: Sequence[Tensor]) -> Tensor:
        """See `DraftModel`."""
        self.cache.truncate(self._num_committed)
        hidden_TD = self._head.fuse(torch.stack(tuple(aux_LTD), dim=1))
        position_T = self._position_S[self._num_committed : self._num_committed + len(next_ids_T)]
        self._num_committed += len(next_ids_T)
        return self._run(next_ids_T, hidden_TD, position_T, None)[-1:]

    def extend(self, ids_F: Tensor, parent_F: Tensor, visible_FX: Tensor, depth: int) -> Tensor:
        """See `DraftModel`."""
        hidden_FD = self.carried_TD[-1:] if depth == 1 else self.carried_TD[parent_F]
        position = self._position_S[self._num_committed + depth - 1]
        visible_FS = None
        if len(ids_F) > 1 or depth < visible_FX.shape[1]:
            visible_FS = F.pad(visible_FX, (self._num_committed, 0), value=True)
        return self._run(ids_F, hidden_FD.expand(len(ids_F), -1), position.expand(len(ids_F)), visible_FS)

    def _run(self, ids_T: Tensor, hidden_TD: Tensor, position_T: Tensor, visible_TS: Tensor | None) -> Tensor:
        embed_TD = F.embedding(ids_T, self._embedding_VD)
        carried_1TD, final_1TD = self._head(
            embed_TD[None], hidden_TD[None], position_T[None], self.cache, visible_TS
        )
        self.carried_TD = carried_1TD[0]
        # Of the committed rows only the last one is asked what follows.
        return self._head.logits(final_1TD[0] if visible_TS is not None else final_1TD[0, -1:])


class EagleDrafter:
    """Drafts with a head in evaluation mode, beside the target's embedding."""

    def __init__(
        self, head: Eagle3Head, embedding_VD: Tensor, target_ids_W: Tensor, shape: Shape | None = None
    ) -> None:
        """Takes the target id of each draft id; without a shape it drafts a chain."""
        self._head = head
        self.model = EagleModel(head, embedding_VD, target_ids_W)
        self._drafter = ModelDrafter(self.model, shape or Chain())
        self.aux_layers: tuple[int, ...] = head.geometry.aux_layers

    def fuse(self, aux_TLD: Tensor) -> Tensor:
        """Captured states to what the first layer reads, [T, D]."""
        return self._head.fuse(aux_TLD)

    def start(
        self, prompt_ids: Sequence[int], capacity: int, sampling: Sampling, generator: torch.Generator | None
    ) -> None:
        """See `Drafter`."""
        self._drafter.start(prompt_ids, capacity, sampling, generator)

    def propose(self, next_ids_T: Tensor, aux_LTD: Sequence[Tensor], num_tokens: int) -> Draft:
        """See `Drafter`."""
        return self._drafter.propose(next_ids_T, aux_LTD, num_tokens)


def load_eagle(target: Target, export_folder: Path, shape: Shape | None = None) -> EagleDrafter:
    """Reads a serving bundle for decoding beside `target`; without a shape it drafts a chain.

    Raises:
        ValueError: it is broken, or made for a target of another shape.
    """
    served = load_head(export_folder)
    refuse_other_target(served.head.geometry, target, export_folder)
    embedding_VD = read_target_head(target).embedding_VD.to(target.device, target.dtype)
    target_ids_W = torch.arange(served.head.geometry.draft_vocab_size) + served.d2t_W
    head = served.head.to(target.device, target.dtype)
    return EagleDrafter(head, embedding_VD, target_ids_W.to(target.device), shape)


def refuse_other_target(geometry: DraftGeometry, target: Target, folder: Path) -> None:
    """Raises ValueError when a head was made for a target of another shape."""
    model = target.config
    for key in ("hidden_size", "vocab_size"):
        found, wanted = getattr(geometry, key), getattr(model, key)
        if found != wanted:
            raise ValueError(
                f"{folder / CONFIG}: {key} is {found}, and {wanted} in target.name={target.name}: "
                f"evaluate with the target the head was trained for"
            )
    if geometry.aux_layers[-1] > model.num_hidden_layers:
        raise ValueError(
            f"{folder / CONFIG}: boundary {geometry.aux_layers[-1]} lies beyond the "
            f"{model.num_hidden_layers} layers of target.name={target.name}"
        )
