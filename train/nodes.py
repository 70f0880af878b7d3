"""Nodes with disks of their own: every rank must read what rank 0 reads."""

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.data.files import file_hash, read_manifest, value_hash, write_text
from slipstream.train import engine as distributed


def node_name() -> str:
    """Host and, under torchrun, its number among the nodes."""
    return f"{socket.gethostname()} (node {os.environ.get('GROUP_RANK', '0')})"


def check_copies(settings: Callable[[], Mapping[str, Any]], folders: Sequence[Path]) -> dict[str, Any]:
    """Compares what every rank would train on; called on every rank.

    On several nodes the outputs of the stages in `folders` are hashed, the ranks of a node sharing the
    work. A node remembers in the folder which files it has checked.

    Args:
        settings: reads them, with the fingerprints of the stages before.
        folders: complete stages.

    Returns:
        The settings.

    Raises:
        ValueError: settings or a file are not rank 0's; on every rank, and names the node.
    """
    own: dict[str, Any] = {}
    problem = ""
    try:
        own = dict(settings())
    except ValueError as error:
        problem = str(error)
    wanted, nodes = distributed.from_rank_0(own), distributed.from_all_ranks(node_name())
    different = sorted(key for key in wanted.keys() | own.keys() if wanted.get(key) != own.get(key))
    if different and wanted and not problem:
        problem = f"{', '.join(different)} not as on rank 0: copy the run's folder from its node again"
    is_one = len(set(nodes)) == 1
    _raise_first(problem if is_one or not problem else f"{node_name()}: {problem}")
    if not is_one:
        mine = [rank for rank, node in enumerate(nodes) if node == node_name()]
        part = slice(mine.index(distributed.rank()), None, len(mine))
        damaged = next(filter(None, (_damaged(folder, part) for folder in folders)), "")
        _raise_first(damaged and f"{node_name()}: {damaged}")
        if part.start == 0:
            for folder in folders:
                write_text(_stamp(folder), _state(folder))
    return own


def _raise_first(problem: str) -> None:
    problems = distributed.from_all_ranks(problem)
    if any(problems):
        raise ValueError(next(filter(None, problems)))


def _damaged(folder: Path, part: slice) -> str:
    """Names an output, of this rank's part, that is not as it was written."""
    if _stamp(folder).exists() and _stamp(folder).read_text(encoding="utf-8") == _state(folder):
        return ""
    for name, entry in sorted(read_manifest(folder)["files"].items())[part]:
        path = folder / name
        if not path.is_file() or file_hash(path) != entry["sha256"]:
            return f"{path} is not the file that the manifest names: copy it from rank 0's node again"
    return ""


def _stamp(folder: Path) -> Path:
    return folder / f".verified-{socket.gethostname()}"


def _state(folder: Path) -> str:
    """Changes with the manifest and with any output's size or time."""
    files = read_manifest(folder)["files"]
    stats = [(folder / name).stat() for name in sorted(files)]
    return value_hash([files, [(stat.st_size, stat.st_mtime_ns) for stat in stats]])
