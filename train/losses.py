"""Losses between draft and target distributions, fused with the draft head.

Shapes: R rows of one unroll step, X loss rows of all steps, C rows of a chunk, Q teachers of a
chunk, P teachers of the pack, K unroll steps, D hidden size, W draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.drafters.fused import apply, rms_norm, rms_norm_backward
from slipstream.train.config import LossKind

LK_ETA = 3.0
MIN_ALPHA = 1e-6
MIN_MASS = 1e-9
"""Of the draft vocabulary in a distribution of top tokens that all lie outside."""
CACHED_ELEMENTS = 1 << 18
"""Logits that a CPU core works on at a time, so that they stay in its cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Teacher:
    """What the target says about the token after each supervised token."""

    normed_PD: Tensor
    """What the target's head reads."""
    lm_head_WD: Tensor
    """Its rows of the draft vocabulary."""
    logsumexp_P: Tensor
    """Of the target's logits over its whole vocabulary."""
    draft_argmax_P: Tensor
    """int64; draft id of the target's argmax, -1 outside the draft vocabulary."""
    top: tuple[Tensor, Tensor] | None = None
    """Draft ids [P, E] (-1 outside) and log-probabilities of the likeliest tokens, from a cache that
    keeps these instead of the states."""
    cached: tuple[Tensor, Tensor] | None = None
    """Probabilities [P, W] in bfloat16 and mass [P], if they are not to be recomputed."""

    def distribution(self, teacher_Q: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """Some teachers' distributions.

        Args:
            teacher_Q: which.
            out: float32 buffer of at least Q rows of W.

        Returns:
            [Q, W] in the buffer, renormalised over the draft vocabulary, and the share [Q] of the
            target's probability that lies in it.
        """
        prob_QW = out[: len(teacher_Q)]
        if self.cached is not None:
            prob_PW, mass_P = self.cached
            return prob_QW.copy_(prob_PW.index_select(0, teacher_Q)), mass_P[teacher_Q]
        if self.top is not None:
            ids_PE, log_probs_PE = self.top
            return _spread(ids_PE[teacher_Q], log_probs_PE[teacher_Q].exp(), prob_QW)
        _product(self.normed_PD.index_select(0, teacher_Q), self.lm_head_WD, prob_QW)
        max_Q = prob_QW.amax(-1)
        torch.softmax(prob_QW, -1, out=prob_QW)
        log_mass_Q = max_Q - prob_QW.amax(-1).log() - self.logsumexp_P[teacher_Q]
        return prob_QW, log_mass_Q.exp().clamp(max=1.0)

    def with_cache(self, chunk_rows: int) -> "Teacher":
        """Makes every distribution now."""
        num_teachers = self.normed_PD.shape[0]
        prob_PW = self.normed_PD.new_empty(num_teachers, len(self.lm_head_WD), dtype=torch.bfloat16)
        mass_P = self.logsumexp_P.new_empty(num_teachers)
        out = mass_P.new_empty(min(chunk_rows, num_teachers), len(self.lm_head_WD))
        for start in range(0, num_teachers, chunk_rows):
            rows = slice(start, min(start + chunk_rows, num_teachers))
            teacher_Q = torch.arange(rows.start, rows.stop, device=prob_PW.device)
            prob_PW[rows], mass_P[rows] = self.distribution(teacher_Q, out)
        return replace(self, cached=(prob_PW, mass_P))


def _spread(ids_QE: Tensor, prob_QE: Tensor, out_QW: Tensor) -> tuple[Tensor, Tensor]:
    """The distribution of top tokens: what they leave of 1 is shared by all other draft tokens alike.

    Shared, not dropped, because a head that is told p = 0 pushes these logits down for nothing.
    """
    inside_QE = ids_QE >= 0
    tail_Q = (1 - prob_QE.sum(-1)).clamp_min(0)
    num_others_Q = out_QW.shape[1] - inside_QE.sum(-1)
    share_Q = tail_Q / num_others_Q.clamp_min(1)
    # Entries outside the draft vocabulary add nothing, to any place.
    more_QE = (prob_QE - share_Q[:, None]) * inside_QE
    out_QW.copy_(share_Q[:, None].expand_as(out_QW)).scatter_add_(1, ids_QE.clamp_min(0), more_QE)
    mass_Q = out_QW.sum(-1)
    out_QW /= mass_Q.clamp_min(MIN_MASS)[:, None]
    return out_QW, mass_Q.clamp(max=1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossRows:
    """The loss rows of all steps in the order in which the head visits them.

    Sorted by teacher and cut into chunks: the rows that share a teacher stand together, so its
    distribution is made once for all unroll steps. Within a chunk the rows of a step are together.
    """

    row_X: Tensor
    """int64; place among the R rows of the step."""
    step_X: Tensor
    """int64; the step k."""
    teacher_X: Tensor
    """int64; place among the Q teachers of the chunk."""
    share_X: Tensor
    """float32; factor of the row beside that of its step."""
    teacher_Q: Tensor
    """int64; the teachers of all chunks, one chunk after the other."""
    num_steps: int
    num_rows: Sequence[Sequence[int]]
    """For each chunk the number of rows of each step."""
    num_teachers: Sequence[int]
    """For each chunk the number of its teachers."""

    def rows_of_steps(self) -> list[int]:
        """Number of loss rows of each step."""
        return [sum(chunk[k] for chunk in self.num_rows) for k in range(self.num_steps)]

    def to(self, device: torch.device) -> "LossRows":
        """Moves the indices to a device."""
        names = ("row_X", "step_X", "teacher_X", "share_X", "teacher_Q")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


def plan_loss_rows(
    rows: Sequence[npt.NDArray[np.int64]],
    teachers: Sequence[npt.NDArray[np.int64]],
    chunk_rows: int,
    shares: Sequence[npt.NDArray[np.float64]] | None = None,
) -> LossRows:
    """Orders the loss rows.

    Args:
        rows: for each step the places of its loss rows among its R rows, ascending.
        teachers: for each step the teacher of each of these rows.
        chunk_rows: rows of a chunk.
        shares: for each step the factor of each of these rows; 1 without.
    """
    nothing = np.empty(0, dtype=np.int64)
    row_X, teacher_X = np.concatenate([nothing, *rows]), np.concatenate([nothing, *teachers])
    step_X = np.repeat(np.arange(len(rows)), [len(x) for x in rows])
    share_X = np.ones(len(row_X)) if shares is None else np.concatenate([nothing, *shares])
    chunk_X = np.empty_like(row_X)
    chunk_X[np.argsort(teacher_X, kind="stable")] = np.arange(len(row_X)) // chunk_rows
    order = np.lexsort((row_X, step_X, chunk_X))
    ends = np.cumsum(np.bincount(chunk_X))
    local_X, teacher_Q, num_rows, num_teachers = [nothing], [nothing], [], []
    for chunk in np.split(order, ends[:-1]) if len(order) else []:
        unique, local = np.unique(teacher_X[chunk], return_inverse=True)
        local_X.append(local)
        teacher_Q.append(unique)
        num_rows.append(np.bincount(step_X[chunk], minlength=len(rows)).tolist())
        num_teachers.append(len(unique))
    return LossRows(
        row_X=torch.from_numpy(row_X[order]),
        step_X=torch.from_numpy(step_X[order]),
        teacher_X=torch.from_numpy(np.concatenate(local_X)),
        share_X=torch.from_numpy(share_X[order]).float(),
        teacher_Q=torch.from_numpy(np.concatenate(teacher_Q)),
        num_steps=len(rows),
        num_rows=num_rows,
        num_teachers=num_teachers,
    )


def loss_and_gradient_(
    kind: LossKind, logits_RW: Tensor, prob_RW: Tensor, mass_R: Tensor, weight_R: Tensor
) -> Tensor:
    """Loss of each row, [R]; turns the float32 logits into weight times their gradient, in place.

    * ce: -sum p log q with p renormalised on the draft vocabulary (EAGLE-3, forward KL up to a
      constant).
    * tv: 1 - alpha. On its own and from scratch it fails (2.81 against 3.75 tokens, 2602.23881).
    * lk_lambda: lambda * KL + (1 - lambda) * tv with lambda = exp(-3 stopgrad(alpha)) (2602.23881).
    * lk_alpha: -log alpha (2602.23881).

    alpha = sum_v min(p, q) is the chance that a draft token is accepted, p being the target's
    probability without renormalisation. With A = sum of q where q < p, the gradients are
    d ce / dz = q - p and d alpha / dz = q (1[q < p] - A).
    """
    cross_entropy_R = -(logits_RW * prob_RW).sum(-1)
    max_R = logits_RW.amax(-1)
    draft_RW = torch.softmax(logits_RW, -1, out=logits_RW)
    sum_R = prob_RW.sum(-1)  # not exactly 1 when p was held in bfloat16
    cross_entropy_R += (max_R - draft_RW.amax(-1).log()) * sum_R
    if kind is LossKind.ce:
        draft_RW.mul_((sum_R * weight_R)[:, None]).addcmul_(prob_RW, weight_R[:, None], value=-1)
        return cross_entropy_R
    full_RW = prob_RW * mass_R[:, None]
    below_RW = draft_RW < full_RW
    alpha_R = torch.minimum(draft_RW, full_RW).sum(-1)
    share_R = torch.mul(draft_RW, below_RW, out=full_RW).sum(-1)
    on_entropy_R = torch.zeros_like(alpha_R)
    if kind is LossKind.tv:
        loss_R, on_alpha_R = 1 - alpha_R, torch.ones_like(alpha_R)
    elif kind is LossKind.lk_alpha:
        loss_R = -alpha_R.clamp_min(MIN_ALPHA).log()
        on_alpha_R = (alpha_R >= MIN_ALPHA) / alpha_R.clamp_min(MIN_ALPHA)
    else:
        entropy_R = -torch.special.xlogy(prob_RW, prob_RW).sum(-1)
        on_entropy_R = torch.exp(-LK_ETA * alpha_R)
        on_alpha_R = 1 - on_entropy_R
        loss_R = on_entropy_R * (cross_entropy_R - entropy_R) + on_alpha_R * (1 - alpha_R)
    on_entropy_R, on_alpha_R = on_entropy_R * weight_R, on_alpha_R * weight_R
    draft_RW.mul_((on_entropy_R * sum_R + on_alpha_R * share_R)[:, None])
    draft_RW.addcmul_(full_RW, on_alpha_R[:, None], value=-1)
    draft_RW.addcmul_(prob_RW, on_entropy_R[:, None], value=-1)
    return loss_R


class HeadLoss(NamedTuple):
    """Result of `head_loss`."""

    total: Tensor
    """Weighted sum over the rows, differentiable."""
    loss_K: Tensor
    """Sum of the row losses of each step."""
    correct_K: Tensor
    """Rows whose draft argmax is the target argmax."""


class _FusedHeadLoss(torch.autograd.Function):
    """Final norm, head, loss and their gradients in one pass over row chunks.

    Logits exist for one chunk at a time and turn into their own gradient: the gradients with
    respect to the states and the weights are made in the forward pass and scaled in the backward
    pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        norm_D: Tensor,
        weight_WD: Tensor,
        eps: float,
        teacher: Teacher,
        rows: LossRows,
        weight_K: Tensor,
        kind: LossKind,
        *states: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs_grad = any(ctx.needs_input_grad)
        grads = [torch.zeros_like(state) for state in states] if needs_grad else []
        grad_norm = torch.zeros_like(norm_D, dtype=torch.float32)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight_WD, dtype=torch.float32)
        loss_K, correct_K = torch.zeros_like(weight_K), torch.zeros_like(weight_K)
        total = weight_K.new_zeros(())
        buffers = _buffers(rows, weight_WD)
        for chunk in _chunks(rows):
            parts = chunk.row_C.split(chunk.num_rows)
            state_CD = torch.cat([x.index_select(0, row) for x, row in zip(states, parts, strict=True)])
            final_CD, factor_C1 = rms_norm(state_CD, norm_D, eps)
            grad_CW = _product(final_CD, weight_WD, buffers[0][: len(final_CD)])
            weight_C = weight_K[chunk.step_C] * chunk.share_C
            loss_C, correct_C = _chunk_loss(grad_CW, teacher, chunk, weight_C, kind, buffers[1])
            total += loss_C @ weight_C
            loss_K.index_add_(0, chunk.step_C, loss_C)
            correct_K.index_add_(0, chunk.step_C, correct_C)
            if needs_grad:
                grad_CW = grad_CW.to(weight_WD.dtype)
                grad_CD, grad_scale = rms_norm_backward(grad_CW @ weight_WD, state_CD, norm_D, factor_C1)
                grad_norm += grad_scale
                for grad, row, part in zip(grads, parts, grad_CD.split(chunk.num_rows), strict=True):
                    grad.index_copy_(0, row, part)
            if grad_weight is not None:
                _add_product_(grad_weight, grad_CW, final_CD)
        ctx.grads = (grad_norm.to(norm_D.dtype), grad_weight, grads)
        ctx.dtype = weight_WD.dtype
        ctx.mark_non_differentiable(loss_K, correct_K)
        return total, loss_K, correct_K

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_norm, grad_weight, grads = ctx.grads
        ctx.grads = None  # scaled in place and handed over: nothing is copied
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(grad_total).to(ctx.dtype)
        scaled = [grad.mul_(grad_total) for grad in grads]
        return grad_norm * grad_total, grad_weight, None, None, None, None, None, *scaled


class _Chunk(NamedTuple):
    row_C: Tensor
    step_C: Tensor
    teacher_C: Tensor
    share_C: Tensor
    teacher_Q: Tensor
    num_rows: list[int]


def _chunks(rows: LossRows) -> list[_Chunk]:
    sizes = [sum(num) for num in rows.num_rows]
    pieces = [x.split(sizes) for x in (rows.row_X, rows.step_X, rows.teacher_X, rows.share_X)]
    teachers = rows.teacher_Q.split(list(rows.num_teachers))
    return [_Chunk(*piece) for piece in zip(*pieces, teachers, map(list, rows.num_rows), strict=True)]


def _buffers(rows: LossRows, weight_WD: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for the logits and the target distributions of the largest chunk.

    Used again by every chunk: pages fresh from the system cost a tenth of the product.
    """
    num_rows = max(map(sum, rows.num_rows), default=0)
    num_teachers = max(rows.num_teachers, default=0)
    both = weight_WD.new_empty(num_rows + num_teachers, len(weight_WD), dtype=torch.float32)
    return both[:num_rows], both[num_rows:]


def _product(states_CD: Tensor, weight_WD: Tensor, out: Tensor) -> Tensor:
    """Logits in float32, [C, W], in the buffer."""
    if states_CD.dtype is out.dtype:
        return torch.mm(states_CD, weight_WD.T, out=out)
    return out.copy_(states_CD @ weight_WD.T)


def _chunk_loss(
    logits_CW: Tensor, teacher: Teacher, chunk: _Chunk, weight_C: Tensor, kind: LossKind, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Turns the logits into their gradient; loss and correctness of each row as float32."""
    prob_QW, mass_Q = teacher.distribution(chunk.teacher_Q, out)
    mass_C = mass_Q[chunk.teacher_C]
    wanted_C = teacher.draft_argmax_P[chunk.teacher_Q][chunk.teacher_C]
    # Of equals only the first is the argmax, but logits are never exactly equal.
    at_wanted_C = logits_CW.gather(1, wanted_C.clamp_min(0)[:, None])[:, 0]
    correct_C = (wanted_C >= 0) & (at_wanted_C >= logits_CW.amax(-1))
    size = len(logits_CW) if logits_CW.is_cuda else max(1, CACHED_ELEMENTS // logits_CW.shape[1])
    losses = [
        loss_and_gradient_(kind, logits, prob_QW.index_select(0, index), mass, weight)
        for logits, index, mass, weight in zip(
            *(x.split(size) for x in (logits_CW, chunk.teacher_C, mass_C, weight_C)), strict=True
        )
    ]
    return torch.cat(losses), correct_C.float()


def _add_product_(total_WD: Tensor, grad_CW: Tensor, final_CD: Tensor) -> None:
    """Accumulates the weight's gradient in float32."""
    if final_CD.dtype is total_WD.dtype:
        total_WD.addmm_(grad_CW.T, final_CD)
    else:
        total_WD += grad_CW.T @ final_CD


def head_loss(
    states: Sequence[Tensor],
    norm_D: Tensor,
    norm_eps: float,
    weight_WD: Tensor,
    teacher: Teacher,
    rows: LossRows,
    *,
    weight_K: Tensor,
    kind: LossKind,
) -> HeadLoss:
    """Final norm, draft head and weighted loss without ever holding more than a chunk of logits.

    Args:
        states: for each step the layer outputs [R, D].
        norm_D: final norm.
        norm_eps: of it.
        weight_WD: the head.
        teacher: of the pack.
        rows: which rows carry loss.
        weight_K: float32 factor in the total of the rows of each step.
        kind: which loss.
    """
    return HeadLoss(
        *apply(
            _FusedHeadLoss, norm_D, weight_WD, norm_eps, teacher, rows, weight_K[: len(states)], kind, *states
        )
    )
