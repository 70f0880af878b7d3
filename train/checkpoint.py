"""Checkpoints: the state of training in one layout, the head by itself, and where the run stands.

`step-N/` holds `training.safetensors` (`slipstream.train.portable`), `head.safetensors` and, written
last, `train_state.json` with the SHA-256 of both: without it, or with other content, the checkpoint
does not count.
"""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from slipstream.data.files import atomic_path, check_disk, file_hash, reading, write_json
from slipstream.data.progress import say
from slipstream.train import engine as distributed
from slipstream.train.engine import Engine

STATE, HEAD, TRAINING = "train_state.json", "head.safetensors", "training.safetensors"

BYTES_PER_WEIGHT = 16
"""On disk: the float32 weight, two moments, and the head (half as much in bfloat16)."""


@dataclass(kw_only=True)
class TrainState:
    """Where a run stands; the plan of steps, the rate and every draw follow from `step`."""

    step: int = 0
    """Optimizer steps done."""
    skipped: int = 0
    """Planned steps that were left out, since a gradient was not finite."""
    train_tokens: int = 0
    """Supervised rows of step 0 seen, all ranks."""
    seconds: float = 0.0
    """Wall-clock spent in training, over all restarts."""

    @property
    def position(self) -> int:
        """Planned steps that are behind: where the data goes on."""
        return self.step + self.skipped


def save_checkpoint(folder: Path, engine: Engine, head: nn.Module, state: TrainState, keep: int) -> None:
    """Writes `folder/step-N`; called on every rank, rank 0 writes.

    Args:
        folder: of all checkpoints of the run.
        engine: its state is gathered.
        head: what is exported.
        state: where the run stands.
        keep: older complete checkpoints beyond this number are removed.

    Raises:
        OSError: it cannot be written; the checkpoints before it are as they were. On every rank.
    """
    training = engine.save()
    target, reason = folder / f"step-{state.step:07d}", None
    if distributed.rank() == 0:
        try:
            _write(target, {TRAINING: training, HEAD: head.state_dict()}, state)
        except (OSError, SafetensorError) as error:  # a full disk is either
            reason = str(error).partition("\n")[0]
            shutil.rmtree(target, ignore_errors=True)
        else:
            kept = _complete(folder)[-keep:]
            for old in set(folder.glob("step-*")).difference(kept):  # also what a kill left of one
                (old / STATE).unlink(missing_ok=True)
                shutil.rmtree(old)
    reason = distributed.from_rank_0(reason)
    if reason is not None:
        raise OSError(
            f"{target} cannot be written ({reason}): free some space; a new start goes on from the "
            f"checkpoint before"
        )


def _write(target: Path, files: dict[str, dict[str, Tensor]], state: TrainState) -> None:
    (target / STATE).unlink(missing_ok=True)  # of a damaged one that is made anew
    for name, tensors in files.items():
        with atomic_path(target / name) as temporary:
            save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, temporary)
    hashes = {name: file_hash(target / name) for name in files}
    write_json(target / STATE, {"state": asdict(state), "sha256": hashes})


def _complete(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob(f"step-*/{STATE}"))


def has_checkpoint(folder: Path) -> bool:
    """Whether a checkpoint was ever completed in `folder`."""
    return bool(_complete(folder))


def latest_checkpoint(folder: Path) -> tuple[Path, TrainState] | None:
    """The newest checkpoint whose files are as they were written; None where none was completed.

    Raises:
        ValueError: all are damaged.
    """
    reasons = []
    for checkpoint in reversed(_complete(folder)):
        try:
            return checkpoint, _read_state(checkpoint)
        except ValueError as error:
            reasons.append(str(error))
            say(f"warning: {error}")
    if reasons:
        raise ValueError(f"{reasons[0]}; no earlier checkpoint is whole: delete {folder} to train again")
    return None


def resume_point(folder: Path) -> tuple[Path | None, TrainState]:
    """The newest whole checkpoint on rank 0's disk and where it stands, on every rank; else the beginning."""
    newest = latest_checkpoint(folder) if distributed.rank() == 0 else None
    return distributed.from_rank_0(newest or (None, TrainState()))


def _read_state(checkpoint: Path) -> TrainState:
    with reading(checkpoint / STATE, way_out="the checkpoint is left out"):
        content: dict[str, Any] = json.loads((checkpoint / STATE).read_bytes())
        state, hashes = TrainState(**content["state"]), dict(content["sha256"])
    for name, expected in hashes.items():
        path = checkpoint / name
        if not path.is_file() or file_hash(path) != expected:
            raise ValueError(f"{path} is damaged: the checkpoint is left out")
    return state


def check_space(folder: Path, num_weights: int, keep: int) -> None:
    """Raises ValueError where the disk cannot hold `keep` checkpoints and the one being written."""
    held = sum(file.stat().st_size for file in folder.glob("step-*/*"))
    needed = (keep + 1) * num_weights * BYTES_PER_WEIGHT
    check_disk(folder, needed - held, what=f"training with train.keep_checkpoints={keep}")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors in one of a checkpoint's files."""
    with reading(path, way_out=f"delete {path.parent} and train again from the checkpoint before"):
        tensors: dict[str, Tensor] = load_file(path)
    return tensors


def read_head(path: Path) -> dict[str, Tensor]:
    """The head's tensors in a checkpoint's file."""
    return read_tensors(path)
