"""Which checkpoint a run goes on from, and with how many ranks and packs."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slipstream.train import trainer
from slipstream.train.checkpoint import HEAD, STATE, TrainState, latest_checkpoint, read_head
from slipstream.train.config import DeepSpeedConfig, TrainConfig


def write(folder: Path, step: int) -> Path:
    checkpoint = folder / f"step-{step:07d}"
    checkpoint.mkdir()
    save_file({"fc.weight": torch.ones(4)}, checkpoint / HEAD)
    files = {HEAD: (checkpoint / HEAD).stat().st_size}
    (checkpoint / STATE).write_text(json.dumps({"state": {"step": step, "num_ranks": 2}, "files": files}))
    return checkpoint


def damage(checkpoint: Path, how: str) -> None:
    if how == "truncated":
        (checkpoint / HEAD).write_bytes((checkpoint / HEAD).read_bytes()[:-1])
    elif how == "missing":
        (checkpoint / HEAD).unlink()
    else:
        (checkpoint / STATE).write_text(how)


@pytest.mark.parametrize("how", ["truncated", "missing", "{}", "[]", "null", "{"])
def test_a_damaged_checkpoint_is_left_out(how: str, tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    first, second = write(tmp_path, 10), write(tmp_path, 20)
    assert latest_checkpoint(tmp_path) == (second, TrainState(step=20, num_ranks=2))
    damage(second, how)
    assert latest_checkpoint(tmp_path) == (first, TrainState(step=10, num_ranks=2))
    damage(first, how)
    with pytest.raises(ValueError, match=f"delete {tmp_path} to train again"):
        latest_checkpoint(tmp_path)


def test_a_damaged_head_is_named(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, 10)
    assert read_head(checkpoint / HEAD).keys() == {"fc.weight"}
    (checkpoint / HEAD).write_bytes(bytes(100))
    with pytest.raises(ValueError, match=f"{HEAD} cannot be read.*delete {checkpoint}"):
        read_head(checkpoint / HEAD)


def test_ranks_are_fixed_where_they_share_the_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer.distributed, "world_size", lambda: 1)
    sharded = TrainConfig(deepspeed=DeepSpeedConfig(zero_stage=2))
    trainer.check_ranks(tmp_path, sharded, TrainState())
    trainer.check_ranks(tmp_path, TrainConfig(), TrainState(step=3, num_ranks=2))
    with pytest.raises(ValueError, match="trained on 2 ranks, 1 now.*--nproc_per_node=2, or delete"):
        trainer.check_ranks(tmp_path, sharded, TrainState(step=3, num_ranks=2))


@pytest.mark.parametrize(("wanted", "ranks", "used"), [(1000, 1, 3), (1000, 2, 4), (2, 2, 2), (3, 2, 3)])
def test_no_step_has_more_packs_than_an_epoch(
    wanted: int, ranks: int, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer.distributed, "world_size", lambda: ranks)
    steps = [(0, [["a"], ["b"], ["c"]]), (1, [["a", "b"], ["c"]])]
    assert trainer.without_empty_packs(TrainConfig(packs_per_step=wanted), steps).packs_per_step == used
