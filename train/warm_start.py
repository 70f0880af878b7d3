"""A head that drafts before its first step: the best linear drafter, in closed form.

Least squares predicts the target's next state from what a row reads, its captured states and the
embedding of the token just sampled. The first map becomes `fc`; the second, cut to the rank the
attention can carry, becomes the value and output projections, and queries equal keys so that
every row attends to itself. With the target's own norm and head this drafts at once about as well
as some hundred optimizer steps make a random layer (docs/log.md).

Shapes: R rows, L captured layers, D hidden size, Z regressors, N query heads, M key/value heads, H
head size.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.data.batches import align
from slipstream.data.cache import HiddenStateSource
from slipstream.drafters.eagle3 import Eagle3Head
from slipstream.train.ttt import FrozenTarget

RIDGE = 1e-3
"""Of regressors with mean square one."""
SELF_SCORE = 7.0
"""Attention score of a row with itself; with others it is about 0."""
DAMPING = 0.2
"""What is left of the random weights that the linear drafter does not use."""


@torch.no_grad()
def regression_start(
    head: Eagle3Head, source: HiddenStateSource, frozen: FrozenTarget, *, num_documents: int
) -> None:
    """Sets `fc` and the attention of an initialised head from cached documents.

    Args:
        head: initialised with `Init.target`.
        source: its first training documents are used.
        frozen: the target's tensors.
        num_documents: how many documents; some times D rows are enough.

    Raises:
        ValueError: the documents hold no supervised row.
    """
    geometry, attn = head.geometry, head.midlayer.self_attn
    hidden = geometry.hidden_size
    wide, embed_RD, next_RD = _rows(head, source, frozen, num_documents)
    # Blocks of captured states differ in size by an order of magnitude: even them out to solve.
    scale_L = wide.unflatten(1, (-1, hidden)).square().mean((0, 2)).sqrt()
    wide = (wide.unflatten(1, (-1, hidden)) / scale_L[:, None]).flatten(1)
    inputs_RZ = torch.cat((wide, embed_RD), dim=1)
    gram = inputs_RZ.T @ inputs_RZ / len(inputs_RZ)
    gram.diagonal().add_(RIDGE)
    solution_ZD = torch.linalg.solve(gram, inputs_RZ.T @ next_RD / len(inputs_RZ))
    fc = solution_ZD[:-hidden].T.unflatten(1, (-1, hidden)) / scale_L[:, None]
    head.fc.weight.copy_(fc.flatten(1))

    _attend_to_self(head)
    groups = geometry.num_attention_heads // geometry.num_key_value_heads
    output_DX, value_XD = _low_rank(solution_ZD[-hidden:].T, embed_RD, attn.v_proj.weight.shape[0])
    attn.v_proj.weight[:, :hidden] = value_XD
    attn.v_proj.weight[:, hidden:] *= DAMPING
    shared = output_DX.unflatten(1, (geometry.num_key_value_heads, 1, geometry.head_dim)) / groups
    attn.o_proj.weight.copy_(shared.expand(-1, -1, groups, -1).flatten(1))
    head.midlayer.mlp.down_proj.weight *= DAMPING


def _rows(
    head: Eagle3Head, source: HiddenStateSource, frozen: FrozenTarget, num_documents: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What `fc` reads [R, L*D], normed embeddings and normed next states [R, D] of supervised rows."""
    wide, embeds, states = [], [], []
    for info in source.rows("train")[:num_documents]:
        rows = align(source.load(info.id), seed=0, epoch=0)
        live = rows.num_live_T > 0
        wide.append(head.fc_input(rows.aux_TLD[live].float()))
        embeds.append(frozen.embedding_VD[rows.token_T[live]].float())
        states.append(rows.last_hidden_PD[rows.teacher_T[live]].float())
    if not sum(map(len, embeds)):
        raise ValueError("drafter.init=regression finds no supervised row: use drafter.init=target")
    width = (head.geometry.hidden_size,)
    return torch.cat(wide), F.rms_norm(torch.cat(embeds), width), F.rms_norm(torch.cat(states), width)


def _attend_to_self(head: Eagle3Head) -> None:
    """Equal random queries and keys of the embedding: a row scores highest with itself."""
    geometry, attn = head.geometry, head.midlayer.self_attn
    hidden, head_dim = geometry.hidden_size, geometry.head_dim
    key = attn.k_proj.weight
    key[:, :hidden] *= math.sqrt(SELF_SCORE / (hidden * math.sqrt(head_dim))) / key[:, :hidden].std()
    key[:, hidden:] = 0
    by_head = key.unflatten(0, (geometry.num_key_value_heads, 1, head_dim))
    groups = geometry.num_attention_heads // geometry.num_key_value_heads
    attn.q_proj.weight.copy_(by_head.expand(-1, groups, -1, -1).flatten(0, 2))


def _low_rank(map_DD: Tensor, inputs_RD: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Two factors of a linear map, [D, rank] and [rank, D], best for inputs like the given ones."""
    values, vectors = torch.linalg.eigh(inputs_RD.T @ inputs_RD / len(inputs_RD))
    root = vectors * values.clamp_min(1e-8).sqrt()
    left, singular, right = torch.linalg.svd(map_DD @ root)
    half = singular[:rank].sqrt()
    factors = left[:, :rank] * half, half[:, None] * (right[:rank] @ torch.linalg.inv(root))
    missing = rank - half.numel()
    return F.pad(factors[0], (0, max(missing, 0))), F.pad(factors[1], (0, 0, 0, max(missing, 0)))
