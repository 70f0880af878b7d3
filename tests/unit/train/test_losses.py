"""The fused head against plain autograd, and the losses against their definitions."""

import math

import pytest
import torch

from slipstream.train.config import Loss
from slipstream.train.losses import Teacher, head_loss, make_teacher, row_losses

ROWS, TEACHERS, WIDTH, VOCAB = 37, 11, 16, 50


def make_inputs() -> tuple[torch.Tensor, torch.Tensor, Teacher, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    final = torch.randn(ROWS, WIDTH, generator=generator, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH, generator=generator, requires_grad=True)
    prob = torch.randn(TEACHERS, VOCAB, generator=generator).mul(2).softmax(-1)
    mass = torch.rand(TEACHERS, generator=generator)
    teacher = Teacher(prob, mass, torch.randint(VOCAB, (TEACHERS,), generator=generator))
    index = torch.randint(TEACHERS, (ROWS,), generator=generator)
    return final, weight, teacher, index, torch.rand(ROWS, generator=generator)


@pytest.mark.parametrize("kind", list(Loss))
@pytest.mark.parametrize("chunk_rows", [1, 10, 100])
def test_fused_head_equals_autograd(kind: Loss, chunk_rows: int) -> None:
    final, weight, teacher, index, row_weight = make_inputs()
    logits = final @ weight.T
    plain = (row_losses(kind, logits, teacher.prob_PW[index], teacher.mass_P[index]) * row_weight).sum()
    expected = torch.autograd.grad(plain, (final, weight))
    result = head_loss(
        final, weight, teacher, teacher_R=index, row_weight_R=row_weight, kind=kind, chunk_rows=chunk_rows
    )
    found = torch.autograd.grad(2 * result.total, (final, weight))
    torch.testing.assert_close(result.total, plain)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, 2 * b, rtol=1e-5, atol=1e-6)
    assert torch.equal(result.correct_R, logits.argmax(-1) == teacher.draft_argmax_P[index])


def test_no_rows_gives_zero_gradients() -> None:
    final, weight, teacher, index, row_weight = make_inputs()
    none = slice(0, 0)
    result = head_loss(
        final[none],
        weight,
        teacher,
        teacher_R=index[none],
        row_weight_R=row_weight[none],
        kind=Loss.ce,
        chunk_rows=8,
    )
    (gradient,) = torch.autograd.grad(result.total, weight)
    assert result.total == 0
    assert torch.equal(gradient, torch.zeros_like(weight))


def test_losses_by_hand() -> None:
    """q = (1/4, 3/4), p = (1/2, 1/2) of which a mass of 0.8 lies in the draft vocabulary."""
    logits, prob = torch.tensor([[0.25, 0.75]]).log(), torch.tensor([[0.5, 0.5]])
    mass = torch.tensor([0.8])
    alpha = 0.25 + 0.4
    cross_entropy = -0.5 * math.log(0.25) - 0.5 * math.log(0.75)
    weight = math.exp(-3 * alpha)
    expected = {
        Loss.ce: cross_entropy,
        Loss.tv: 1 - alpha,
        Loss.lk_alpha: -math.log(alpha),
        Loss.lk_lambda: weight * (cross_entropy - math.log(2)) + (1 - weight) * (1 - alpha),
    }
    for kind, value in expected.items():
        assert row_losses(kind, logits, prob, mass).item() == pytest.approx(value, rel=1e-5)


def test_teacher_is_the_targets_distribution() -> None:
    """softmax(lm_head(norm(state))) over all tokens, restricted to the draft vocabulary."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(5, WIDTH, generator=generator)
    norm, head = torch.rand(WIDTH, generator=generator), torch.randn(VOCAB, WIDTH, generator=generator)
    kept = torch.arange(0, VOCAB, 3)
    normed = norm * hidden / (hidden.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    logits = normed @ head.T
    teacher = make_teacher(
        hidden,
        norm_D=norm,
        norm_eps=1e-5,
        lm_head_WD=head[kept],
        logsumexp_P=logits.logsumexp(-1),
        draft_argmax_P=torch.zeros(5).long(),
    )
    full = logits.softmax(-1)[:, kept]
    torch.testing.assert_close(teacher.prob_PW * teacher.mass_P[:, None], full, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(teacher.prob_PW.sum(-1), torch.ones(5))
