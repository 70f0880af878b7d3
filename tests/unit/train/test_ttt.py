"""Which rows are unrolled, what they weigh, and gradients against a naive unroll."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from slipstream.data.batches import align, pack
from slipstream.data.types import DraftBatch
from slipstream.drafters.eagle3 import Eagle3Head
from slipstream.train.config import Loss, OutsideVocab, UnrollConfig
from slipstream.train.losses import make_teacher, row_losses
from slipstream.train.ttt import FrozenTarget, Unroller, plan_unroll
from tests.heads import make_frozen, make_geometry, make_head, make_sample

MASKS = [[0] * 3 + [1] * 9 + [0], [0] * 2 + [1] * 4, [0] * 5, [0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1]]


def make_batch(geometry, epoch: int = 0) -> DraftBatch:  # type: ignore[no-untyped-def]
    samples = [make_sample(str(i), mask, geometry=geometry, seed=i) for i, mask in enumerate(MASKS)]
    return pack([align(sample, seed=0, epoch=epoch) for sample in samples])


def naive_loss(
    head: Eagle3Head, batch: DraftBatch, frozen: FrozenTarget, weight_K: torch.Tensor
) -> torch.Tensor:
    """Every row at every step, a dense mask over base and chain, full logits: the definition."""
    num_rows, groups = batch.token_T.numel(), 2
    document = torch.zeros(num_rows, dtype=torch.int64)
    for start in batch.document_starts[1:-1]:
        document[start:] += 1
    teacher = make_teacher(
        batch.last_hidden_PD,
        norm_D=frozen.norm_D,
        norm_eps=frozen.norm_eps,
        lm_head_WD=frozen.lm_head_WD,
        logsumexp_P=batch.logsumexp_P,
        draft_argmax_P=frozen.draft_ids_V[batch.argmax_P],
    )
    hidden, total = head.fuse(batch.aux_TLD), torch.zeros(())
    layers = head.decoder_layers()
    keys: list[list[torch.Tensor]] = [[] for _ in layers]
    values: list[list[torch.Tensor]] = [[] for _ in layers]
    base = (document[:, None] == document) & torch.ones(num_rows, num_rows).tril().bool()
    for k in range(weight_K.numel()):
        source = (torch.arange(num_rows) + k).clamp(max=num_rows - 1)
        embed = F.embedding(batch.token_T[source], frozen.embedding_VD)
        position = batch.position_T + k
        mask = torch.cat([base, *[torch.eye(num_rows).bool()] * k], dim=1)
        for i, layer in enumerate(layers):
            attn, normed = layer.self_attn, layer.normed(hidden)
            both = torch.cat((layer.input_layernorm(embed), normed), dim=-1) if i == 0 else normed
            query, key, value = (
                project(both).unflatten(-1, (-1, 16)) for project in (attn.q_proj, attn.k_proj, attn.v_proj)
            )
            if head.geometry.qk_norm:
                query, key = attn.q_norm(query), attn.k_norm(key)
            keys[i].append(head.rotary(key, position))
            values[i].append(value)
            all_keys = torch.cat(keys[i]).repeat_interleave(groups, dim=1)
            all_values = torch.cat(values[i]).repeat_interleave(groups, dim=1)
            scores = torch.einsum("tnh,snh->nts", head.rotary(query, position), all_keys) / 4
            weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
            attended = torch.einsum("nts,snh->tnh", weights, all_values).flatten(1)
            hidden = layer.finish(layer.residual(hidden, normed), attended)
        hidden, final = head.finish(hidden)
        live = (batch.num_live_T > k).nonzero()[:, 0]
        index = batch.teacher_T[live + k]
        live, index = (x[teacher.draft_argmax_P[index] >= 0] for x in (live, index))
        losses = row_losses(Loss.ce, head.logits(final[live]), teacher.prob_PW[index], teacher.mass_P[index])
        total = total + weight_K[k] * losses.sum()
    return total


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"fc_norm": True, "norm_output": True},
        {"norm_before_residual": True},
        {"qk_norm": True},
        {"num_layers": 2, "norm_output": True},
    ],
)
def test_gradients_equal_the_naive_unroll(flags: dict[str, bool]) -> None:
    geometry = make_geometry(**flags)
    head, frozen, batch = make_head(geometry), make_frozen(geometry), make_batch(geometry)
    weight_K = 0.8 ** torch.arange(7.0)
    expected = torch.autograd.grad(naive_loss(head, batch, frozen, weight_K), list(head.parameters()))
    plan = plan_unroll(batch, draft_ids_V=frozen.draft_ids_V, config=UnrollConfig(num_steps=7))
    output = Unroller(head, frozen, kind=Loss.ce, chunk_rows=8)(batch, plan, weight_K)
    output.loss.backward()
    for (name, parameter), wanted in zip(head.named_parameters(), expected, strict=True):
        error = (parameter.grad - wanted).norm() / wanted.norm()  # type: ignore[operator]
        assert error < 1e-5, f"{name}: {error}"


def test_survival_sampling_is_unbiased() -> None:
    """The mean gradient over many draws approaches the gradient of the weighted loss."""
    geometry = make_geometry()
    head, frozen = make_head(geometry), make_frozen(geometry)
    unroller = Unroller(head, frozen, kind=Loss.ce, chunk_rows=64)
    config = UnrollConfig(num_steps=4)
    decay = 0.6

    def gradient(survival: float, epoch: int) -> torch.Tensor:
        batch = make_batch(geometry, epoch)
        plan = plan_unroll(batch, draft_ids_V=frozen.draft_ids_V, config=replace(config, survival=survival))
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
    full = plan_unroll(batch, draft_ids_V=frozen.draft_ids_V, config=config)
    some = plan_unroll(batch, draft_ids_V=frozen.draft_ids_V, config=replace(config, survival=0.6))
    assert torch.equal(full.count_K, some.count_K)
    assert full.count_K.tolist() == [float(step.loss_X.numel()) for step in full.steps]
    previous = set(range(batch.token_T.numel()))
    for step in some.steps:
        rows = set(step.row_R.tolist())
        assert rows <= previous
        previous = rows
    assert sum(s.row_R.numel() for s in some.steps) < sum(s.row_R.numel() for s in full.steps)


def test_rows_outside_the_draft_vocabulary() -> None:
    """Dropped from the loss by default, kept on request, and a miss in accuracy either way."""
    geometry = make_geometry()
    head, frozen, batch = make_head(geometry), make_frozen(geometry), make_batch(geometry)
    frozen = frozen._replace(draft_ids_V=torch.full_like(frozen.draft_ids_V, -1))
    unroller = Unroller(head, frozen, kind=Loss.ce, chunk_rows=8)
    for choice, has_loss in ((OutsideVocab.drop, False), (OutsideVocab.renormalise, True)):
        config = UnrollConfig(num_steps=2, outside_vocab=choice)
        plan = plan_unroll(batch, draft_ids_V=frozen.draft_ids_V, config=config)
        output = unroller(batch, plan, torch.ones(2))
        assert (output.loss.item() > 0) == has_loss
        assert output.num_rows_K[0] > 0
        assert output.correct_K.sum() == 0


def test_a_pack_without_supervision_touches_every_parameter() -> None:
    geometry = make_geometry()
    head, frozen, batch = make_head(geometry), make_frozen(geometry), make_batch(geometry)
    batch.num_live_T.zero_()
    plan = plan_unroll(batch, draft_ids_V=frozen.draft_ids_V, config=UnrollConfig())
    Unroller(head, frozen, kind=Loss.ce, chunk_rows=8)(batch, plan, torch.ones(7)).loss.backward()
    for parameter in head.parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))  # type: ignore[arg-type]
