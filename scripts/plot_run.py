"""The curves of a training run on one page: `scripts/plot_run.py runs/NAME`."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean as mean
from typing import Any

from slipstream.data.files import read_json, reading, write_text
from slipstream.eval.charts import document, lines
from slipstream.scripts.cli import BAD, fail
from slipstream.train.trackers import flatten

METRICS, SELECTION, PAGE = "train/metrics.jsonl", "train/selection.json", "training.html"
MAX_POINTS = 300
"""Of a line; a longer one is drawn as the means of neighbours."""

CHARTS: dict[str, tuple[str, str, str]] = {
    "Loss": ("train/loss/", "validation/loss/0", "loss"),
    "Accept rate": ("train/accept_rate/", "validation/accept_rate/0", "share of rows"),
    "Acceptance length": ("selection/acceptance_length", "", "tau"),
    "Learning rate": ("lr", "", "rate"),
    "Gradient norm": ("grad_norm", "", "before clipping"),
    "Throughput": ("tokens_per_second", "", "supervised tokens a second"),
    "Waiting": ("waiting_share", "", "share of the time"),
}
"""Heading -> the figures of a chart (one with a slash at its end is one for each unroll step), another
figure to draw beside them, the name of the axis."""


def training_page(folder: Path) -> str:
    """The page of a run.

    Raises:
        ValueError: nothing was written yet.
    """
    path = folder / METRICS
    if not (path.is_file() and path.stat().st_size):
        raise ValueError(f"{path} holds no figures: name the run_dir of a run that trains or has trained")
    with reading(path, way_out="it is not the log of a training run"):
        written = path.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in written if line.endswith("}")]  # the last may be half written
    series = read_series(rows)
    sections = {}
    for heading, (figures, beside, axis) in CHARTS.items():
        drawn = {_label(name): line for name, line in series.items() if name.startswith(figures)}
        drawn |= {"validation": series[beside]} if beside in series else {}
        if drawn:
            sections[heading] = lines(drawn, x="optimizer step", y=axis, start=float(axis == "tau"))
    last = max(line[-1][0] for line in series.values())
    return document(f"Training of {folder.name}", f"{last:,.0f} optimizer steps. {_best(folder)}", sections)


def read_series(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """The figures of metrics.jsonl as lines of (step, value)."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for name, value in flatten(row).items():
            series.setdefault(name, []).append((row["step"], value))
    del series["step"]
    return {name: _thin(line) for name, line in series.items()}


def _thin(line: list[tuple[float, float]]) -> list[tuple[float, float]]:
    size = -(-len(line) // MAX_POINTS)
    groups = [line[i : i + size] for i in range(0, len(line), size)]
    return [(mean(x for x, _ in group), mean(y for _, y in group)) for group in groups]


def _label(name: str) -> str:
    """What a line of a chart is called.

    >>> _label("train/loss/3"), _label("lr")
    ('step 3 of the unroll', 'lr')
    """
    step = name.rpartition("/")[2]
    return f"step {step} of the unroll" if step.isdigit() else step.replace("_", " ")


def _best(folder: Path) -> str:
    path = folder / SELECTION
    if not path.is_file():
        return "No head was decoded with while it was trained (train.selection.every)."
    measured = read_json(path)
    taus = {row["step"]: 1 + sum(row["accepted"]) / max(sum(row["rounds"]), 1) for row in measured}
    best = max(taus, key=taus.__getitem__)
    return f"The longest acceptance length is {taus[best]:.3f}, after step {best:,}."


def main() -> None:
    """The command."""
    try:
        if len(sys.argv) != 2:
            raise ValueError("name the folder of a run: scripts/plot_run.py runs/NAME")
        folder = Path(sys.argv[1])
        write_text(folder / PAGE, training_page(folder))
        print(folder / PAGE)
    except BAD as error:
        fail(error)


if __name__ == "__main__":
    main()
