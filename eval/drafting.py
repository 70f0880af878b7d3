"""What the decoder asks of a drafter, and what most drafters are made of: a draft model and a shape.

A `Drafter` proposes a `Draft`, a chain or a tree. Whatever gives a distribution over the next token
(a head, a small language model) is a `DraftModel`; a `Shape` (`slipstream.eval.shapes`) asks it level
by level and decides which tokens enter the draft. Docs: docs/add_a_drafter.md.

Shape suffixes: T committed row, F node of the level that is being extended, X node extended so far,
K drafted token, L captured layer, D hidden size, V target vocabulary, W draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipstream.eval.verify import Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    """Who stands behind whom; parents come before their children."""

    parent_K: Tensor
    """int64; place of the parent among the drafted tokens, -1: the last committed token."""
    depth_K: Tensor
    """int64; 1 for the children of the last committed token."""
    visible_KK: Tensor
    """bool; row k sees its ancestors and itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """Proposed tokens."""

    ids_K: Tensor
    """int64 target ids, on the target's device."""
    probs_KV: Tensor | None = None
    """What each was sampled from, over the target vocabulary; None: chosen for certain."""
    tree: Tree | None = None
    """None: a chain, each token behind the one before."""


class Drafter(Protocol):
    """Proposes tokens for one sequence at a time."""

    aux_layers: tuple[int, ...]
    """Boundaries of the target states it reads."""

    def start(
        self, prompt_ids: Sequence[int], capacity: int, sampling: Sampling, generator: torch.Generator | None
    ) -> None:
        """Begins a sequence of at most `capacity` tokens, sampled as the target's are."""

    def propose(self, next_ids_T: Tensor, aux_LTD: Sequence[Tensor], num_tokens: int) -> Draft:
        """Drafts behind the committed tokens.

        Args:
            next_ids_T: the token after each row committed since the last call; the last one was
                just sampled and has no state yet.
            aux_LTD: states of these rows, one [T, D] for each of `aux_layers`.
            num_tokens: at most so deep, at least 1.
        """


class DraftModel(Protocol):
    """Gives draft logits behind the committed tokens and behind drafted ones."""

    aux_layers: tuple[int, ...]
    target_ids_W: Tensor
    """The target id of each draft id."""
    vocab_size: int
    """V."""

    def start(self, prompt_ids: Sequence[int], capacity: int) -> None:
        """Begins a sequence."""

    def commit(self, next_ids_T: Tensor, aux_LTD: Sequence[Tensor]) -> Tensor:
        """Takes the committed rows (see `Drafter.propose`), forgets the drafted ones.

        Returns:
            Logits [1, W] of the first drafted token.
        """

    def extend(self, ids_F: Tensor, parent_F: Tensor, visible_FX: Tensor, depth: int) -> Tensor:
        """Takes the tokens of one level of the tree.

        Args:
            ids_F: their target ids.
            parent_F: the parent of each, as its row in the logits returned before.
            visible_FX: bool; which tokens given since `commit`, these included, each one sees.
            depth: of all of them, from 1.

        Returns:
            Logits [F, W] of what follows each.
        """


class Shape(Protocol):
    """Decides which tokens a draft model proposes."""

    def grow(self, model: DraftModel, logits_1W: Tensor, max_depth: int, draw: "Draw") -> Draft:
        """A draft at most `max_depth` deep; `logits_1W` are those of the first level."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """How drafted tokens are chosen: as the target's are."""

    sampling: Sampling
    generator: torch.Generator | None


class ModelDrafter:
    """A draft model whose proposals have a given shape."""

    def __init__(self, model: DraftModel, shape: Shape, max_depth: int | None = None) -> None:
        """Drafts no deeper than `max_depth`, if the model has a limit."""
        self.model, self._shape, self._max_depth = model, shape, max_depth
        self.aux_layers: tuple[int, ...] = model.aux_layers

    def start(
        self, prompt_ids: Sequence[int], capacity: int, sampling: Sampling, generator: torch.Generator | None
    ) -> None:
        """See `Drafter`."""
        self._draw = Draw(sampling=sampling, generator=generator)
        self.model.start(prompt_ids, capacity)

    def propose(self, next_ids_T: Tensor, aux_LTD: Sequence[Tensor], num_tokens: int) -> Draft:
        """See `Drafter`."""
        logits_1W = self.model.commit(next_ids_T, aux_LTD)
        num_tokens = min(num_tokens, self._max_depth or num_tokens)
        return self._shape.grow(self.model, logits_1W, num_tokens, self._draw)
