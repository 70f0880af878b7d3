"""The hidden-state cache: what is written is read, and a damaged cache is named."""

import dataclasses
from pathlib import Path

import pytest
import torch

from slipstream.data.batches import align, pack
from slipstream.data.cache import INDEX, CacheWriter, HiddenStateCache, RowInfo, shard_name
from slipstream.data.config import Store, TeacherStore
from slipstream.data.files import read_json, write_json
from slipstream.data.small import top_teacher
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


def make_top(sample: HiddenStateSample) -> HiddenStateSample:
    """The same document with top tokens for teachers."""
    num = len(sample.argmax_P)
    log_probs_PE = torch.tensor([0.5, 0.25, 0.125]).log().expand(num, -1)
    ids_PE = torch.arange(3 * num).view(num, 3) + 65000
    return dataclasses.replace(sample, **top_teacher(ids_PE, log_probs_PE))


@pytest.mark.parametrize("store", [Store.int8, Store.fp8])
def test_small_rows_read_back(tmp_path: Path, store: Store) -> None:
    """Documents whose last rows are not kept, one without rows, one without teachers."""
    writer = CacheWriter(tmp_path, store=store, teacher=TeacherStore.topk)
    samples = {id: make_top(sample) for id, sample in SAMPLES.items()}
    for number, ids in enumerate((["b", "c"], ["a"])):
        writer.write(number, [samples[id] for id in ids], [SPLITS[id] for id in ids])
    writer.finish(2)
    cache = HiddenStateCache(tmp_path)
    for id, num_rows in {"a": 5, "b": 3, "c": 0}.items():
        loaded, sample = cache.load(id), samples[id]
        assert loaded.aux_TLD.shape == (num_rows, 3, 8)
        torch.testing.assert_close(loaded.aux_TLD, sample.aux_TLD[:num_rows], rtol=0.07, atol=0.05)
        assert torch.equal(loaded.top_ids_PE, sample.top_ids_PE)
        torch.testing.assert_close(loaded.top_log_probs_PE, sample.top_log_probs_PE, rtol=0, atol=0.01)
        assert torch.equal(loaded.argmax_P, sample.top_ids_PE[:, 0])
        assert torch.equal(loaded.loss_mask_T, sample.loss_mask_T)
        rows, whole = (align(x, seed=0, epoch=0) for x in (loaded, sample))
        assert torch.equal(rows.teacher_T, whole.teacher_T)
        assert rows.aux_TLD.shape == whole.aux_TLD.shape
    pack([align(cache.load(id), seed=0, epoch=0) for id in samples])


def test_top_tokens_beside_whole_states(tmp_path: Path) -> None:
    writer = CacheWriter(tmp_path, teacher=TeacherStore.topk)
    writer.write(0, [make_top(SAMPLES["a"])], ["train"])
    writer.finish(1)
    loaded = HiddenStateCache(tmp_path).load("a")
    assert torch.equal(loaded.aux_TLD, SAMPLES["a"].aux_TLD)
    assert loaded.last_hidden_PD.shape == (7, 0)
