"""A head that drafts before its first step: the best linear drafter, in closed form.

Least squares predicts the target's next state from what a row reads, its captured states and the
embedding of the token just sampled. The first map becomes `fc`; the second, cut to the rank the
attention can carry, becomes the value and output projections, and queries equal keys so that
every row attends to itself. With the target's own norm and head this drafts at once about as well
as some hundred optimizer steps make a random layer (docs/log.md).

Shapes: R rows, L captured layers, D hidden size, Z regressors, X width of the attention's values.
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
    gram_ZZ, cross_ZD = _moments(head, source, frozen, num_documents)
    # Captured states differ in size by an order of magnitude: even the regressors out to solve.
    scale_Z = gram_ZZ.diagonal().unflatten(0, (-1, hidden)).mean(1).sqrt().repeat_interleave(hidden)
    even_ZZ = gram_ZZ / scale_Z / scale_Z[:, None]
    even_ZZ.diagonal().add_(RIDGE)
    solution_DZ = (torch.linalg.solve(even_ZZ, cross_ZD / scale_Z[:, None]) / scale_Z[:, None]).T
    head.fc.weight.copy_(solution_DZ[:, :-hidden])

    _attend_to_self(head)
    groups = geometry.num_attention_heads // geometry.num_key_value_heads
    embed_gram_DD = gram_ZZ[-hidden:, -hidden:]
    output_DX, value_XD = _low_rank(solution_DZ[:, -hidden:], embed_gram_DD, attn.v_proj.weight.shape[0])
    attn.v_proj.weight[:, :hidden] = value_XD
    attn.v_proj.weight[:, hidden:] *= DAMPING
    shared = output_DX.unflatten(1, (geometry.num_key_value_heads, 1, geometry.head_dim)) / groups
    attn.o_proj.weight.copy_(shared.expand(-1, -1, groups, -1).flatten(1))
    head.midlayer.mlp.down_proj.weight *= DAMPING
    for layer in head.decoder_layers()[1:]:
        layer.self_attn.o_proj.weight *= DAMPING
        layer.mlp.down_proj.weight *= DAMPING


def _moments(
    head: Eagle3Head, source: HiddenStateSource, frozen: FrozenTarget, num_documents: int
) -> tuple[Tensor, Tensor]:
    """Mean products of the regressors with each other [Z, Z] and with the normed next state [Z, D].

    The regressors of a supervised row are what `fc` reads and the normed embedding, Z = L*D + D.
    """
    width = (head.geometry.hidden_size,)
    num_regressors, num_rows = head.geometry.fc_width + width[0], 0
    gram_ZZ, cross_ZD = torch.zeros(num_regressors, num_regressors), torch.zeros(num_regressors, *width)
    for info in source.rows("train")[:num_documents]:
        rows = align(source.load(info.id), seed=0, epoch=0)
        live = rows.num_live_T > 0
        embed_RD = F.rms_norm(frozen.embedding_VD[rows.token_T[live]].float(), width)
        next_RD = F.rms_norm(rows.last_hidden_PD[rows.teacher_T[live]].float(), width)
        inputs_RZ = torch.cat((head.fc_input(rows.aux_TLD[live].float()), embed_RD), dim=1)
        gram_ZZ.addmm_(inputs_RZ.T, inputs_RZ)
        cross_ZD.addmm_(inputs_RZ.T, next_RD)
        num_rows += len(inputs_RZ)
    if not num_rows:
        raise ValueError("drafter.init=regression finds no supervised row: use drafter.init=target")
    return gram_ZZ / num_rows, cross_ZD / num_rows


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


def _low_rank(map_DD: Tensor, gram_DD: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Two factors of a linear map, [D, rank] and [rank, D], best for inputs of the given second moment."""
    values, vectors = torch.linalg.eigh(gram_DD)
    root = vectors * values.clamp_min(1e-8).sqrt()
    left, singular, right = torch.linalg.svd(map_DD @ root)
    half = singular[:rank].sqrt()
    output, value = left[:, :rank] * half, half[:, None] * (right[:rank] @ torch.linalg.inv(root))
    missing = rank - half.numel()
    return F.pad(output, (0, missing)), F.pad(value, (0, 0, 0, missing))
