"""The training step by its definition: every row at every step, dense masks, full logits, autograd.

Nothing here shares code with the step under test but the parameters and the angles of the rotary
embedding. `scripts/bench.py` times it as what a plain implementation costs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.data.types import DraftBatch
from slipstream.drafters.eagle3 import Eagle3Head
from slipstream.train.config import LossKind
from slipstream.train.ttt import FrozenTarget


def row_losses(kind: LossKind, logits_RW: Tensor, prob_RW: Tensor, mass_R: Tensor) -> Tensor:
    """Loss of each row: p is the target's distribution on the draft vocabulary, mass its share of all."""
    log_q = torch.log_softmax(logits_RW, dim=-1)
    cross_entropy = -(prob_RW * log_q).sum(-1)
    if kind is LossKind.ce:
        return cross_entropy
    alpha = torch.minimum(prob_RW * mass_R[:, None], log_q.exp()).sum(-1)
    if kind is LossKind.tv:
        return 1 - alpha
    if kind is LossKind.lk_alpha:
        return -alpha.log()
    entropy = -torch.special.xlogy(prob_RW, prob_RW).sum(-1)
    weight = torch.exp(-3 * alpha.detach())
    return weight * (cross_entropy - entropy) + (1 - weight) * (1 - alpha)


def teacher_probabilities(batch: DraftBatch, frozen: FrozenTarget) -> tuple[Tensor, Tensor]:
    """[P, W] renormalised, and mass [P]."""
    hidden = batch.last_hidden_PD
    normed = frozen.norm_D * hidden / (hidden.pow(2).mean(-1, keepdim=True) + frozen.norm_eps).sqrt()
    logits = normed @ frozen.lm_head_WD.T
    mass = (logits.logsumexp(-1) - batch.logsumexp_P).exp().clamp(max=1)
    return logits.softmax(-1), mass


def naive_loss(
    head: Eagle3Head, batch: DraftBatch, frozen: FrozenTarget, weight_K: Tensor, kind: LossKind
) -> Tensor:
    """Weighted loss of a pack; rows outside the draft vocabulary are dropped."""
    geometry, layers = head.geometry, head.decoder_layers()
    num_rows, groups = batch.token_T.numel(), geometry.num_attention_heads // geometry.num_key_value_heads
    document = torch.zeros(num_rows, dtype=torch.int64)
    for start in batch.document_starts[1:-1]:
        document[start:] += 1
    base = (document[:, None] == document) & torch.ones(num_rows, num_rows).tril().bool()
    prob_PW, mass_P = teacher_probabilities(batch, frozen)
    hidden, total = head.fuse(batch.aux_TLD), torch.zeros(())
    keys: list[list[Tensor]] = [[] for _ in layers]
    values: list[list[Tensor]] = [[] for _ in layers]
    for k in range(weight_K.numel()):
        source = (torch.arange(num_rows) + k).clamp(max=num_rows - 1)
        embed = F.embedding(batch.token_T[source], frozen.embedding_VD)
        position = batch.position_T + k
        mask = torch.cat([base, *[torch.eye(num_rows).bool()] * k], dim=1)
        for i, layer in enumerate(layers):
            attn, norm = layer.self_attn, layer.hidden_norm if i == 0 else layer.input_layernorm
            normed = norm(hidden)
            both = torch.cat((layer.input_layernorm(embed), normed), dim=-1) if i == 0 else normed
            query, key, value = (
                projection(both).unflatten(-1, (-1, geometry.head_dim))
                for projection in (attn.q_proj, attn.k_proj, attn.v_proj)
            )
            if geometry.qk_norm:
                query, key = attn.q_norm(query), attn.k_norm(key)
            keys[i].append(_rotated(head, key, position))
            values[i].append(value)
            all_keys = torch.cat(keys[i]).repeat_interleave(groups, dim=1)
            all_values = torch.cat(values[i]).repeat_interleave(groups, dim=1)
            scores = torch.einsum("tnh,snh->nts", _rotated(head, query, position), all_keys)
            weights = (scores / geometry.head_dim**0.5).masked_fill(~mask, -torch.inf).softmax(-1)
            attended = torch.einsum("nts,snh->tnh", weights, all_values).flatten(1)
            residual = normed if geometry.norm_before_residual and i == 0 else hidden
            hidden = residual + attn.o_proj(attended)
            mlp, inner = layer.mlp, layer.post_attention_layernorm(hidden)
            hidden = hidden + mlp.down_proj(F.silu(mlp.gate_proj(inner)) * mlp.up_proj(inner))
        final = head.norm(hidden)
        live = (batch.num_live_T > k).nonzero()[:, 0]
        index = batch.teacher_T[live + k]
        live, index = (x[frozen.draft_ids_V[batch.argmax_P[index]] >= 0] for x in (live, index))
        losses = row_losses(kind, head.lm_head(final[live]), prob_PW[index], mass_P[index])
        total = total + weight_K[k] * losses.sum()
        hidden = final if geometry.norm_output else hidden
    return total


def _rotated(head: Eagle3Head, states: Tensor, position: Tensor) -> Tensor:
    cos, sin = (x[0, :, None] for x in head.rotary.angles(states, position[None]))
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-second, first), dim=-1) * sin
