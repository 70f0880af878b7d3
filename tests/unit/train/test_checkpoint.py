"""Which checkpoint a run goes on from, and with how many packs."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slipstream.train import trainer
from slipstream.train.checkpoint import HEAD, STATE, TrainState, latest_checkpoint, read_head
from slipstream.train.config import TrainConfig


def write(folder: Path, step: int) -> Path:
    checkpoint = folder / f"step-{step:07d}"
    checkpoint.mkdir()
    save_file({"fc.weight": torch.ones(4)}, checkpoint / HEAD)
    hashes = {HEAD: hashlib.sha256((checkpoint / HEAD).read_bytes()).hexdigest()}
    (checkpoint / STATE).write_text(json.dumps({"state": {"step": step, "skipped": 1}, "sha256": hashes}))
    return checkpoint


def damage(checkpoint: Path, how: str) -> None:
    if how == "truncated":
        (checkpoint / HEAD).write_bytes((checkpoint / HEAD).read_bytes()[:-1])
    elif how == "flipped":
        content = (checkpoint / HEAD).read_bytes()
        (checkpoint / HEAD).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif how == "missing":
        (checkpoint / HEAD).unlink()
    else:
        (checkpoint / STATE).write_text(how)


@pytest.mark.parametrize("how", ["truncated", "flipped", "missing", "{}", "[]", "null", "{"])
def test_a_damaged_checkpoint_is_left_out(how: str, tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    first, second = write(tmp_path, 10), write(tmp_path, 20)
    assert latest_checkpoint(tmp_path) == (second, TrainState(step=20, skipped=1))
    damage(second, how)
    assert latest_checkpoint(tmp_path) == (first, TrainState(step=10, skipped=1))
    damage(first, how)
    with pytest.raises(ValueError, match=f"delete {tmp_path} to train again"):
        latest_checkpoint(tmp_path)


def test_a_damaged_head_is_named(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, 10)
    assert read_head(checkpoint / HEAD).keys() == {"fc.weight"}
    (checkpoint / HEAD).write_bytes(bytes(100))
    with pytest.raises(ValueError, match=f"{HEAD} cannot be read.*delete {checkpoint}"):
        read_head(checkpoint / HEAD)


@pytest.mark.parametrize(("wanted", "ranks", "used"), [(1000, 1, 3), (1000, 2, 4), (2, 2, 2), (3, 2, 3)])
def test_no_step_has_more_packs_than_an_epoch(
    wanted: int, ranks: int, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer.distributed, "world_size", lambda: ranks)
    steps = [(0, [["a"], ["b"], ["c"]]), (1, [["a", "b"], ["c"]])]
    assert trainer.without_empty_packs(TrainConfig(packs_per_step=wanted), steps).packs_per_step == used
