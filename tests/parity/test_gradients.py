"""Gradients of every parameter equal those of the naive unroll."""

from collections.abc import Sequence

import pytest
import torch

from slipstream.data.batches import align, pack
from slipstream.data.types import DraftBatch
from slipstream.drafters.config import DraftGeometry
from slipstream.drafters.eagle3 import Eagle3Head
from slipstream.train.config import LossConfig, LossKind, TeacherForm, UnrollConfig
from slipstream.train.ttt import FrozenTarget, Unroller, plan_unroll
from tests.heads import make_frozen, make_geometry, make_head, make_sample
from tests.naive import naive_loss

MASKS = [[0] * 3 + [1] * 9 + [0], [0] * 2 + [1] * 4, [0] * 5, [0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1]]
VARIANTS = [
    {},
    {"fc_norm": True, "norm_output": True},
    {"norm_before_residual": True},
    {"norm_before_fc": True},
    {"qk_norm": True},
    {"num_layers": 2, "norm_output": True},
    {"num_layers": 2, "norm_before_residual": True},
    {"num_key_value_heads": 4},
    {"num_key_value_heads": 1},
]


def make_batch(geometry: DraftGeometry, masks: Sequence[Sequence[int]]) -> DraftBatch:
    samples = [make_sample(str(i), list(mask), geometry=geometry, seed=i) for i, mask in enumerate(masks)]
    return pack([align(sample, seed=0, epoch=0) for sample in samples])


def worst_error(
    head: Eagle3Head, frozen: FrozenTarget, batch: DraftBatch, num_steps: int, config: LossConfig
) -> float:
    """Largest relative error of a parameter's gradient; the loss itself is compared on the way."""
    weight_K = 0.8 ** torch.arange(float(num_steps))
    wanted = naive_loss(head, batch, frozen, weight_K, config.kind)
    expected = torch.autograd.grad(wanted, list(head.parameters()))
    unroll = UnrollConfig(num_steps=num_steps)
    plan = plan_unroll(batch, draft_ids_V=frozen.draft_ids_V, config=unroll, chunk_rows=5)
    output = Unroller(head, frozen, config)(batch, plan, weight_K)
    output.loss.backward()
    if config.teacher is TeacherForm.recomputed:
        torch.testing.assert_close(output.loss, wanted, rtol=1e-5, atol=1e-5)
    errors = [
        (parameter.grad - exact).norm() / exact.norm()  # type: ignore[operator]
        for parameter, exact in zip(head.parameters(), expected, strict=True)
    ]
    return float(max(errors))


@pytest.mark.parametrize("num_steps", range(1, 8))
@pytest.mark.parametrize("kind", list(LossKind))
def test_every_loss_and_depth(kind: LossKind, num_steps: int) -> None:
    geometry = make_geometry()
    head, frozen, batch = make_head(geometry), make_frozen(geometry), make_batch(geometry, MASKS)
    assert worst_error(head, frozen, batch, num_steps, LossConfig(kind=kind)) < 1e-5


@pytest.mark.parametrize("flags", VARIANTS, ids=str)
def test_every_variant(flags: dict[str, object]) -> None:
    geometry = make_geometry(**flags)
    head, frozen, batch = make_head(geometry), make_frozen(geometry), make_batch(geometry, MASKS)
    assert worst_error(head, frozen, batch, 7, LossConfig()) < 1e-5


def test_documents_longer_than_a_block() -> None:
    geometry = make_geometry(max_position_embeddings=1024)
    head, frozen = make_head(geometry), make_frozen(geometry)
    batch = make_batch(geometry, [[0] * 90 + [1] * 200, [0] * 3 + [1] * 150])
    assert worst_error(head, frozen, batch, 3, LossConfig()) < 1e-5


@pytest.mark.parametrize("kind", [LossKind.ce, LossKind.lk_lambda, LossKind.lk_alpha])
def test_a_teacher_held_in_bfloat16_is_close(kind: LossKind) -> None:
    geometry = make_geometry()
    head, frozen, batch = make_head(geometry), make_frozen(geometry), make_batch(geometry, MASKS)
    config = LossConfig(kind=kind, teacher=TeacherForm.cached)
    assert 1e-5 < worst_error(head, frozen, batch, 4, config) < 1e-2
