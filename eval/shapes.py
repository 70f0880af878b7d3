"""Shapes of a draft: a chain, a static tree, the dynamic tree of EAGLE-2, and a tree by entropy.

Shape suffixes: F node of the level that is being extended, C child candidate, X node extended so
far, K drafted token, V target vocabulary, W draft vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.eval.drafting import Draft, DraftModel, Draw, Tree

RANK_PRIOR = (0.5, 0.18, 0.09, 0.05, 0.03, 0.02, 0.015, 0.01)
"""Assumed chance that the target's token is the draft's first, second, ... choice."""
MAX_DEPTH, MAX_WIDTH, MAX_NODES = 6, 8, 64
"""Bounds of the tree by entropy."""


@dataclass(frozen=True, slots=True)
class Chain:
    """One token behind the other: the likeliest, or sampled where the target samples."""

    def grow(self, model: DraftModel, logits_1W: Tensor, max_depth: int, draw: Draw) -> Draft:
        """See `Shape`."""
        ids: list[Tensor] = []
        probs: list[Tensor] = []
        parent_1 = torch.zeros(1, dtype=torch.int64, device=logits_1W.device)
        for depth in range(1, max_depth + 1):
            if draw.sampling.is_greedy:
                draft_1 = logits_1W.argmax(dim=-1)
            else:
                probs.append(draw.sampling.probs(logits_1W))
                draft_1 = torch.multinomial(probs[-1], 1, generator=draw.generator)[0]
            ids.append(model.target_ids_W[draft_1])
            if depth < max_depth:
                visible_1X = torch.ones(1, depth, dtype=torch.bool, device=logits_1W.device)
                logits_1W = model.extend(ids[-1], parent_1, visible_1X, depth)
        if not probs:
            return Draft(ids_K=torch.cat(ids))
        return Draft(ids_K=torch.cat(ids), probs_KV=_over_target(torch.cat(probs), model))


class StaticTree:
    """A tree that is the same in every round, a path being the rank of the child at each level.

    Where the target samples, siblings are drawn without replacement, each from what the ones
    before left.
    """

    def __init__(self, paths: Sequence[Sequence[int]]) -> None:
        """Takes the paths of all nodes.

        Raises:
            ValueError: a path whose parent or elder sibling is missing.
        """
        nodes = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
        for path in nodes:
            elder = (*path[:-1], path[-1] - 1)
            if (len(path) > 1 and path[:-1] not in nodes) or (path[-1] > 0 and elder not in nodes):
                raise ValueError(
                    f"eval.tree.paths: {list(path)} has no parent or no elder sibling in the list"
                )
        place = {path: i for i, path in enumerate(nodes)} | {(): -1}
        self._levels: list[_Level] = []
        for depth in range(1, max(map(len, nodes)) + 1):
            level = [path for path in nodes if len(path) == depth]
            above = [path for path in nodes if len(path) == depth - 1] or [()]
            self._levels.append(
                _Level(
                    parent_row_F=torch.tensor([above.index(path[:-1]) for path in level]),
                    rank_F=torch.tensor([path[-1] for path in level]),
                    parent_F=torch.tensor([place[path[:-1]] for path in level]),
                )
            )

    def grow(self, model: DraftModel, logits_1W: Tensor, max_depth: int, draw: Draw) -> Draft:
        """See `Shape`."""
        device, logits_FW = logits_1W.device, logits_1W
        levels = [level.to(device) for level in self._levels[:max_depth]]
        visible_FX = torch.zeros(1, 0, dtype=torch.bool, device=device)
        ids, probs = [], []
        for depth, level in enumerate(levels, 1):
            num_ranks = int(self._levels[depth - 1].rank_F.max()) + 1
            if draw.sampling.is_greedy:
                child_FC = logits_FW.topk(num_ranks, dim=-1).indices
            else:
                child_FC, left_FCW = _draw_siblings(logits_FW, num_ranks, draw)
                probs.append(left_FCW[level.parent_row_F, level.rank_F])
            ids.append(model.target_ids_W[child_FC[level.parent_row_F, level.rank_F]])
            if depth < len(levels):
                visible_FX = _see(visible_FX, level.parent_row_F)
                logits_FW = model.extend(ids[-1], level.parent_row_F, visible_FX, depth)
        parent_K = torch.cat([level.parent_F for level in levels])
        return Draft(
            ids_K=torch.cat(ids),
            probs_KV=_over_target(torch.cat(probs), model) if probs else None,
            tree=make_tree(parent_K, len(levels)),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Level:
    parent_row_F: Tensor
    rank_F: Tensor
    parent_F: Tensor

    def to(self, device: torch.device) -> "_Level":
        return _Level(
            parent_row_F=self.parent_row_F.to(device),
            rank_F=self.rank_F.to(device),
            parent_F=self.parent_F.to(device),
        )


def likely_paths(num_nodes: int, max_depth: int) -> list[tuple[int, ...]]:
    """The paths of a static tree that hold most of the probability under `RANK_PRIOR`.

    >>> likely_paths(4, 3)
    [(0,), (0, 0), (1,), (0, 0, 0)]
    """
    done: list[tuple[int, ...]] = []
    open_paths: dict[tuple[int, ...], float] = {(0,): RANK_PRIOR[0]}
    while open_paths and len(done) < num_nodes:
        best = max(open_paths, key=lambda path: (open_paths[path], -len(path)))
        chance = open_paths.pop(best)
        done.append(best)
        if len(best) < max_depth:
            open_paths[(*best, 0)] = chance * RANK_PRIOR[0]
        if (rank := best[-1] + 1) < len(RANK_PRIOR):
            open_paths[(*best[:-1], rank)] = chance * RANK_PRIOR[rank] / RANK_PRIOR[rank - 1]
    return done


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicTree:
    """EAGLE-2 (2406.16858): expand the likeliest nodes of each level, then keep the best of all.

    A node scores the product of the draft's probabilities along its path. Its children are the
    likeliest tokens for certain, so the rule that accepts them is the one for q one-hot.
    """

    top_k: int
    """Children of a node, and nodes of a level that are expanded."""
    num_nodes: int
    """Drafted tokens."""

    def grow(self, model: DraftModel, logits_1W: Tensor, max_depth: int, draw: Draw) -> Draft:
        """See `Shape`."""
        return _grow_by_score(self, model, logits_1W, max_depth)

    def widths(self, log_probs_FW: Tensor) -> Tensor:
        """How many children each node gets, [F, 1]."""
        return torch.full((len(log_probs_FW), 1), self.top_k, device=log_probs_FW.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropyTree:
    """Deepens where the draft is sure and widens where it is not.

    A node gets as many children as its distribution has effective choices, exp(entropy) rounded:
    one when it is sure. Depth <= 6, width <= 8, nodes <= 64.
    """

    top_k: int = MAX_WIDTH
    num_nodes: int = MAX_NODES

    def grow(self, model: DraftModel, logits_1W: Tensor, max_depth: int, draw: Draw) -> Draft:
        """See `Shape`."""
        return _grow_by_score(self, model, logits_1W, min(max_depth, MAX_DEPTH))

    def widths(self, log_probs_FW: Tensor) -> Tensor:
        """Effective choices of each node, [F, 1]."""
        entropy_F = torch.special.entr(log_probs_FW.exp()).sum(-1)
        choices_F: Tensor = entropy_F.exp().round().clamp(1, min(self.top_k, MAX_WIDTH))
        return choices_F[:, None]


def _grow_by_score(
    shape: DynamicTree | EntropyTree, model: DraftModel, logits_FW: Tensor, max_depth: int
) -> Draft:
    device = logits_FW.device
    score_F = torch.zeros(1, device=device)
    node_F = torch.full((1,), -1, device=device)  # place of each open node in the pool of all
    visible_FX = torch.zeros(1, 0, dtype=torch.bool, device=device)
    width = min(shape.top_k, logits_FW.shape[-1])
    rank_C = torch.arange(width, device=device)
    ids, parents, scores, num_pooled = [], [], [], 0
    for depth in range(1, max_depth + 1):
        log_probs_FW = logits_FW.float().log_softmax(-1)
        best_FC, draft_FC = log_probs_FW.topk(width, dim=-1)
        score_FC = (score_F[:, None] + best_FC).masked_fill_(rank_C >= shape.widths(log_probs_FW), -math.inf)
        ids.append(model.target_ids_W[draft_FC].flatten())
        parents.append(node_F[:, None].expand(-1, width).flatten())
        scores.append(score_FC.flatten())
        if depth < max_depth:
            score_F, pick_F = scores[-1].topk(min(width, scores[-1].numel()))
            parent_row_F, node_F = pick_F // width, pick_F + num_pooled
            visible_FX = _see(visible_FX, parent_row_F)
            logits_FW = model.extend(ids[-1][pick_F], parent_row_F, visible_FX, depth)
        num_pooled += scores[-1].numel()
    score_X, parent_X = torch.cat(scores), torch.cat(parents)
    # Stable: of equals the parent, which comes first and scores no less, stays before its child.
    order_X = score_X.sort(descending=True, stable=True).indices
    num_nodes = min(shape.num_nodes, int((score_X > -math.inf).sum()))
    kept_K = order_X[:num_nodes]
    place_X = torch.full((num_pooled + 1,), -1, device=device)  # the last entry serves parent -1
    place_X[kept_K] = torch.arange(num_nodes, device=device)
    parent_K = place_X[parent_X[kept_K]]
    return Draft(ids_K=torch.cat(ids)[kept_K], tree=make_tree(parent_K, max_depth))


def make_tree(parent_K: Tensor, max_depth: int) -> Tree:
    """A tree from its parents; `max_depth` bounds its depth.

    >>> make_tree(torch.tensor([-1, 0, 0]), 2).depth_K
    tensor([1, 2, 2])
    """
    visible_KK = torch.eye(len(parent_K), dtype=torch.bool, device=parent_K.device)
    nothing_1K = torch.zeros(1, len(parent_K), dtype=torch.bool, device=parent_K.device)
    for _ in range(max_depth - 1):
        visible_KK = visible_KK | torch.cat([visible_KK, nothing_1K])[parent_K]  # -1: the last row
    return Tree(parent_K=parent_K, depth_K=visible_KK.sum(-1), visible_KK=visible_KK)


def _see(visible_FX: Tensor, parent_row_F: Tensor) -> Tensor:
    """A new level sees what its parents see, and itself."""
    itself_FF = torch.eye(len(parent_row_F), dtype=torch.bool, device=visible_FX.device)
    return torch.cat([visible_FX[parent_row_F], itself_FF], dim=1)


def _draw_siblings(logits_FW: Tensor, num: int, draw: Draw) -> tuple[Tensor, Tensor]:
    """Draws `num` tokens a row without replacement: ids [F, C] and what each was drawn from [F, C, W]."""
    left_FW = draw.sampling.probs(logits_FW)
    ids, lefts = [], []
    for _ in range(num):
        total_F1 = left_FW.sum(-1, keepdim=True)
        # Where nothing is left any token is proposed for certain: the likeliest of the logits' rest.
        spent_FW = torch.zeros_like(left_FW).scatter_(-1, logits_FW.argmax(-1, keepdim=True), 1.0)
        left_FW = torch.where(total_F1 > 0, left_FW / total_F1.clamp_min(1e-30), spent_FW)
        id_F1 = torch.multinomial(left_FW, 1, generator=draw.generator)
        ids.append(id_F1)
        lefts.append(left_FW)
        left_FW = left_FW.scatter(-1, id_F1, 0.0)
    return torch.cat(ids, dim=1), torch.stack(lefts, dim=1)


def _over_target(probs_KW: Tensor, model: DraftModel) -> Tensor:
    """Draft probabilities in the places of the target's vocabulary."""
    probs_KV = probs_KW.new_zeros(len(probs_KW), model.vocab_size)
    probs_KV[:, model.target_ids_W] = probs_KW
    return probs_KV
