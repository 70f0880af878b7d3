"""One progress line for long work: share done, rate, time left. Rank 0 only."""

import os
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_SECONDS = 15.0
"""Interval of the plain lines written where there is no terminal."""


def is_main_process() -> bool:
    """Whether this process is rank 0 (or the only one)."""
    return int(os.environ.get("RANK", "0")) == 0


def say(text: str) -> None:
    """Prints a line to stderr on rank 0."""
    if is_main_process():
        print(text, file=sys.stderr, flush=True)


class Meter:
    """Counts units of work and shows them; use as a context manager."""

    def __init__(self, title: str, total: float, *, unit: str) -> None:
        self.title, self.total, self.unit = title, total, unit
        self._done = self._skipped = 0.0
        self._note = ""
        self._start = self._last_line = time.monotonic()
        self._console = Console(stderr=True)
        self._bar: Progress | None = None

    def __enter__(self) -> "Meter":
        if is_main_process() and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description:<12}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}% {task.fields[rate]}"),
                TimeElapsedColumn(),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=self._console,
            )
            self._task = self._bar.add_task(self.title, total=self.total, rate="", note="")
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif kind is None:
            self._line()

    def skip(self, amount: float) -> None:
        """Counts work done by an earlier run, which does not enter the rate."""
        self._skipped += amount
        self._show()

    def advance(self, amount: float, note: str = "") -> None:
        """Counts work done now; `note` is shown behind the rate."""
        self._done += amount
        self._note = note or self._note
        self._show()

    @property
    def rate(self) -> float:
        """Units per second of this run."""
        return self._done / max(time.monotonic() - self._start, 1e-9)

    def _show(self) -> None:
        if self._bar is not None:
            shown = f"{self.rate:,.1f} {self.unit}/s"
            done = self._done + self._skipped
            self._bar.update(self._task, completed=done, rate=shown, note=self._note)
        elif time.monotonic() - self._last_line >= LINE_SECONDS:
            self._line()

    def _line(self) -> None:
        self._last_line = time.monotonic()
        done = self._done + self._skipped
        left = f"{max(self.total - done, 0) / self.rate:,.0f} s" if self._done else "-"
        share = 100 * done / max(self.total, 1e-9)
        say(
            f"{self.title:<12} {share:3.0f} %  {done:,.0f}/{self.total:,.0f} {self.unit}  "
            f"{self.rate:,.1f} {self.unit}/s  ETA {left}  {self._note}".rstrip()
        )
