"""A live target: the states of the cache, to the bit, and a memory that is kept to."""

from pathlib import Path

import pytest
import torch

from slipstream.data import live
from slipstream.data.cache import HiddenStateCache
from slipstream.data.capture import plan_shards
from slipstream.data.live import LiveSource
from slipstream.data.types import HiddenStateSample
from tests.unit.data.test_capture import AUX_LAYERS, CONFIG, SAMPLES, make_model, make_tokens, run

FIELDS = ("input_ids_T", "loss_mask_T", "aux_TLD", "last_hidden_PD", "argmax_P", "logsumexp_P")


def make_source(max_bytes: float = 1e9) -> LiveSource:
    samples = sorted(SAMPLES, key=lambda sample: sample.id)
    return LiveSource(make_model, samples, AUX_LAYERS, CONFIG, max_bytes=max_bytes)


def same(one: HiddenStateSample, other: HiddenStateSample) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in FIELDS)


@pytest.mark.parametrize("max_bytes", [1e9, 1])
def test_live_documents_are_the_cached_ones(max_bytes: float, tmp_path: Path) -> None:
    run(make_tokens(tmp_path / "tokens", SAMPLES), tmp_path / "states")
    cache, source = HiddenStateCache(tmp_path / "states"), make_source(max_bytes)
    for split in ("train", "validation"):
        rows = source.rows(split)
        assert rows == cache.rows(split)
        assert [row.shard for row in rows] == [row.shard for row in cache.rows(split)]
        assert all(same(source.load(row.id), cache.load(row.id)) for row in rows)


def test_a_pass_runs_once_while_its_states_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    real = live.capture_batch

    def count(*args: object) -> list[HiddenStateSample]:
        passes.append(args)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(live, "capture_batch", count)
    num_passes = sum(map(len, plan_shards(SAMPLES, CONFIG.tokens_per_forward, CONFIG.tokens_per_shard)))
    assert num_passes < len(SAMPLES)
    for max_bytes, num in ((1e9, num_passes), (1, 2 * len(SAMPLES))):
        passes.clear()
        source = make_source(max_bytes)
        for _ in range(2):
            for sample in SAMPLES:
                source.load(sample.id)
        assert len(passes) == num


def test_repeated_passes_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    make_source().warn(32, 50, 0)
    make_source(1).warn(32, 50, 2)
    assert "warning" not in capsys.readouterr().err
    make_source(1).warn(32, 50, 0)
    assert (
        "up to 2 documents run for each one that is used: set data.shuffle_shards" in capsys.readouterr().err
    )
