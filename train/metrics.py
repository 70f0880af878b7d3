"""The figures of a run: summed over packs and ranks, appended to metrics.jsonl, shown by trackers."""

import contextlib
import json
import math
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
from slipstream.train.config import TrainConfig
from slipstream.train.selection import Measured
from slipstream.train.trackers import Tracker, flatten, trackers
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
    """Sums the figures of a run and appends them to metrics.jsonl; rank 0 writes."""

    def __init__(self, folder: Path, config: TrainConfig, *, device: torch.device, state: TrainState) -> None:
        """Opens the log, forgetting lines written after the state a run resumes from."""
        self._latest: dict[str, float] = {}
        """Every figure as it was last written; of the first unroll step where there are several."""
        self._sums = StepSums(config.unroll.num_steps, device)
        self._waited = self._since = 0.0
        self._before = (state.step, state.train_tokens)
        self._folder, self._stream = folder, None
        self._trackers: list[Tracker] = []
        if distributed.rank() != 0:
            return
        path = folder / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        with reading(path, way_out="delete it"):
            kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= state.step]
        write_text(path, "".join(line + "\n" for line in kept))
        self._stream = path.open("a", encoding="utf-8", buffering=1)
        self._trackers = trackers(folder, config, state.step)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the block as time spent waiting for data; a step begins with it."""
        start = time.monotonic()
        self._since = self._since or start  # not since the report: it may have been followed by others
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
        now, known = time.monotonic(), {key: value for key, value in values.items() if value is not None}
        seconds = max(now - self._since, 1e-9)
        figures |= known | {
            "train_tokens": state.train_tokens,
            "tokens_per_second": round((state.train_tokens - self._before[1]) / seconds, 2),
            "steps_per_second": round((state.step - self._before[0]) / seconds, 4),
            "waiting_share": round(self._waited / seconds, 4),
        }
        self._waited = self._since = 0.0
        self._before = (state.step, state.train_tokens)
        self._write(state.step, figures)

    @property
    def note(self) -> str:
        """The latest figures for the progress line."""
        shown = (
            ("loss", "train/loss", ".3f"),
            ("accept", "train/accept_rate", ".3f"),
            ("tau", "selection/acceptance_length", ".3f"),
            ("lr", "lr", ".2g"),
            ("waiting", "waiting_share", ".0%"),
        )
        return "  ".join(
            f"{name} {self._latest[key]:{form}}" for name, key, form in shown if key in self._latest
        )

    def losses(self) -> dict[str, float]:
        """Losses of the first unroll step as they were last written."""
        names = {"loss": "train/loss", "validation loss": "validation/loss"}
        return {name: self._latest[key] for name, key in names.items() if key in self._latest}

    def validation(self, state: TrainState, sums: Tensor) -> None:
        """Writes validation figures; called on every rank."""
        sums = distributed.sum_over_ranks(sums)
        if sums[3].sum() > 0:
            figures = rates(sums, "validation")
            self._write(state.step, figures)
            say(f"validation   step {state.step}: accept rate {figures['validation/accept_rate']}")

    def selection(self, measured: Measured) -> None:
        """Writes what decoding with the head gave."""
        figures = {
            "selection/acceptance_length": round(measured.acceptance_length, 5),
            "selection/rounds": sum(measured.rounds),
            "selection/seconds": measured.seconds,
        }
        self._write(measured.step, figures)

    def _write(self, step: int, values: dict[str, Any]) -> None:
        self._latest |= {key: x[0] if isinstance(x, list) else x for key, x in values.items()}
        if self._stream is not None:
            self._stream.write(json.dumps({"step": step, **values}) + "\n")
        for tracker in self._trackers:
            tracker.log(step, flatten(values))

    def close(self) -> None:
        """Ends all logs."""
        if self._stream is not None:
            self._stream.close()
        for tracker in self._trackers:
            tracker.close()
