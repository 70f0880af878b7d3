"""Verification of a tree: what the target is given, and which branch is accepted.

Shape suffixes: K drafted token, N = K + 1 verified position (0 is the last committed token), S token
in the cache, V target vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.eval.drafting import Tree
from slipstream.eval.verify import Dice


def tree_inputs(tree: Tree, num_cached: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Mask and positions for the target's ordinary forward pass over [last token, drafted tokens].

    Every token sees the `num_cached` committed ones; a drafted one also the last token, its own
    ancestors and itself, and stands `depth` behind the last token.
    """
    num_drafts = len(tree.parent_K)
    mask_NS = torch.zeros(
        num_drafts + 1, num_cached + num_drafts + 1, dtype=dtype, device=tree.parent_K.device
    )
    lowest = torch.finfo(dtype).min
    mask_NS[0, num_cached + 1 :] = lowest
    mask_NS[1:, num_cached + 1 :].masked_fill_(~tree.visible_KK, lowest)
    position_N = torch.cat([tree.depth_K.new_zeros(1), tree.depth_K]) + num_cached
    return {"attention_mask": mask_NS[None, None], "position_ids": position_N[None]}


def refuse_sliding(config: Any) -> None:
    """Raises ValueError for a target with sliding-window layers, which a tree's mask would switch off."""
    settings = config.to_dict()
    layer_types = settings.get("layer_types")
    if "sliding_attention" in layer_types if layer_types else settings.get("sliding_window"):
        raise ValueError(
            "eval.drafter: a tree cannot be verified by a target with sliding-window attention: use the "
            "chain (no shape behind the drafter's name)"
        )


def accept_tree_greedy(ids_K: Tensor, tree: Tree, target_ids_N: Tensor) -> tuple[list[int], int]:
    """Follows the target's argmax through the tree.

    Returns:
        Places of the accepted drafts from the root down, and the target's own token after them.
    """
    num_drafts = len(ids_K)
    # One transfer for all: on a GPU each one waits for the device.
    flat = torch.cat([ids_K, tree.parent_K, target_ids_N]).tolist()
    ids, parents, targets = flat[:num_drafts], flat[num_drafts : 2 * num_drafts], flat[2 * num_drafts :]
    child = {(parents[k], ids[k]): k for k in reversed(range(num_drafts))}
    path: list[int] = []
    place: int | None = child.get((-1, targets[0]))
    while place is not None:
        path.append(place)
        place = child.get((place, targets[place + 1]))
    return path, targets[path[-1] + 1 if path else 0]


def accept_tree_sampled(
    ids_K: Tensor, tree: Tree, draft_probs_KV: Tensor | None, target_probs_NV: Tensor, dice: Dice
) -> tuple[list[int], int]:
    """Speculative sampling on a tree: the tokens are distributed exactly as the target's.

    At each node the children are tried in order. Child x, drawn from q, is accepted with
    probability min(1, p(x)/q(x)); on rejection p becomes normalise(max(p - q, 0)) and the next child
    is tried, drawn from what the ones before left of the draft's distribution. Where no child is
    accepted, a token is sampled of what is left of p. `draft_probs_KV` None: each child was chosen
    for certain, so its q is one-hot.

    Returns:
        Places of the accepted drafts from the root down, and the sampled token after them.
    """
    ids, parents = torch.stack([ids_K, tree.parent_K]).tolist()
    children: dict[int, list[int]] = {}
    for place, parent in enumerate(parents):
        children.setdefault(parent, []).append(place)
    path: list[int] = []
    place = -1
    while True:
        probs_V, accepted = _try_children(
            children.get(place, ()), ids, draft_probs_KV, target_probs_NV[place + 1], dice
        )
        if accepted is None:
            return path, dice.token(probs_V)
        path.append(accepted)
        place = accepted


def _try_children(
    children: Sequence[int],
    ids: Sequence[int],
    draft_probs_KV: Tensor | None,
    probs_V: Tensor,
    dice: Dice,
) -> tuple[Tensor, int | None]:
    """What is left of p behind the rejected children, and the accepted one."""
    for child in children:
        token = ids[child]
        chance = float(probs_V[token])
        if draft_probs_KV is None:
            residual_V = probs_V.clone()
            residual_V[token] = 0.0
        else:
            chance /= float(draft_probs_KV[child, token])
            residual_V = (probs_V - draft_probs_KV[child]).clamp(min=0.0)
        if dice.coin(chance):
            return probs_V, child
        total = float(residual_V.sum())
        # All zero only where p and q differ by rounding: then p itself is right.
        probs_V = residual_V / total if total > 0 else probs_V
    return probs_V, None
