"""Alignment, packing and the plan of an epoch."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from slipstream.data.batches import CachedFeeder, align, pack, plan_epoch
from slipstream.data.cache import RowInfo
from slipstream.data.types import IGNORED
from tests.heads import MemorySource, make_geometry, make_sample

WORKED_EXAMPLE = [0, 0, 0, 0, 1, 1, 1, 0]


def rows(count: int) -> list[RowInfo]:
    return [
        RowInfo(id=str(i), split="train", num_tokens=10 + 7 * i % 23, num_supervised=5) for i in range(count)
    ]


def test_worked_example() -> None:
    """ALGORITHMS.md section 1: k=0 -> rows 3, 4; k=1 -> row 3; nothing after that."""
    sample = make_sample("a", WORKED_EXAMPLE, geometry=make_geometry())
    batch = align(sample, seed=0, epoch=0)
    live = [(batch.num_live_T > k).nonzero().flatten().tolist() for k in range(3)]
    assert live == [[3, 4], [3], []]
    assert torch.equal(batch.token_T, sample.input_ids_T[1:6])
    assert torch.equal(batch.aux_TLD, sample.aux_TLD[:5])
    # Row 3 predicts x5 by what the target says after x4, the first supervised token.
    assert batch.teacher_T[3:].tolist() == [0, 1]


def test_first_drafted_row_carries_loss_and_nothing_follows_the_end() -> None:
    for before, answer, after in itertools.product((1, 3), (2, 5), (0, 2)):
        mask = [0] * before + [1] * answer + [0] * after
        batch = align(make_sample("a", mask, geometry=make_geometry()), seed=0, epoch=0)
        live = (batch.num_live_T > 0).nonzero().flatten()
        assert live.tolist() == list(range(before - 1, before + answer - 2))


def test_a_document_without_answer_has_no_row() -> None:
    batch = align(make_sample("a", [0, 0, 0], geometry=make_geometry()), seed=0, epoch=0)
    assert batch.token_T.numel() == 0


def test_pack_offsets_teachers() -> None:
    geometry = make_geometry()
    samples = [make_sample(name, WORKED_EXAMPLE, geometry=geometry, seed=i) for i, name in enumerate("ab")]
    batch = pack([align(sample, seed=0, epoch=0) for sample in samples])
    assert list(batch.document_starts) == [0, 5, 10]
    assert batch.teacher_T[8:].tolist() == [3, 4]
    assert (batch.teacher_T[5:8] == IGNORED).all()
    assert torch.equal(batch.last_hidden_PD[3:], samples[1].last_hidden_PD)


def test_survival_depends_on_document_epoch_and_seed_only() -> None:
    sample = make_sample("a", WORKED_EXAMPLE, geometry=make_geometry())
    first = align(sample, seed=0, epoch=0).survival_T
    assert torch.equal(first, align(sample, seed=0, epoch=0).survival_T)
    assert not torch.equal(first, align(sample, seed=0, epoch=1).survival_T)
    assert not torch.equal(first, align(sample, seed=1, epoch=0).survival_T)


def test_plan_holds_every_document_once_within_the_budget() -> None:
    infos = rows(40)
    sizes = {row.id: row.num_tokens for row in infos}
    steps = plan_epoch(infos, tokens_per_pack=64, packs_per_step=4, seed=3, epoch=0)
    packs = [p for step in steps for p in step]
    assert sorted(i for p in packs for i in p) == sorted(sizes)
    assert all(sum(sizes[i] for i in p) <= 64 for p in packs)
    assert all(len(step) == 4 for step in steps[:-1])
    assert steps != plan_epoch(infos, tokens_per_pack=64, packs_per_step=4, seed=3, epoch=1)


def test_documents_are_shuffled_within_some_shards() -> None:
    """Ten shards of four, two together: eight documents in a row come from two shards, others each epoch."""
    infos = [replace(row, shard=f"s{i // 4}") for i, row in enumerate(rows(40))]
    shards = {row.id: row.shard for row in infos}

    def order(epoch: int) -> list[str]:
        steps = plan_epoch(infos, tokens_per_pack=64, packs_per_step=4, seed=3, epoch=epoch, shuffle_shards=2)
        return [id for step in steps for p in step for id in p]

    first, second = order(0), order(1)
    assert sorted(first) == sorted(second) == sorted(shards)
    for ids in (first, second):
        together = [{shards[id] for id in ids[i : i + 8]} for i in range(0, 40, 8)]
        assert [len(names) for names in together] == [2] * 5
    assert first != second
    assert {shards[id] for id in first[:8]} != {shards[id] for id in second[:8]}


def test_ranks_share_a_step_whatever_their_number() -> None:
    geometry = make_geometry()
    samples = [make_sample(str(i), [0, 1, 1, 1, 1], geometry=geometry, seed=i) for i in range(11)]
    source = MemorySource(samples, [])
    steps = plan_epoch(source.rows("train"), tokens_per_pack=10, packs_per_step=4, seed=0, epoch=0)

    def read(world_size: int) -> list[list[str]]:
        feeders = [
            CachedFeeder(
                source,
                [(0, step) for step in steps],
                packs_per_step=4,
                rank=rank,
                world_size=world_size,
                seed=0,
                pin_memory=False,
            )
            for rank in range(world_size)
        ]
        seen = []
        for _ in steps:
            packs = [p for feeder in feeders for p in feeder.step_packs()]
            seen.append(sorted(i for p in packs if p.num_live_T.any() for i in p.ids))
        for feeder in feeders:
            feeder.close()
        return seen

    assert read(1) == read(2) == read(4)
    assert sum(map(len, read(2))) == 11


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_state_that_is_not_finite_is_refused_by_document(value: float) -> None:
    sample = make_sample("doc7", [0, 0, 1, 1, 1], geometry=make_geometry())
    align(sample, seed=0, epoch=0)
    sample.aux_TLD[3, 1, 2] = value
    with pytest.raises(ValueError, match=r"document doc7 has a state that is not finite \(aux_TLD, row 3\)"):
        align(sample, seed=0, epoch=0)


def test_large_states_are_not_mistaken() -> None:
    sample = make_sample("a", [0, 0, 1, 1, 1], geometry=make_geometry())
    sample.last_hidden_PD.fill_(3e38)
    align(sample, seed=0, epoch=0)
