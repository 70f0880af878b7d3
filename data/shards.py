"""A stage shared by several processes or nodes: each fills a part, the last one joins them."""

import fcntl
import hashlib
import os
import shutil
from pathlib import Path

from slipstream.data.files import Stage, atomic_path, is_complete, read_manifest
from slipstream.data.progress import say


def shard_of(setting: str) -> tuple[int, int] | None:
    """Number of this process and of all, from I/N or `rank`; None when there is one process.

    >>> shard_of("1/4"), shard_of("0/1"), shard_of("")
    ((1, 4), None, None)
    """
    if setting == "rank":
        setting = f"{os.environ.get('RANK', '0')}/{os.environ.get('WORLD_SIZE', '1')}"
    index, _, number = setting.partition("/")
    return (int(index), int(number)) if number not in ("", "1") else None


def in_shard(row_id: str, index: int, number: int) -> bool:
    """Whether a row belongs to part `index` of `number`: by hash, whatever else is there."""
    return int(hashlib.sha256(row_id.encode()).hexdigest()[:12], 16) % number == index


def part_folder(folder: Path, index: int, number: int) -> Path:
    """Where a part lies."""
    return folder / "parts" / f"{index:04d}-of-{number:04d}"


def merge(stage: Stage, number: int, file: str) -> None:
    """Joins the parts into `file` and completes the stage, once all parts are complete."""
    parts = [part_folder(stage.folder, index, number) for index in range(number)]
    missing = [part.name for part in parts if not is_complete(part)]
    if missing:
        say(f"{stage.name}: {len(missing)} of {number} parts are not complete yet, first {missing[0]}")
        return
    descriptor = os.open(stage.folder / "parts", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # two processes may end at the same time: the second waits
    try:
        if stage.is_complete:
            return
        stage.begin()
        with atomic_path(stage.folder / file) as temporary, temporary.open("wb") as whole:
            for part in parts:
                with (part / file).open("rb") as rows:
                    shutil.copyfileobj(rows, whole)
        facts = [read_manifest(part)["facts"] for part in parts]
        stage.complete([file], **_sum(facts), parts=number)
    finally:
        os.close(descriptor)


def _sum(facts: list[dict[str, object]]) -> dict[str, object]:
    """Counts of all parts, those of reasons too; of other facts the first."""
    total: dict[str, object] = {}
    for key, first in facts[0].items():
        values = [fact[key] for fact in facts]
        if isinstance(first, dict):
            names = sorted({name for value in values if isinstance(value, dict) for name in value})
            total[key] = {
                name: sum(value.get(name, 0) for value in values if isinstance(value, dict)) for name in names
            }
        else:
            total[key] = sum(v for v in values if isinstance(v, int | float)) if _is_number(first) else first
    return total


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)
