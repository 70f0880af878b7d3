"""A flipped byte is found, named and mended; whole states become small ones without the target."""

import dataclasses
from pathlib import Path

import pytest

from slipstream.data import capture
from slipstream.data.cache import shard_name
from slipstream.data.config import CaptureConfig, Dtype, Store, TeacherStore
from slipstream.data.maintenance import damaged_shards, discard, statistics, trim
from tests.unit.data.test_capture import (
    AUX_LAYERS,
    CONFIG,
    SAMPLES,
    TargetStub,
    hashes,
    make_tokens,
    run,
)

BF16 = dataclasses.replace(CONFIG, dtype=Dtype.bfloat16)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return make_tokens(tmp_path / "tokens", SAMPLES)


def settings(config: CaptureConfig, tokens: Path) -> dict[str, object]:
    return capture.settings(config, TargetStub(), AUX_LAYERS, tokens)  # type: ignore[arg-type]


def test_a_flipped_byte_is_found_and_its_rows_alone_are_captured_again(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "states"
    run(tokens, folder)
    before = hashes(folder)
    assert damaged_shards(folder) == {}
    content = bytearray((folder / shard_name(1)).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / shard_name(1)).write_bytes(content)
    shards = capture.plan_shards(SAMPLES, CONFIG.tokens_per_forward, CONFIG.tokens_per_shard)
    lost = sorted(sample.id for batch in shards[1] for sample in batch)
    assert damaged_shards(folder) == {shard_name(1): lost}

    captured = []
    real = capture.capture_batch

    def count(*args: object) -> object:
        captured.extend(sample.id for sample in args[1])  # type: ignore[attr-defined]
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(capture, "capture_batch", count)
    discard(folder, damaged_shards(folder))
    run(tokens, folder)
    assert sorted(captured) == lost
    assert hashes(folder) == before
    assert damaged_shards(folder) == {}


@pytest.mark.parametrize("teacher", list(TeacherStore))
def test_trimmed_states_are_those_of_a_small_capture(
    tokens: Path, tmp_path: Path, teacher: TeacherStore
) -> None:
    whole = dataclasses.replace(BF16, teacher=teacher, topk=4)
    small = dataclasses.replace(whole, store=Store.int8)
    run(tokens, tmp_path / "states", whole)
    run(tokens, tmp_path / "small", small)
    with pytest.raises(ValueError, match="set data.capture.store=int8 or fp8"):
        trim(tmp_path / "states", settings(whole, tokens), Store.bf16)
    other = dataclasses.replace(small, tokens_per_shard=7)
    with pytest.raises(ValueError, match="tokens_per_shard: 40 there, 7 now"):
        trim(tmp_path / "states", settings(other, tokens), Store.int8)
    trim(tmp_path / "states", settings(small, tokens), Store.int8)
    if teacher is TeacherStore.last_hidden:
        assert hashes(tmp_path / "states") == hashes(tmp_path / "small")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small", "states", "tokens"]
    run(tokens, tmp_path / "states", small, target := TargetStub())
    assert target.loads == 0


def test_statistics(tokens: Path, tmp_path: Path) -> None:
    run(tokens, tmp_path / "states", dataclasses.replace(BF16, store=Store.fp8))
    found = statistics(tmp_path / "states")
    assert found["documents"] == "6 train, 1 validation"
    assert found["tokens"] == "89, 42 supervised"
    assert (found["states"], found["teacher"]) == ("fp8", "last state")
