"""How long stages took, over all restarts: `seconds.json` in the folder above theirs."""

import json
import time
from pathlib import Path

from slipstream.data.files import MANIFEST, reading, write_json

SECONDS = "seconds.json"
OLD_SECONDS = 60
"""A temporary file of that age is of a killed process, not of one that writes now."""


def read_seconds(home: Path) -> dict[str, float]:
    """Seconds of every stage below `home`, by its folder."""
    path = home / SECONDS
    if not path.exists():
        return {}
    with reading(path, way_out="delete it"):
        return {str(key): float(value) for key, value in dict(json.loads(path.read_bytes())).items()}


def seconds_before(home: Path, stage: Path) -> float:
    """Seconds of runs of a stage that were stopped: each counts up to the last file it wrote."""
    manifest, log = stage / MANIFEST, home / SECONDS
    if not manifest.exists():
        return 0.0
    counted = read_seconds(home).get(str(stage.relative_to(home)), 0.0)
    since = max(file.stat().st_mtime for file in (manifest, log) if file.exists())
    until = max(file.stat().st_mtime for file in stage.rglob("*"))
    if until > since:
        counted += until - since
        write_seconds(home, stage, counted)
    return counted


def write_seconds(home: Path, stage: Path, seconds: float) -> None:
    """Notes the seconds of a stage."""
    for leftover in home.glob(".*.tmp"):
        if time.time() - leftover.stat().st_mtime > OLD_SECONDS:
            leftover.unlink()
    write_json(home / SECONDS, read_seconds(home) | {str(stage.relative_to(home)): seconds})
