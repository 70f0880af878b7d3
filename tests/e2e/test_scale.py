"""Six times the rows: hardly more memory, and as fast."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.commands import ROOT, environment

pytestmark = pytest.mark.slow

FEW, MANY = 500, 3000
KILOBYTES_PER_ROW = 10.0
"""100,000 rows then take less than 2 GB with what the libraries need."""


def measured(num_rows: int, folder: Path) -> dict[str, float]:
    """What `tests.scale` prints."""
    folder.mkdir()
    words = [sys.executable, "-m", "tests.scale", str(num_rows), str(folder), "1"]
    done = subprocess.run(
        words, cwd=ROOT, env=environment(folder), capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def test_memory_and_rate_do_not_depend_on_the_number_of_rows(tmp_path: Path) -> None:
    few, many = (measured(num, tmp_path / str(num)) for num in (FEW, MANY))
    assert (many["megabytes"] - few["megabytes"]) * 1024 / (MANY - FEW) < KILOBYTES_PER_ROW
    assert many["rows_per_cpu_second"] > 0.8 * few["rows_per_cpu_second"]
