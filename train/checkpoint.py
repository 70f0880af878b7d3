"""Checkpoints: the DeepSpeed state, the head by itself, and where the run stands."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from slipstream.data.files import atomic_path, check_disk, reading, write_json
from slipstream.data.progress import say
from slipstream.train import engine as distributed
from slipstream.train.engine import Engine

STATE, HEAD = "train_state.json", "head.safetensors"

BYTES_PER_WEIGHT = 16
"""On disk, float32: state, two moments, head; bfloat16: the same with a float32 master copy."""


@dataclass(kw_only=True)
class TrainState:
    """Where a run stands; the plan of steps, the rate and every draw follow from `step`."""

    step: int = 0
    """Optimizer steps done."""
    num_ranks: int = 0
    """Processes of the last run; ZeRO-1 and 2 share the optimizer's state among them."""
    train_tokens: int = 0
    """Supervised rows of step 0 seen, all ranks."""
    seconds: float = 0.0
    """Wall-clock spent in training, over all restarts."""


def save_checkpoint(folder: Path, engine: Engine, head: nn.Module, state: TrainState, keep: int) -> None:
    """Writes `folder/step-N`; `train_state.json` comes last and makes it complete.

    Args:
        folder: of all checkpoints of the run.
        engine: its states are written by every rank.
        head: written by rank 0.
        state: written by rank 0.
        keep: older complete checkpoints beyond this number are removed.

    Raises:
        OSError: it cannot be written.
    """
    target = folder / f"step-{state.step:07d}"
    (target / STATE).unlink(missing_ok=True)  # of a damaged one that is made anew
    try:
        engine.save(folder, target.name)
        if distributed.rank() == 0:
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
            with atomic_path(target / HEAD) as temporary:
                save_file(tensors, temporary)
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk is any of these
        reason = str(error).partition("\n")[0]
        raise OSError(
            f"{target} cannot be written ({reason}): free some space; a new start goes on from the "
            f"checkpoint before"
        ) from error
    distributed.barrier()
    if distributed.rank() == 0:
        files = {file.name: file.stat().st_size for file in sorted(target.iterdir())}
        write_json(target / STATE, {"state": asdict(state), "files": files})
        for old in _complete(folder)[:-keep]:
            (old / STATE).unlink()
            shutil.rmtree(old)
    distributed.barrier()


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


def _read_state(checkpoint: Path) -> TrainState:
    with reading(checkpoint / STATE, way_out="the checkpoint is left out"):
        content = json.loads((checkpoint / STATE).read_bytes())
        state, files = TrainState(**content["state"]), dict(content["files"])
        damaged = [
            name
            for name, num_bytes in files.items()
            if not (checkpoint / name).is_file() or (checkpoint / name).stat().st_size != num_bytes
        ]
    if damaged:
        raise ValueError(f"{checkpoint / damaged[0]} is damaged: the checkpoint is left out")
    return state


def check_space(folder: Path, num_weights: int, keep: int) -> None:
    """Raises ValueError where the disk cannot hold `keep` checkpoints and the one being written."""
    held = sum(file.stat().st_size for file in folder.glob("step-*/*"))
    needed = (keep + 1) * num_weights * BYTES_PER_WEIGHT
    check_disk(folder, needed - held, what=f"training with train.keep_checkpoints={keep}")


def read_head(path: Path) -> dict[str, Tensor]:
    """The head's tensors in a checkpoint's file."""
    with reading(path, way_out=f"delete {path.parent} and train again from the checkpoint before"):
        tensors: dict[str, Tensor] = load_file(path)
    return tensors
