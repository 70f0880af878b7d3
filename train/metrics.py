"""Where training curves go: metrics.jsonl always, Weights & Biases if asked. Rank 0 only."""

import contextlib
import json
import math
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.data.files import reading, write_text
from slipstream.data.progress import say
from slipstream.train import engine as distributed
from slipstream.train.checkpoint import TrainState
from slipstream.train.config import TrainConfig, WandbConfig, WandbMode
from slipstream.train.ttt import UnrollOutput


class StepSums:
    """Sums of unroll outputs since the last report, kept on the device."""

    def __init__(self, num_steps: int, device: torch.device) -> None:
        self._sums = torch.zeros(4, num_steps, device=device)

    def add(self, output: UnrollOutput) -> None:
        """Counts one pack."""
        self._sums += torch.stack(
            (output.loss_sum_K, output.num_loss_rows_K, output.correct_K, output.num_rows_K)
        )

    def take(self) -> Tensor:
        """Returns [4, K] (loss, loss rows, correct, rows) and starts again from zero."""
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        return sums


def rates(sums: Tensor, prefix: str) -> dict[str, Any]:
    """Readable figures of all-reduced sums: loss and accept rate of every unroll step."""
    loss, loss_rows, correct, rows = sums.cpu()
    return {
        f"{prefix}/loss": [round(x, 5) for x in (loss / loss_rows.clamp_min(1)).tolist()],
        f"{prefix}/accept_rate": [round(x, 5) for x in (correct / rows.clamp_min(1)).tolist()],
    }


class Reporter:
    """Sums the figures of a run and appends them to metrics.jsonl; mirrors to Weights & Biases."""

    def __init__(self, folder: Path, config: TrainConfig, *, device: torch.device, step: int) -> None:
        """Opens the log, forgetting lines written after the step a run resumes from."""
        self.note = ""
        """Latest figures for the progress line."""
        self._sums = StepSums(config.unroll.num_steps, device)
        self._waited, self._since = 0.0, time.monotonic()
        self._folder, self._stream, self._wandb = folder, None, None
        if distributed.rank() != 0:
            return
        path = folder / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        with reading(path, way_out="delete it"):
            kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
        write_text(path, "".join(line + "\n" for line in kept))
        self._stream = path.open("a", encoding="utf-8", buffering=1)
        if config.wandb.mode is not WandbMode.disabled:
            self._wandb = _start_wandb(folder, config.wandb)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the block as time spent waiting for data."""
        start = time.monotonic()
        yield
        self._waited += time.monotonic() - start

    def add(self, *outputs: UnrollOutput) -> None:
        """Counts the packs of a step."""
        for output in outputs:
            self._sums.add(output)

    def report(self, state: TrainState, **values: float | None) -> None:
        """Writes what was added since the last report; called on every rank.

        Raises:
            ValueError: the loss is not finite.
        """
        figures = rates(distributed.sum_over_ranks(self._sums.take()), "train")
        if not all(map(math.isfinite, figures["train/loss"])):
            raise ValueError(
                f"the loss is not finite at step {state.step}: lower train.learning_rate and delete "
                f"{self._folder}, or set run_dir to another folder"
            )
        now = time.monotonic()
        waiting = round(self._waited / max(now - self._since, 1e-9), 4)
        self._waited, self._since = 0.0, now
        self.note = f"loss {figures['train/loss'][0]:.3f} accept {figures['train/accept_rate'][0]:.3f}"
        known = {key: value for key, value in values.items() if value is not None}
        self._write(
            state.step, figures | known | {"train_tokens": state.train_tokens, "waiting_share": waiting}
        )

    def validation(self, state: TrainState, sums: Tensor) -> None:
        """Writes validation figures; called on every rank."""
        sums = distributed.sum_over_ranks(sums)
        if sums[3].sum() > 0:
            figures = rates(sums, "validation")
            self._write(state.step, figures)
            say(f"validation   step {state.step}: accept rate {figures['validation/accept_rate']}")

    def _write(self, step: int, values: dict[str, Any]) -> None:
        if self._stream is not None:
            self._stream.write(json.dumps({"step": step, **values}) + "\n")
        if self._wandb is not None:
            flat: dict[str, float] = {}
            for key, value in values.items():
                flat |= (
                    {f"{key}/{k}": x for k, x in enumerate(value)}
                    if isinstance(value, list)
                    else {key: value}
                )
            self._wandb.log(flat, step=step)

    def close(self) -> None:
        """Ends both logs."""
        if self._stream is not None:
            self._stream.close()
        if self._wandb is not None:
            self._wandb.finish()


def _start_wandb(folder: Path, config: WandbConfig) -> Any:
    import wandb

    mode = config.mode
    if mode is WandbMode.auto:
        mode = WandbMode(os.environ.get("WANDB_MODE", "online" if _can_log_in() else "offline"))
    return wandb.init(
        project=config.project,
        name=folder.parent.name,
        dir=str(folder),
        mode=mode.value,  # type: ignore[arg-type]
        resume="allow",
        settings=wandb.Settings(silent=True, console="off"),
    )


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
