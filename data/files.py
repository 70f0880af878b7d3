"""Atomic writes, logs and stage manifests: how a stage resumes and refuses what it did not make.

A stage owns one folder. Its `manifest.json` holds the settings it was made with and, once
complete, the hash of every output. A stage that depends on another puts the other's fingerprint
into its own settings, so a change anywhere is found by name at the next stage.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError

MANIFEST = "manifest.json"

_locks: dict[Path, int] = {}
"""Descriptors of the stage folders that this process writes."""


def make_folder(folder: Path) -> None:
    """Makes a folder where it is missing; ValueError when it cannot be made or written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(folder, os.W_OK | os.X_OK) else "Permission denied"
    except OSError as error:
        reason = str(error.strerror)
    if reason:
        raise ValueError(
            f"{folder} cannot be written ({reason}): move away what is there, or set run_dir to another "
            f"folder"
        )


@contextlib.contextmanager
def reading(path: Path, *, line: int = 0, way_out: str = "") -> Iterator[None]:
    """Errors in the block mean that `path` is damaged: a ValueError names it and the way out.

    Without a `way_out` the file is the output of a stage, which can make it again.
    """
    try:
        yield
    except (OSError, ValueError, TypeError, LookupError, RecursionError, SafetensorError) as error:
        where, reason = f"{path}:{line}" if line else path, str(error).partition("\n")[0]
        raise ValueError(
            f"{where} cannot be read ({type(error).__name__}: {reason}): "
            f"{way_out or f'delete {path.parent} to make it again'}"
        ) from None


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path` that replaces it when the block ends well."""
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a small text file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Writes indented JSON atomically, keys in the given order."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Reads JSON; a missing or broken file is a ValueError that names it."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from None


def append_jsonl(path: Path, rows: Iterable[Any]) -> None:
    """Appends one line for each row; they are on the disk when this returns."""
    lines = [json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows]
    with path.open("ab") as log:
        log.write(b"".join(lines))
        log.flush()
        os.fsync(log.fileno())


def read_jsonl(path: Path, parse: Callable[[Any], Any] = dict) -> list[Any]:
    """Rows of a stage's JSONL file, each as `parse` returns it.

    The last line is cut off the file where a kill left it incomplete.

    Raises:
        ValueError: a line is no JSON, or `parse` does not take it.
    """
    with reading(path):
        content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    return [_parsed_line(path, number, line, parse) for number, line in enumerate(whole.splitlines(), 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Where a row of a JSONL file stands."""

    number: int
    """Counts from 1."""
    start: int
    """Offset in bytes."""


def index_jsonl(path: Path, parse: Callable[[Any], Any]) -> Iterator[tuple[Any, Line]]:
    """What `parse` makes of each row of a complete JSONL file, and where the row stands.

    With `read_lines` this reads a file of any size in any order.

    Raises:
        ValueError: as `read_jsonl`.
    """
    start = 0
    with reading(path):
        stream = path.open("rb")
    with stream:
        for number, line in enumerate(stream, 1):
            yield _parsed_line(path, number, line, parse), Line(number=number, start=start)
            start += len(line)


def read_lines(path: Path, lines: Iterable[Line], parse: Callable[[Any], Any] = dict) -> Iterator[Any]:
    """The rows that stand at `lines`, in their order; raises as `read_jsonl`."""
    with reading(path):
        stream = path.open("rb")
    with stream:
        for line in lines:
            stream.seek(line.start)
            yield _parsed_line(path, line.number, stream.readline(), parse)


def _parsed_line(path: Path, number: int, line: bytes, parse: Callable[[Any], Any]) -> Any:
    with reading(path, line=number):
        return parse(json.loads(line))


@contextlib.contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside the folder of `path`, for an output that may yet be refused.

    The block moves it to `path` when nothing can go wrong any more.
    """
    temporary = path.parent.with_name(f".{path.parent.name}.{os.getpid()}.tmp")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def scratch_file(folder: Path) -> IO[bytes]:
    """A file without a name on the disk of `folder`, which need not exist."""
    existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    return tempfile.TemporaryFile(dir=existing)


def text(value: Any) -> str:
    """The value itself; TypeError or UnicodeEncodeError unless it is text that can be written."""
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} where text belongs")
    value.encode()
    return value


def file_hash(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def value_hash(value: Any) -> str:
    """SHA-256 of a JSON-able value with sorted keys, first 16 hexadecimal digits."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_disk(folder: Path, needed_bytes: float, *, what: str) -> None:
    """Raises ValueError when the disk under `folder` cannot hold `needed_bytes` more."""
    existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    stats = os.statvfs(existing)
    free = stats.f_bavail * stats.f_frsize
    if needed_bytes > free:
        raise ValueError(
            f"{what} needs {needed_bytes / 1e9:.2f} GB under {folder} and {free / 1e9:.2f} GB are "
            f"free: free some space or set run_dir to another disk"
        )


class Stage:
    """The folder of one pipeline stage: check its inputs, `begin`, write the outputs, `complete`."""

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        """Looks at the folder and writes nothing.

        Args:
            folder: the stage's own folder; it need not exist yet.
            name: as shown to the user.
            settings: JSON-able; everything the outputs depend on.

        Raises:
            ValueError: the folder was made with other settings; names each differing field.
        """
        self.folder, self.name = folder, name
        self.settings = json.loads(json.dumps(dict(settings), default=str))
        self._manifest = folder / MANIFEST
        self._refuse_other()

    def _refuse_other(self) -> None:
        if not self._manifest.exists():
            return
        found, wanted = _leaves(read_manifest(self.folder)["settings"]), _leaves(self.settings)
        keys = sorted(found.keys() | wanted.keys())
        shown = "; ".join(
            f"{key}: {found.get(key)!r} there, {wanted.get(key)!r} now"
            for key in keys
            if found.get(key) != wanted.get(key)
        )
        if shown:
            raise ValueError(
                f"{self.folder} was made with other settings ({shown}): "
                f"set run_dir to another folder, or delete {self.folder} to make it again"
            )

    @property
    def is_complete(self) -> bool:
        """Whether every output is there, as it was written."""
        return is_complete(self.folder)

    def begin(self) -> None:
        """Marks the folder, made when missing, with the settings; to be called before the first output.

        From now on, until the stage is complete or the process ends, no other process can begin it.

        Raises:
            ValueError: another process writes the folder, or it cannot be written.
        """
        make_folder(self.folder)
        _lock(self.folder)
        self._refuse_other()  # another process may have begun since
        for leftover in self.folder.rglob(".*.[0-9]*.tmp"):  # of a killed process: nobody else writes here
            leftover.unlink()
        write_json(self._manifest, {"stage": self.name, "settings": self.settings, "files": None})

    def complete(self, names: list[str], **facts: Any) -> None:
        """Marks the stage complete: hashes the named outputs and keeps `facts` beside them."""
        files = {
            name: {"sha256": file_hash(self.folder / name), "bytes": (self.folder / name).stat().st_size}
            for name in sorted(names)
        }
        content = {"stage": self.name, "settings": self.settings, "files": files, "facts": facts}
        write_json(self._manifest, content)
        _unlock(self.folder)


def _lock(folder: Path) -> None:
    """Holds the folder itself for this process; the system releases it however the process ends."""
    _unlock(folder)  # begun before, and stopped by an error
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(
            f"{folder} is being written by another process: wait for it, or set run_dir"
        ) from None
    _locks[folder.resolve()] = descriptor


def _unlock(folder: Path) -> None:
    descriptor = _locks.pop(folder.resolve(), None)
    if descriptor is not None:
        os.close(descriptor)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested settings by their dotted keys.

    >>> _leaves({"train": {"unroll": {"survival": 0.5}}, "seed": 0})
    {'train.unroll.survival': 0.5, 'seed': 0}
    """
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        leaves |= _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return leaves


def is_complete(folder: Path) -> bool:
    """Whether the stage in `folder` ran to its end and every output still has its size."""
    files = read_manifest(folder)["files"] if (folder / MANIFEST).exists() else None
    with reading(folder / MANIFEST):
        return files is not None and all(
            (folder / name).is_file() and (folder / name).stat().st_size == entry["bytes"]
            for name, entry in files.items()
        )


def read_manifest(folder: Path) -> dict[str, Any]:
    """Content of a stage's manifest; a broken one is a ValueError that names it."""
    path = folder / MANIFEST
    try:
        content = read_json(path)
    except ValueError as error:
        raise ValueError(f"{error}: run that stage first, or delete {folder} to make it again") from None
    kinds = {"stage": str, "settings": dict, "files": dict | None}
    if not isinstance(content, dict) or not all(
        key in content and isinstance(content[key], kind) for key, kind in kinds.items()
    ):
        raise ValueError(f"{path} is not the manifest of a stage: delete {folder} to make it again")
    return content


def stage_fingerprint(folder: Path) -> str:
    """Hash of settings and outputs of the complete stage in `folder`.

    Raises:
        ValueError: the stage is missing or not complete.
    """
    content = read_manifest(folder)
    if content["files"] is None:
        raise ValueError(f"{folder} is not complete: run the {content['stage']} stage to its end first")
    return value_hash([content["settings"], content["files"]])
