"""Which rows are unrolled and what they weigh."""

from dataclasses import replace

import torch

from slipstream.data.batches import align, pack
from slipstream.data.types import DraftBatch
from slipstream.train.config import LossConfig, LossMean, OutsideVocab, UnrollConfig
from slipstream.train.ttt import Unroller, UnrollPlan, plan_unroll
from tests.heads import make_frozen, make_geometry, make_head, make_sample

MASKS = [[0] * 3 + [1] * 9 + [0], [0] * 2 + [1] * 4, [0] * 5, [0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1]]


def make_batch(geometry, epoch: int = 0) -> DraftBatch:  # type: ignore[no-untyped-def]
    samples = [make_sample(str(i), mask, geometry=geometry, seed=i) for i, mask in enumerate(MASKS)]
    return pack([align(sample, seed=0, epoch=epoch) for sample in samples])


def test_survival_sampling_is_unbiased() -> None:
    """The mean gradient over many draws approaches the gradient of the weighted loss."""
    geometry = make_geometry()
    head, frozen = make_head(geometry), make_frozen(geometry)
    unroller = Unroller(head, frozen, LossConfig())
    config = UnrollConfig(num_steps=4)
    decay = 0.6

    def gradient(survival: float, epoch: int) -> torch.Tensor:
        batch = make_batch(geometry, epoch)
        plan = plan_unroll(
            batch, draft_ids_V=frozen.draft_ids_V, config=replace(config, survival=survival), chunk_rows=8
        )
        weight_K = (decay / survival) ** torch.arange(4.0)
        return torch.autograd.grad(unroller(batch, plan, weight_K).loss, head.fc.weight)[0]

    exact = gradient(1.0, 0)
    mean = torch.stack([gradient(decay, epoch) for epoch in range(200)]).mean(0)
    few = torch.stack([gradient(decay, epoch) for epoch in range(4)]).mean(0)
    assert (mean - exact).norm() / exact.norm() < 0.08
    assert (mean - exact).norm() < 0.5 * (few - exact).norm()


def test_rows_are_nested_and_counted() -> None:
    geometry = make_geometry()
    frozen, batch = make_frozen(geometry), make_batch(geometry)
    config = UnrollConfig(num_steps=7)
    full = plan_unroll(batch, draft_ids_V=frozen.draft_ids_V, config=config, chunk_rows=8)
    some = plan_unroll(
        batch, draft_ids_V=frozen.draft_ids_V, config=replace(config, survival=0.6), chunk_rows=8
    )
    assert torch.equal(full.count_K, some.count_K)
    assert full.count_K.tolist() == full.loss_rows.rows_of_steps()
    previous = set(range(batch.token_T.numel()))
    for step in some.steps:
        rows = set(step.rows.row_R.tolist())
        assert rows <= previous
        previous = rows
    assert sum(s.rows.row_R.numel() for s in some.steps) < sum(s.rows.row_R.numel() for s in full.steps)


def test_rows_outside_the_draft_vocabulary() -> None:
    """Dropped from the loss by default, kept on request, and a miss in accuracy either way."""
    geometry = make_geometry()
    head, frozen, batch = make_head(geometry), make_frozen(geometry), make_batch(geometry)
    frozen = frozen._replace(draft_ids_V=torch.full_like(frozen.draft_ids_V, -1))
    unroller = Unroller(head, frozen, LossConfig())
    for choice, has_loss in ((OutsideVocab.drop, False), (OutsideVocab.renormalise, True)):
        config = UnrollConfig(num_steps=2, outside_vocab=choice)
        plan = plan_unroll(batch, draft_ids_V=frozen.draft_ids_V, config=config, chunk_rows=8)
        output = unroller(batch, plan, torch.ones(2))
        assert (output.loss.item() > 0) == has_loss
        assert output.num_rows_K[0] > 0
        assert output.correct_K.sum() == 0


def test_a_pack_without_supervision_touches_every_parameter() -> None:
    geometry = make_geometry()
    head, frozen, batch = make_head(geometry), make_frozen(geometry), make_batch(geometry)
    batch.num_live_T.zero_()
    plan = plan_unroll(batch, draft_ids_V=frozen.draft_ids_V, config=UnrollConfig(), chunk_rows=8)
    Unroller(head, frozen, LossConfig())(batch, plan, torch.ones(7)).loss.backward()
    for parameter in head.parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))  # type: ignore[arg-type]


def test_mean_over_sequences() -> None:
    """The mean of the documents' own means, step by step, in value and gradient: however they are packed."""
    geometry = make_geometry()
    head, frozen = make_head(geometry), make_frozen(geometry)
    unroller = Unroller(head, frozen, LossConfig())
    config = UnrollConfig(num_steps=4)
    samples = [make_sample(str(i), mask, geometry=geometry, seed=i) for i, mask in enumerate(MASKS)]
    documents = [align(sample, seed=0, epoch=0) for sample in samples]

    def planned(batch: DraftBatch, mean: LossMean) -> UnrollPlan:
        return plan_unroll(batch, draft_ids_V=frozen.draft_ids_V, config=config, chunk_rows=5, mean=mean)

    weight_K, expected = 0.8 ** torch.arange(4.0), torch.zeros(())
    alone = [(document, planned(document, LossMean.token)) for document in documents]
    num_documents_K = torch.stack([plan.count_K > 0 for _, plan in alone]).sum(0)
    for document, plan in alone:
        own_K = weight_K / plan.count_K.clamp_min(1).float() / num_documents_K.clamp_min(1)
        expected = expected + unroller(document, plan, own_K).loss
    whole = pack(documents)
    plan = planned(whole, LossMean.sequence)
    assert plan.num_terms_K.tolist() == num_documents_K.tolist()
    assert plan.count_K.tolist() == planned(whole, LossMean.token).num_terms_K.tolist()
    output = unroller(whole, plan, weight_K / plan.num_terms_K.clamp_min(1).float())
    torch.testing.assert_close(output.loss, expected)
    for a, b in zip(
        *(torch.autograd.grad(x, list(head.parameters())) for x in (output.loss, expected)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
