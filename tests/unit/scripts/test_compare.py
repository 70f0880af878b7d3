"""Measurements side by side: every drafter of every run, tau by category, and what is not there."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from slipstream.scripts.compare import compare


def measurement(tau: float) -> dict[str, object]:
    return {
        "acceptance_length": tau,
        "acceptance_rate": 0.5,
        "tokens_per_second": 20.0,
        "speedup": 1.25,
        "lossless": True,
        "acceptance_length_by_category": {"code": tau + 0.5},
    }


def test_runs_stand_side_by_side(tmp_path: Path) -> None:
    for name, tau in (("a", 1.5), ("b", 2.125)):
        folder = tmp_path / name / "evaluation" / "0"
        folder.mkdir(parents=True)
        (folder / "acceptance.json").write_text(json.dumps({"drafters": {"head": measurement(tau)}}))
    console = Console(width=300, record=True)
    compare([tmp_path / "a", tmp_path / "b"], console)
    text = console.export_text()
    assert all(figure in text for figure in ("1.500", "2.125", "2.000", "2.625", "1.25x"))


def test_a_folder_without_a_measurement_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no acceptance.json: run scripts/evaluate.py first"):
        compare([tmp_path], Console())
