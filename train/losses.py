"""Losses between draft and target distributions, and the draft head fused with them.

Shapes: R rows, P teachers, D hidden size, V target vocabulary, W draft vocabulary.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.train.config import Loss

LK_ETA = 3.0


class Teacher(NamedTuple):
    """What the target says about the token after each supervised token."""

    prob_PW: Tensor
    """Target distribution renormalised over the draft vocabulary."""
    mass_P: Tensor
    """Share of the target's probability that lies in the draft vocabulary."""
    draft_argmax_P: Tensor
    """int64; draft id of the target's argmax, -1 outside the draft vocabulary."""


def make_teacher(
    last_hidden_PD: Tensor,
    *,
    norm_D: Tensor,
    norm_eps: float,
    lm_head_WD: Tensor,
    logsumexp_P: Tensor,
    draft_argmax_P: Tensor,
) -> Teacher:
    """Distributions of every teacher, made once for all unroll steps."""
    normed = F.rms_norm(last_hidden_PD, norm_D.shape, norm_D, norm_eps)
    logits_PW = F.linear(normed, lm_head_WD).float()
    log_mass_P = logits_PW.logsumexp(-1)
    prob_PW = (logits_PW - log_mass_P[:, None]).exp().to(last_hidden_PD.dtype)
    return Teacher(prob_PW, (log_mass_P - logsumexp_P).exp().clamp(max=1.0), draft_argmax_P)


def row_losses(kind: Loss, logits_RW: Tensor, prob_RW: Tensor, mass_R: Tensor) -> Tensor:
    """Loss of each row, [R] in float32.

    * ce: -sum p log q with p renormalised on the draft vocabulary (EAGLE-3, forward KL up to a
      constant).
    * tv: 1 - alpha. On its own and from scratch it fails (2.81 against 3.75 tokens, 2602.23881).
    * lk_lambda: lambda * KL + (1 - lambda) * tv with lambda = exp(-3 stopgrad(alpha)) (2602.23881).
    * lk_alpha: -log alpha (2602.23881).

    alpha = sum_v min(p, q) is the chance that a draft token is accepted, p being the target's
    probability without renormalisation.
    """
    log_q = torch.log_softmax(logits_RW.float(), dim=-1)
    prob_RW = prob_RW.float()
    cross_entropy_R: Tensor = -(prob_RW * log_q).sum(-1)
    if kind is Loss.ce:
        return cross_entropy_R
    alpha_R: Tensor = torch.minimum(prob_RW * mass_R[:, None], log_q.exp()).sum(-1)
    if kind is Loss.tv:
        return 1 - alpha_R
    if kind is Loss.lk_alpha:
        return -alpha_R.clamp_min(1e-6).log()
    entropy_R = -torch.special.xlogy(prob_RW, prob_RW).sum(-1)
    weight_R = torch.exp(-LK_ETA * alpha_R.detach())
    hybrid_R: Tensor = weight_R * (cross_entropy_R - entropy_R) - (1 - weight_R) * (alpha_R - 1)
    return hybrid_R


class HeadLoss(NamedTuple):
    """Result of `head_loss`."""

    total: Tensor
    """Weighted sum over the rows, differentiable."""
    loss_R: Tensor
    """Loss of each row."""
    correct_R: Tensor
    """bool; the draft argmax is the target argmax."""


class _FusedHeadLoss(torch.autograd.Function):
    """Head, loss and their gradients in one pass over row chunks.

    Logits exist for one chunk at a time and are never needed again: the gradients with respect to
    the rows and the weight are made in the forward pass and scaled in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        final_RD: Tensor,
        weight_WD: Tensor,
        teacher: Teacher,
        teacher_R: Tensor,
        row_weight_R: Tensor,
        kind: Loss,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs_grad = final_RD.requires_grad
        grad_final = torch.empty_like(final_RD) if needs_grad else None
        grad_weight = torch.zeros_like(weight_WD, dtype=torch.float32) if needs_grad else None
        losses, correct = [], []
        for start in range(0, max(final_RD.shape[0], 1), chunk_rows):
            rows = slice(start, start + chunk_rows)
            index = teacher_R[rows]
            with torch.set_grad_enabled(needs_grad):
                logits = F.linear(final_RD[rows].detach(), weight_WD.detach()).requires_grad_(needs_grad)
                loss = row_losses(kind, logits, teacher.prob_PW[index], teacher.mass_P[index])
            losses.append(loss.detach())
            correct.append(logits.detach().argmax(-1) == teacher.draft_argmax_P[index])
            if grad_final is not None and grad_weight is not None:
                (grad_logits,) = torch.autograd.grad(loss, logits, row_weight_R[rows])
                grad_final[rows] = grad_logits @ weight_WD
                grad_weight += grad_logits.T @ final_RD[rows]
        loss_R = torch.cat(losses)
        if grad_final is not None and grad_weight is not None:
            ctx.save_for_backward(grad_final, grad_weight.to(weight_WD.dtype))
        ctx.mark_non_differentiable(loss_R)
        return (loss_R * row_weight_R).sum(), loss_R, torch.cat(correct)

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_final, grad_weight = ctx.saved_tensors
        return grad_final * grad_total, grad_weight * grad_total, None, None, None, None, None


def head_loss(
    final_RD: Tensor,
    weight_WD: Tensor,
    teacher: Teacher,
    *,
    teacher_R: Tensor,
    row_weight_R: Tensor,
    kind: Loss,
    chunk_rows: int,
) -> HeadLoss:
    """Draft head and weighted loss of R rows without ever holding R x W logits.

    Args:
        final_RD: states the head reads.
        weight_WD: the head.
        teacher: of the pack.
        teacher_R: teacher index of each row.
        row_weight_R: float32 factor of each row in the total.
        kind: which loss.
        chunk_rows: rows whose logits exist at one time.
    """
    return HeadLoss(
        *_FusedHeadLoss.apply(  # type: ignore[no-untyped-call]
            final_RD, weight_WD, teacher, teacher_R, row_weight_R, kind, chunk_rows
        )
    )
