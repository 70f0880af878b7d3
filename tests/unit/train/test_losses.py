"""The fused head against plain autograd, and the losses against their definitions."""

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from slipstream.train.config import LossConfig, LossKind
from slipstream.train.losses import (
    HeadLoss,
    LossRows,
    Teacher,
    head_loss,
    loss_and_gradient_,
    plan_loss_rows,
)
from tests.naive import row_losses

ROWS, TEACHERS, WIDTH, VOCAB, EPS = (30, 17, 5), 11, 16, 50, 1e-5


def make_teacher() -> Teacher:
    generator = torch.Generator().manual_seed(3)
    normed = torch.randn(TEACHERS, WIDTH, generator=generator)
    head = torch.randn(VOCAB, WIDTH, generator=generator)
    return Teacher(
        normed_PD=normed,
        lm_head_WD=head,
        logsumexp_P=(normed @ head.T).logsumexp(-1) + torch.rand(TEACHERS, generator=generator),
        draft_argmax_P=torch.randint(-1, VOCAB, (TEACHERS,), generator=generator),
    )


def make_states() -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    states = [torch.randn(num, WIDTH, generator=generator).requires_grad_() for num in ROWS]
    weight = torch.randn(VOCAB, WIDTH, generator=generator).requires_grad_()
    return states, weight, torch.rand(WIDTH, generator=generator).requires_grad_()


def make_rows(chunk_rows: int) -> tuple[list[np.ndarray], list[np.ndarray], LossRows]:
    generator = np.random.default_rng(5)
    rows = [np.sort(generator.choice(num, num - 3, replace=False)) for num in ROWS]
    teachers = [np.sort(generator.integers(TEACHERS, size=len(x))) for x in rows]
    return rows, teachers, plan_loss_rows(rows, teachers, chunk_rows)


def fused(kind: LossKind, chunk_rows: int, teacher: Teacher) -> tuple[HeadLoss, list[torch.Tensor]]:
    states, weight, norm = make_states()
    *_, plan = make_rows(chunk_rows)
    weight_K = torch.tensor([1.0, 0.7, 0.4])
    result = head_loss(states, norm, EPS, weight, teacher, plan, weight_K=weight_K, kind=kind)
    return result, list(torch.autograd.grad(2 * result.total, (norm, weight, *states)))


@pytest.mark.parametrize("kind", list(LossKind))
@pytest.mark.parametrize("chunk_rows", [1, 7, 100])
def test_fused_head_equals_autograd(kind: LossKind, chunk_rows: int) -> None:
    states, weight, norm = make_states()
    rows, teachers, _ = make_rows(chunk_rows)
    teacher = make_teacher()
    logits_PW = teacher.normed_PD @ teacher.lm_head_WD.T
    mass_P = (logits_PW.logsumexp(-1) - teacher.logsumexp_P).exp()
    total, loss_K, correct_K = torch.zeros(()), [], []
    for k, share in enumerate((1.0, 0.7, 0.4)):
        logits = F.rms_norm(states[k][rows[k]], (WIDTH,), norm, EPS) @ weight.T
        losses = row_losses(kind, logits, logits_PW.softmax(-1)[teachers[k]], mass_P[teachers[k]])
        total = total + share * losses.sum()
        loss_K.append(losses.sum().detach())
        correct_K.append((logits.argmax(-1) == teacher.draft_argmax_P[teachers[k]]).float().sum())
    expected = torch.autograd.grad(total, (norm, weight, *states))
    result, found = fused(kind, chunk_rows, teacher)
    torch.testing.assert_close(result.total, total)
    torch.testing.assert_close(result.loss_K, torch.stack(loss_K))
    assert torch.equal(result.correct_K, torch.stack(correct_K))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, 2 * b, rtol=1e-5, atol=1e-5)


def test_a_teacher_is_made_once_for_all_steps() -> None:
    """Three rows of every teacher, a chunk of nine rows: each chunk needs three teachers."""
    rows = [np.arange(12)] * 3
    plan = plan_loss_rows(rows, rows, 9)
    assert list(plan.num_teachers) == [3, 3, 3, 3]
    assert plan.teacher_Q.tolist() == list(range(12))
    assert [list(num) for num in plan.num_rows] == [[3, 3, 3]] * 4
    assert plan.row_X[:9].tolist() == [0, 1, 2] * 3


def test_held_teacher_is_the_same_in_bfloat16() -> None:
    teacher = make_teacher()
    every = torch.arange(TEACHERS)
    buffers = torch.empty(2, TEACHERS, VOCAB)
    exact = teacher.distribution(every, buffers[0])
    held = teacher.with_cache(4).distribution(every, buffers[1])
    assert held[0].dtype is torch.float32
    assert torch.equal(held[0], exact[0].bfloat16().float())
    torch.testing.assert_close(held[1], exact[1])


def test_top_tokens_of_the_whole_vocabulary_are_the_same_teacher() -> None:
    """With every token among the top ones, and with some of them outside the draft vocabulary."""
    exact = make_teacher()
    logits_PW = exact.normed_PD @ exact.lm_head_WD.T
    inside_PW = (logits_PW - exact.logsumexp_P[:, None]).exp()
    # The other tokens of the target: one entry outside the draft vocabulary.
    outside_P1 = 1 - inside_PW.sum(-1, keepdim=True)
    ids_PE = torch.cat((torch.arange(VOCAB).expand(TEACHERS, -1), torch.full((TEACHERS, 1), -1)), dim=1)
    top = (ids_PE, torch.cat((inside_PW, outside_P1), dim=1).log())
    teacher = dataclasses.replace(exact, normed_PD=torch.empty(TEACHERS, 0), top=top)
    every, buffers = torch.arange(TEACHERS), torch.empty(2, TEACHERS, VOCAB)
    for found, wanted in zip(
        teacher.distribution(every, buffers[0]), exact.distribution(every, buffers[1]), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    for kind in LossKind:
        found, wanted = fused(kind, 7, teacher)[0], fused(kind, 7, exact)[0]
        torch.testing.assert_close(found.total, wanted.total, rtol=1e-5, atol=1e-5)
    held = teacher.with_cache(4).distribution(every, buffers[0])
    torch.testing.assert_close(held[0], exact.distribution(every, buffers[1])[0], rtol=0.01, atol=1e-3)


def test_what_top_tokens_leave_is_shared_by_the_others() -> None:
    """Tokens 3 and 1 of five, one outside, and 0.2 of the rest: mass 0.9, of which 0.2 on three tokens."""
    teacher = Teacher(
        normed_PD=torch.empty(1, 0),
        lm_head_WD=torch.empty(5, 4),
        logsumexp_P=torch.zeros(1),
        draft_argmax_P=torch.tensor([3]),
        top=(torch.tensor([[3, -1, 1]]), torch.tensor([[0.5, 0.1, 0.2]]).log()),
    )
    prob, mass = teacher.distribution(torch.tensor([0]), torch.empty(1, 5))
    torch.testing.assert_close(mass, torch.tensor([0.9]))
    others = 0.2 / 3
    torch.testing.assert_close(prob * 0.9, torch.tensor([[others, 0.2, others, 0.5, others]]))


def test_no_rows_gives_zero_gradients() -> None:
    states, weight, norm = make_states()
    nothing = [np.empty(0, dtype=np.int64)] * 3
    plan = plan_loss_rows(nothing, nothing, 8)
    result = head_loss(
        states, norm, EPS, weight, make_teacher(), plan, weight_K=torch.ones(3), kind=LossKind.ce
    )
    (gradient,) = torch.autograd.grad(result.total, weight)
    assert result.total == 0
    assert torch.equal(gradient, torch.zeros_like(weight))


def test_a_frozen_head_costs_no_gradient() -> None:
    states, weight, norm = make_states()
    *_, plan = make_rows(7)
    result = head_loss(
        states,
        norm,
        EPS,
        weight.detach(),
        make_teacher(),
        plan,
        weight_K=torch.tensor([1.0, 0.7, 0.4]),
        kind=LossKind.ce,
    )
    expected = fused(LossKind.ce, 7, make_teacher())[1]
    found = torch.autograd.grad(2 * result.total, (norm, *states))
    assert all(map(torch.equal, found, (expected[0], *expected[2:])))


@pytest.mark.parametrize("kind", list(LossKind))
def test_bfloat16_states_get_float32_accumulation(kind: LossKind) -> None:
    """Rounding of states and weights only: the loss stays within a bfloat16 step of the exact one."""
    states, weight, norm = make_states()
    *_, plan = make_rows(7)
    teacher = make_teacher()
    small = [x.detach().bfloat16().requires_grad_() for x in (norm, weight, *states)]
    weight_K = torch.tensor([1.0, 0.7, 0.4])
    result = head_loss(small[2:], small[0], EPS, small[1], teacher, plan, weight_K=weight_K, kind=kind)
    found = torch.autograd.grad(result.total, small)
    assert result.total.dtype is torch.float32
    assert all(grad.dtype is torch.bfloat16 and grad.isfinite().all() for grad in found)
    torch.testing.assert_close(result.total, fused(kind, 7, teacher)[0].total, rtol=0.02, atol=0.02)


def test_losses_by_hand() -> None:
    """q = (1/4, 3/4), p = (1/2, 1/2) of which a mass of 0.8 lies in the draft vocabulary."""
    prob, mass = torch.tensor([[0.5, 0.5]]), torch.tensor([0.8])
    alpha = 0.25 + 0.4
    cross_entropy = -0.5 * math.log(0.25) - 0.5 * math.log(0.75)
    weight = math.exp(-3 * alpha)
    expected = {
        LossKind.ce: cross_entropy,
        LossKind.tv: 1 - alpha,
        LossKind.lk_alpha: -math.log(alpha),
        LossKind.lk_lambda: weight * (cross_entropy - math.log(2)) + (1 - weight) * (1 - alpha),
    }
    for kind, value in expected.items():
        logits = torch.tensor([[0.25, 0.75]]).log()
        loss = loss_and_gradient_(kind, logits, prob, mass, torch.ones(1))
        assert loss.item() == pytest.approx(value, rel=1e-5)


def test_chunks_are_sized_by_bytes() -> None:
    config = LossConfig(chunk_mib=8)
    assert (config.chunk_rows(4096), config.chunk_rows(32768), config.chunk_rows(1 << 24)) == (512, 64, 1)
