"""Where curves can be followed besides metrics.jsonl: Weights & Biases, TensorBoard. Rank 0 only."""

import os
import socket
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from slipstream.data.files import write_text
from slipstream.data.progress import say
from slipstream.train.config import TrainConfig, WandbConfig, WandbMode

WANDB_ID = "wandb_id"
"""File with the name under which a run goes on after a restart."""


class Tracker(Protocol):
    """Takes the figures of a step."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Shows them."""

    def close(self) -> None:
        """Ends the log."""


def trackers(folder: Path, config: TrainConfig, step: int) -> list[Tracker]:
    """Those that the recipe asks for; curves go on behind `step`."""
    found: list[Tracker] = []
    if config.wandb.mode is not WandbMode.disabled:
        found.append(Wandb(folder, config.wandb))
    if config.tensorboard:
        found.append(TensorBoard(folder, step))
    return found


def flatten(values: Mapping[str, Any]) -> dict[str, float]:
    """Lists, which hold a figure for each unroll step, as figures of their own.

    >>> flatten({"lr": 0.1, "train/loss": [2.0, 3.0]})
    {'lr': 0.1, 'train/loss/0': 2.0, 'train/loss/1': 3.0}
    """
    flat: dict[str, float] = {}
    for key, value in values.items():
        flat |= {f"{key}/{k}": x for k, x in enumerate(value)} if isinstance(value, list) else {key: value}
    return flat


class TensorBoard:
    """Event files in `folder/tensorboard`."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """See `Tracker`."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """See `Tracker`."""
        self._writer.close()


class Wandb:
    """A run of Weights & Biases, the same one after a restart."""

    def __init__(self, folder: Path, config: WandbConfig) -> None:
        import wandb

        mode = config.mode
        if mode is WandbMode.auto:
            mode = WandbMode(os.environ.get("WANDB_MODE", "online" if _can_log_in() else "offline"))
        if not (folder / WANDB_ID).exists():
            write_text(folder / WANDB_ID, uuid.uuid4().hex[:8])
        self._folder, self._is_offline = folder, mode is WandbMode.offline
        self._run = wandb.init(
            project=config.project,
            name=folder.parent.name,
            id=(folder / WANDB_ID).read_text(encoding="utf-8"),
            dir=str(folder),
            mode=mode.value,  # type: ignore[arg-type]
            resume=None if self._is_offline else "allow",
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """See `Tracker`."""
        self._run.finish()
        if self._is_offline:
            say(f"wandb        offline; later: wandb sync {self._folder / 'wandb'}/offline-run-*")


def _can_log_in() -> bool:
    netrc = Path.home() / ".netrc"
    known = "WANDB_API_KEY" in os.environ or (netrc.exists() and "wandb" in netrc.read_text())
    if not known:
        return False
    try:
        socket.create_connection(("api.wandb.ai", 443), timeout=3).close()
    except OSError:
        return False
    return True
