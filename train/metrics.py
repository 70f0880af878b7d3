"""Where training curves go: metrics.jsonl always, Weights & Biases if asked. Rank 0 only."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.train.config import WandbConfig, WandbMode
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


class Log:
    """Appends to metrics.jsonl and mirrors to Weights & Biases."""

    def __init__(self, folder: Path, config: WandbConfig, *, name: str, step: int) -> None:
        """Opens the log, forgetting lines written after the step a run resumes from."""
        self._path = folder / "metrics.jsonl"
        kept = []
        if self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                if line.endswith("}") and json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
        self._path.write_text("".join(kept), encoding="utf-8")
        self._stream = self._path.open("a", encoding="utf-8", buffering=1)
        self._run = _start_wandb(folder, config, name) if config.mode is not WandbMode.disabled else None

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Writes one line."""
        self._stream.write(json.dumps({"step": step, **values}) + "\n")
        if self._run is not None:
            flat: dict[str, float] = {}
            for key, value in values.items():
                if isinstance(value, list):
                    flat |= {f"{key}/step{k}": x for k, x in enumerate(value)}
                else:
                    flat[key] = value
            self._run.log(flat, step=step)

    def close(self) -> None:
        """Ends both logs."""
        self._stream.close()
        if self._run is not None:
            self._run.finish()


def _start_wandb(folder: Path, config: WandbConfig, name: str) -> Any:
    import wandb

    mode = config.mode
    if mode is WandbMode.auto:
        mode = WandbMode(os.environ.get("WANDB_MODE", "online" if _can_log_in() else "offline"))
    return wandb.init(
        project=config.project,
        name=name,
        dir=str(folder),
        mode=mode.value,
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
