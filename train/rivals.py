"""Losses of the heads that EAGLE-3 is compared with: EAGLE-1 and Medusa (ALGORITHMS.md section 3).

Both read the target's last state behind its final norm, the *feature*, so they are trained on a cache
of boundary n. They share rows, teachers and step weights with the unroll of EAGLE-3: what step k of a
row predicts is what head k of Medusa predicts.

Shapes: T rows of the pack, R rows that carry loss, K steps, P teachers, D hidden size, V target
vocabulary, W draft vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slipstream.data.types import DraftBatch
from slipstream.drafters.eagle1 import Eagle1Head
from slipstream.drafters.medusa import MedusaHeads
from slipstream.train.ttt import FrozenTarget, UnrollOutput, UnrollPlan

FEATURE_WEIGHT, TOKEN_WEIGHT = 1.0, 0.1
"""Of EAGLE-1's regression and of its cross-entropy."""
NOISE = 0.1
"""Features are disturbed by uniform noise of at most this, as those drafted later are imprecise."""
CHUNK_ROWS = 1024
"""Rows whose logits exist at one time."""


class Eagle1Unroller(nn.Module):
    """The trained module of EAGLE-1: one step, no unroll."""

    def __init__(self, head: Eagle1Head, frozen: FrozenTarget) -> None:
        super().__init__()
        self.head, self._frozen = head, frozen

    def forward(self, batch: DraftBatch, plan: UnrollPlan, weight_K: Tensor) -> UnrollOutput:
        """See `slipstream.train.ttt.Unroller`."""
        rows = _LossRows(batch, 0, self._frozen, 1.0)
        feature_TD = _feature(batch.aux_TLD[:, -1], self._frozen)
        if self.training:
            feature_TD = feature_TD + _noise(batch, feature_TD)
        embed_TD = F.embedding(batch.token_T, self._frozen.embedding_VD)
        mask_TT = _document_mask(batch)

        def attend(query_1TNH: Tensor, key_1TMH: Tensor, value_1TMH: Tensor) -> Tensor:
            query, key, value = (x.transpose(1, 2) for x in (query_1TNH, key_1TMH, value_1TMH))
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask_TT, enable_gqa=True)
            return out.transpose(1, 2).flatten(2)

        predicted_1TD = self.head(embed_TD[None], feature_TD[None], batch.position_T[None], attend)
        predicted_RD = predicted_1TD[0, rows.row_R]
        wanted_RD = _feature(batch.last_hidden_PD, self._frozen)[rows.teacher_R]
        regression_R = F.smooth_l1_loss(predicted_RD, wanted_RD, reduction="none").mean(-1)
        token_R, correct_R = _cross_entropy(predicted_RD, self._frozen.lm_head_WD, wanted_RD, self._frozen)
        # A row that the draft vocabulary does not hold still has a feature.
        loss_R = FEATURE_WEIGHT * regression_R + TOKEN_WEIGHT * token_R * rows.known_R
        return _output(weight_K, [(loss_R, correct_R & rows.known_R, rows)], self.head)


class MedusaUnroller(nn.Module):
    """The trained module of Medusa: head k in the place of step k."""

    def __init__(self, head: MedusaHeads, frozen: FrozenTarget, *, survival: float) -> None:
        """For `survival` see `UnrollConfig`; the trainer weighs the rows for it."""
        super().__init__()
        self.head, self._frozen, self._survival = head, frozen, survival

    def forward(self, batch: DraftBatch, plan: UnrollPlan, weight_K: Tensor) -> UnrollOutput:
        """See `slipstream.train.ttt.Unroller`."""
        feature_TD = _feature(batch.aux_TLD[:, -1], self._frozen)
        wanted_PD = _feature(batch.last_hidden_PD, self._frozen)
        steps = []
        for k in range(weight_K.numel()):
            rows = _LossRows(batch, k, self._frozen, self._survival)
            states_RD = self.head.states(k, feature_TD[rows.row_R])
            loss_R, correct_R = _cross_entropy(
                states_RD, self.head.lm_head.weight, wanted_PD[rows.teacher_R], self._frozen
            )
            steps.append((loss_R * rows.known_R, correct_R & rows.known_R, rows))
        return _output(weight_K, steps, self.head)


class _LossRows:
    """The rows that count at step k, their teachers, and whether the draft vocabulary holds its argmax."""

    def __init__(self, batch: DraftBatch, k: int, frozen: FrozenTarget, survival: float) -> None:
        is_live_T = (batch.num_live_T > k) & (batch.survival_T < survival**k)
        self.row_R = is_live_T.nonzero()[:, 0]
        self.teacher_R = batch.teacher_T[self.row_R + k]
        self.known_R = frozen.draft_ids_V[batch.argmax_P[self.teacher_R]] >= 0


def _feature(states_RD: Tensor, frozen: FrozenTarget) -> Tensor:
    return F.rms_norm(states_RD, frozen.norm_D.shape, frozen.norm_D, frozen.norm_eps)


def _noise(batch: DraftBatch, like_TD: Tensor) -> Tensor:
    """The same for the same documents in the same epoch, so that a resumed run draws it again."""
    seed = int(batch.survival_T.double().sum() * 2**20)
    generator = torch.Generator(like_TD.device).manual_seed(seed)
    return (torch.rand(like_TD.shape, generator=generator, device=like_TD.device) * 2 - 1).to(like_TD) * NOISE


def _document_mask(batch: DraftBatch) -> Tensor:
    """bool [T, T]; each row sees the rows of its document up to itself."""
    starts = torch.tensor(list(batch.document_starts), device=batch.token_T.device)
    row_T = torch.arange(batch.token_T.numel(), device=starts.device)
    document_T = torch.searchsorted(starts, row_T, right=True)
    return (document_T[:, None] == document_T) & (row_T[:, None] >= row_T)


def _cross_entropy(
    states_RD: Tensor, lm_head_WD: Tensor, wanted_RD: Tensor, frozen: FrozenTarget
) -> tuple[Tensor, Tensor]:
    """Soft cross-entropy with the target over the draft vocabulary, and equal argmax, of each row."""

    def chunk(states_CD: Tensor, wanted_CD: Tensor) -> tuple[Tensor, Tensor]:
        logits_CW = F.linear(states_CD, lm_head_WD).float()
        target_CW = F.linear(wanted_CD, frozen.lm_head_WD).float()
        loss_C = -(target_CW.softmax(-1) * logits_CW.log_softmax(-1)).sum(-1)
        return loss_C, logits_CW.argmax(-1) == target_CW.argmax(-1)

    pieces = [
        checkpoint(chunk, states, wanted, use_reentrant=False)
        for states, wanted in zip(states_RD.split(CHUNK_ROWS), wanted_RD.split(CHUNK_ROWS), strict=True)
    ]
    losses, correct = zip(*pieces, strict=True)
    return torch.cat(losses), torch.cat(correct)


def _output(weight_K: Tensor, steps: list[tuple[Tensor, Tensor, _LossRows]], head: nn.Module) -> UnrollOutput:
    padding = [weight_K.new_zeros(())] * (weight_K.numel() - len(steps))

    def per_step(values: list[Tensor]) -> Tensor:
        return torch.stack([value.to(weight_K) for value in values] + padding)

    sums_K = per_step([loss_R.sum() for loss_R, *_ in steps])
    # Every parameter takes part, so ranks with an empty pack reduce the same gradients.
    nothing = torch.stack([parameter.sum() * 0.0 for parameter in head.parameters()]).sum()
    return UnrollOutput(
        (sums_K * weight_K).sum() + nothing,
        sums_K.detach(),
        per_step([rows.known_R.sum() for *_, rows in steps]),
        per_step([correct_R.sum() for _, correct_R, _ in steps]),
        per_step([torch.tensor(len(rows.row_R)) for *_, rows in steps]),
    )
