"""The hidden-state cache: what is written is read, and a damaged cache is named."""

from pathlib import Path

import pytest
import torch

from slipstream.data.cache import INDEX, CacheWriter, HiddenStateCache, RowInfo, shard_name
from slipstream.data.files import read_json, write_json
from slipstream.data.types import HiddenStateSample

SAMPLE_FIELDS = ("input_ids_T", "loss_mask_T", "aux_TLD", "last_hidden_PD", "argmax_P", "logsumexp_P")


def make_sample(id: str, num_tokens: int, num_supervised: int) -> HiddenStateSample:
    """Random states; the last tokens are supervised."""
    generator = torch.Generator().manual_seed(num_tokens)
    aux_TLD = torch.randn(num_tokens, 3, 8, generator=generator).bfloat16()
    return HiddenStateSample(
        id=id,
        input_ids_T=torch.randint(0, 100, (num_tokens,), generator=generator),
        loss_mask_T=torch.arange(num_tokens) >= num_tokens - num_supervised,
        aux_TLD=aux_TLD,
        last_hidden_PD=torch.randn(num_supervised, 8, generator=generator).bfloat16(),
        argmax_P=torch.randint(0, 100, (num_supervised,), generator=generator),
        logsumexp_P=torch.randn(num_supervised, generator=generator),
    )


SAMPLES = {"b": make_sample("b", 5, 2), "c": make_sample("c", 3, 0), "a": make_sample("a", 7, 7)}
SPLITS = {"a": "train", "b": "validation", "c": "train"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache of two shards."""
    writer = CacheWriter(tmp_path)
    for number, ids in enumerate((["b", "c"], ["a"])):
        samples = [SAMPLES[id] for id in ids]
        writer.write(number, samples, [SPLITS[id] for id in ids])
    assert writer.finish(2) == [shard_name(0), shard_name(1), INDEX]
    return tmp_path


def test_rows_read_back_as_written(folder: Path) -> None:
    cache = HiddenStateCache(folder)
    assert [row.id for row in cache.rows("train")] == ["a", "c"]
    assert cache.rows("validation") == [RowInfo(id="b", split="validation", num_tokens=5, num_supervised=2)]
    for id, sample in SAMPLES.items():
        loaded = cache.load(id)
        assert loaded.id == id
        for name in SAMPLE_FIELDS:
            torch.testing.assert_close(getattr(loaded, name), getattr(sample, name), rtol=0, atol=0)


def test_writer_knows_whole_shards(folder: Path) -> None:
    damaged = folder / shard_name(1)
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    writer = CacheWriter(folder)
    assert [writer.has(number) for number in range(3)] == [True, False, False]
    (folder / "shard-00001.json").write_text("{}")
    with pytest.raises(ValueError, match=r"shard-00001\.json cannot be read .*: delete it"):
        writer.has(1)


def test_a_damaged_shard_is_named(folder: Path) -> None:
    cache, path = HiddenStateCache(folder), folder / shard_name(1)
    path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(ValueError, match=f"{path} cannot be read .*: delete it and run the hidden_states st"):
        cache.load("a")
    assert cache.load("b").id == "b"


def test_missing_and_cut_shards_are_named(folder: Path) -> None:
    path = folder / shard_name(1)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"shard-00001.safetensors has \d+ bytes"):
        HiddenStateCache(folder)
    path.unlink()
    with pytest.raises(ValueError, match=r"shard-00001.safetensors is missing"):
        HiddenStateCache(folder)


def test_no_index_and_other_format_are_named(folder: Path) -> None:
    index = read_json(folder / INDEX)
    write_json(folder / INDEX, {**index, "format": "other"})
    with pytest.raises(ValueError, match=r"index.json has format 'other'"):
        HiddenStateCache(folder)
    write_json(folder / INDEX, {**index, "rows": [{}]})
    with pytest.raises(ValueError, match=f"index.json cannot be read .*: delete {folder} to make it again"):
        HiddenStateCache(folder)
    (folder / INDEX).unlink()
    with pytest.raises(ValueError, match=r"index.json does not exist"):
        HiddenStateCache(folder)
