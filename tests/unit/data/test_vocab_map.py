"""The draft vocabulary: frequent tokens first, ends of answers always in, offsets on disk."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers import LlamaConfig

from slipstream.data import vocab_map
from slipstream.data.files import Stage, file_hash, read_json
from slipstream.data.target.resolve import Target
from slipstream.data.target.toy import toy_tokenizer
from slipstream.data.tokenize import TOKENS_FILE, as_table, write_tables
from slipstream.data.types import TokenizedSample, VocabMap
from slipstream.data.vocab_map import MAP_FILE, build_vocab_map, read_vocab_map, supervised_counts

REAL = range(12)


def counts(**by_id: int) -> NDArray[np.int64]:
    """Counts of a 12-token vocabulary, `t3=5` for id 3."""
    counts_V = np.zeros(12, dtype=np.int64)
    for name, count in by_id.items():
        counts_V[int(name[1:])] = count
    return counts_V


WORKED = counts(t3=5, t7=5, t1=2, t9=1)


def ids(found: VocabMap) -> list[int]:
    """Target ids of the draft vocabulary."""
    target_ids: list[int] = found.target_ids_W.tolist()
    return target_ids


def test_worked_case() -> None:
    found = build_vocab_map(WORKED, 6, [], REAL)
    assert ids(found) == [0, 1, 2, 3, 7, 9]
    assert found.d2t_W.tolist() == [0, 0, 0, 0, 3, 4]
    assert found.t2d_V.nonzero().flatten().tolist() == ids(found)
    assert found.t2d_V.numel() == 12
    assert found.draft_ids_V[[7, 8]].tolist() == [4, -1]


def test_ties_go_to_the_lowest_id() -> None:
    assert ids(build_vocab_map(WORKED, 1, [], REAL)) == [3]
    assert ids(build_vocab_map(WORKED, 3, [], REAL)) == [1, 3, 7]


def test_forced_ids_are_always_in_and_unreal_ones_never() -> None:
    assert ids(build_vocab_map(WORKED, 3, [11], REAL)) == [3, 7, 11]
    assert ids(build_vocab_map(counts(t11=9, t3=1), 4, [], range(5))) == [0, 1, 2, 3]


def test_whole_vocabulary_is_the_identity() -> None:
    found = build_vocab_map(WORKED, 12, [2], range(10))
    assert ids(found) == list(REAL)
    assert found.d2t_W.eq(0).all()
    assert found.t2d_V.all()


@pytest.mark.parametrize(
    ("size", "forced", "real"), [(13, [], 12), (11, [], 10), (1, [2, 3], 12), (0, [], 12)]
)
def test_impossible_sizes_are_refused(size: int, forced: list[int], real: int) -> None:
    with pytest.raises(ValueError, match=f"drafter.draft_vocab_size={size} must lie between"):
        build_vocab_map(WORKED, size, forced, range(real))


def make_tokens(folder: Path) -> Path:
    """Three training rows and a validation row that must not count."""
    rows = [
        TokenizedSample(
            id=name,
            split="validation" if name == "v" else "train",
            input_ids_T=torch.tensor([9, 9, *answer, 2]),
            loss_mask_T=torch.tensor([False, False, *[True] * len(answer), True]),
        )
        for name, answer in (("a", [5] * 6), ("b", [6] * 3), ("c", [7]), ("v", [8] * 50))
    ]
    stage = Stage(folder, "tokens", {})
    write_tables(folder / TOKENS_FILE, [as_table(rows)])
    stage.complete([TOKENS_FILE])
    return folder


def make_target(folder: Path) -> Target:
    """A target with a padded vocabulary of 400."""
    tokenizer = toy_tokenizer(300)
    config = LlamaConfig(vocab_size=400, eos_token_id=2)
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Target(
        name="toy",
        path=folder,
        config=config,
        fingerprint="f",
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


def test_stage_counts_supervised_training_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, tokens = make_target(tmp_path / "target"), make_tokens(tmp_path / "tokens")
    counts_V = supervised_counts(tokens, 400)
    assert {i: int(counts_V[i]) for i in np.flatnonzero(counts_V)} == {2: 3, 5: 6, 6: 3, 7: 1}
    for name in ("one", "two"):
        vocab_map.run(3, target, tokens, tmp_path / name)
    found = read_vocab_map(tmp_path / "one")
    assert ids(found) == [2, 5, 6]
    assert found.t2d_V.numel() == 400
    assert read_json(tmp_path / "one/manifest.json")["facts"]["coverage"] == pytest.approx(12 / 13, abs=1e-6)
    assert "warning: the draft vocabulary covers 0.923" in capsys.readouterr().err
    assert file_hash(tmp_path / "one" / MAP_FILE) == file_hash(tmp_path / "two" / MAP_FILE)
    vocab_map.run(400, target, tokens, tmp_path / "whole")
    assert ids(read_vocab_map(tmp_path / "whole")) == list(range(400))
    assert "warning" not in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"draft_vocab_size: 3 there, 4 now"):
        vocab_map.run(4, target, tokens, tmp_path / "one")


@pytest.mark.parametrize(
    ("d2t", "t2d", "message"),
    [
        ([1, 3], [False, True, False, True], "offsets, not ids"),
        ([1, 0], [False, True, False, False], "offsets, not ids"),
        ([0, 0], [True, False, True, False], "offsets, not ids"),
        ([0.0], [True, False, False, False], "must hold d2t"),
    ],
)
def test_broken_maps_are_refused(tmp_path: Path, d2t: list[float], t2d: list[bool], message: str) -> None:
    save_file({"d2t": torch.tensor(d2t), "t2d": torch.tensor(t2d)}, tmp_path / MAP_FILE)
    with pytest.raises(ValueError, match=message):
        read_vocab_map(tmp_path)
    (tmp_path / MAP_FILE).write_bytes(b"broken")
    with pytest.raises(ValueError, match="cannot be read"):
        read_vocab_map(tmp_path)
    (tmp_path / MAP_FILE).unlink()
    with pytest.raises(ValueError, match=f"cannot be read .*: delete {tmp_path} to make it again"):
        read_vocab_map(tmp_path)
