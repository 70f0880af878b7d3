"""Runs the project's commands as a user does, in their own processes."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment(cache: Path) -> dict[str, str]:
    """Environment of a command; `cache` holds the toy target."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "SLIPSTREAM_CACHE": str(cache), "COLUMNS": "120"}


def run(words: Sequence[str], cache: Path, *, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Runs `python words...` from the repository root to its end."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment(cache),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def start(words: Sequence[str], cache: Path) -> "subprocess.Popen[bytes]":
    """Starts `python words...` in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment(cache),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def hashes(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """SHA-256 of files below a run folder."""
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
