"""Checkpoints: the DeepSpeed state, the head by itself, and where the run stands."""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from slipstream.data.files import atomic_path, read_json, write_json
from slipstream.train import engine as distributed
from slipstream.train.engine import Engine

STATE, HEAD = "train_state.json", "head.safetensors"


@dataclass(kw_only=True)
class TrainState:
    """Where a run stands; the plan of steps, the rate and every draw follow from `step`."""

    step: int = 0
    """Optimizer steps done."""
    train_tokens: int = 0
    """Supervised rows of step 0 seen, all ranks."""
    seconds: float = 0.0
    """Wall-clock spent in training, over all restarts."""


def save_checkpoint(
    folder: Path, engine: Engine, head: nn.Module, state: TrainState, settings: dict[str, Any], keep: int
) -> None:
    """Writes `folder/step-N`; `train_state.json` comes last and makes it complete.

    Args:
        folder: of all checkpoints of the run.
        engine: its states are written by every rank.
        head: written by rank 0.
        state: written by rank 0.
        settings: what the run was started with, for people who look; the stage's manifest is what is checked.
        keep: older complete checkpoints beyond this number are removed.
    """
    target = folder / f"step-{state.step:07d}"
    engine.save(folder, target.name)
    distributed.barrier()
    if distributed.rank() == 0:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
        with atomic_path(target / HEAD) as temporary:
            save_file(tensors, temporary)
        write_json(target / STATE, {"state": asdict(state), "settings": settings})
        for old in _complete(folder)[:-keep]:
            (old / STATE).unlink()
            shutil.rmtree(old)
    distributed.barrier()


def _complete(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob(f"step-*/{STATE}"))


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint."""
    complete = _complete(folder)
    return complete[-1] if complete else None


def read_state(checkpoint: Path) -> TrainState:
    """Where the run stood at a checkpoint."""
    return TrainState(**read_json(checkpoint / STATE)["state"])


def read_head(checkpoint: Path) -> dict[str, Tensor]:
    """The head's tensors at a checkpoint."""
    tensors: dict[str, Tensor] = load_file(checkpoint / HEAD)
    return tensors
