"""Reads chats of any supported form into one normal form, and the `prompts` stage.

A row is used in one of two ways. As a *prompt*, its assistant turns are removed: the target
answers the system and user turns itself. *As it is*, it must alternate user and assistant.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from slipstream.data.config import PromptsConfig
from slipstream.data.files import MANIFEST, Stage, atomic_path, file_hash
from slipstream.data.progress import say
from slipstream.data.types import Conversation, Message

PROMPTS_FILE = "prompts.jsonl"
BUILTIN = {
    "heldout": ("heldout.jsonl",),
    "train": ("train_a.jsonl", "train_b.jsonl"),
    "toy": ("toy.jsonl",),
    "toy_heldout": ("toy_heldout.jsonl",),
}
"""Our own prompts, `builtin:NAME`."""
ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
}
"""Role names of the OpenAI and ShareGPT forms."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropped:
    """A row that cannot be used."""

    where: str
    """file:line, or data set:row; rows count from 1."""
    reason: str


class BadRowError(Exception):
    """Why one row is dropped; never leaves this module."""


def content_id(messages: Iterable[Message]) -> str:
    """Hash of roles and contents, the same whatever form they were read from.

    >>> content_id([Message(role="user", content="Hello")])
    '1d9f4feaa9db000b'
    """
    text = json.dumps([[m.role, m.content] for m in messages], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_source(
    path: str, split: str = "train", *, as_prompts: bool = False
) -> Iterator[Conversation | Dropped]:
    """Reads one source row by row.

    Args:
        path: OpenAI messages JSONL, ShareGPT JSON or JSONL, `builtin:NAME`, or a data set id
            (`id@split` names its own split).
        split: split of a data set.
        as_prompts: remove assistant turns, so that the target answers every user turn.

    Raises:
        ValueError: the source as a whole cannot be read.
    """
    files = source_files(path)
    rows = _hub_rows(path, split) if files is None else (row for file in files for row in _file_rows(file))
    for where, row in rows:
        try:
            yield _conversation(row, as_prompts=as_prompts)
        except BadRowError as bad:
            yield Dropped(where=where, reason=str(bad))


def source_files(path: str) -> list[Path] | None:
    """The files of a source; None for a data set, which `datasets` resolves.

    Raises:
        ValueError: there is no such file or builtin set.
    """
    if path.startswith("builtin:"):
        name = path.removeprefix("builtin:")
        if name not in BUILTIN:
            raise ValueError(f"data.prompts.paths: {path} does not exist, choose from {', '.join(BUILTIN)}")
        folder = Path(str(resources.files("slipstream.data") / "prompts"))
        return [folder / file for file in BUILTIN[name]]
    file = Path(path).expanduser()
    if file.is_file():
        return [file]
    if file.suffix in (".json", ".jsonl"):
        raise ValueError(f"data.prompts.paths: {path} does not exist")
    return None


def _file_rows(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open("rb") as stream:
        if file.suffix == ".json" and stream.read(64).lstrip().startswith(b"["):
            try:
                rows = json.loads(file.read_bytes())
            except ValueError as error:
                raise ValueError(f"data.prompts.paths: {file} is not valid JSON ({error})") from None
            yield from ((f"{file}:row {i}", row) for i, row in enumerate(rows, 1))
            return
        stream.seek(0)
        for i, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                yield f"{file}:{i}", json.loads(line)
            except ValueError:
                yield f"{file}:{i}", None


def _hub_rows(path: str, split: str) -> Iterator[tuple[str, Any]]:
    import datasets  # takes seconds to import and most sources are files

    name, _, own_split = path.partition("@")
    split = own_split or split
    try:
        rows = datasets.load_dataset(name, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"data.prompts.paths: {path} is neither a file nor a data set with split {split} ({reason})"
        ) from None
    yield from ((f"{path}:row {i}", row) for i, row in enumerate(rows, 1))


def _conversation(row: Any, *, as_prompts: bool) -> Conversation:
    if not isinstance(row, Mapping):
        raise BadRowError("not a JSON object")
    turns = row.get("messages") or row.get("conversations") or row.get("conversation")
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise BadRowError("no messages")
    messages = [_message(turn) for turn in turns]
    if any(m.role == "system" for m in messages[1:]):
        raise BadRowError("system message after the first")
    if all(m.role != "user" for m in messages):
        raise BadRowError("no user turn")
    kept = tuple(m for m in messages if m.role != "assistant") if as_prompts else _alternating(messages)
    category = row.get("category")
    return Conversation(
        id=content_id(kept), messages=kept, category=category if isinstance(category, str) else ""
    )


def _message(turn: Any) -> Message:
    if not isinstance(turn, Mapping):
        raise BadRowError("message is not an object")
    role, content = (
        (turn["from"], turn.get("value")) if turn.get("from") else (turn.get("role"), turn.get("content"))
    )
    if role not in ROLES:
        raise BadRowError("unknown role")
    if content is None:
        raise BadRowError("null content")
    text = content if isinstance(content, str) else _joined_parts(content)
    if not text.strip():
        raise BadRowError("empty content")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRowError("broken unicode") from None
    return Message(role=ROLES[role], content=text)


def _joined_parts(content: Any) -> str:
    """Text of a content given as `[{"type": "text", "text": ...}, ...]`."""
    if not isinstance(content, Sequence):
        raise BadRowError("content is not text")
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    strings = [text for text in texts if isinstance(text, str)]
    if len(strings) != len(texts):
        raise BadRowError("content is not text")
    return "".join(strings)


def _alternating(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The chat up to its last assistant turn."""
    num_kept = max((i + 1 for i, m in enumerate(messages) if m.role == "assistant"), default=0)
    if not num_kept:
        raise BadRowError("no assistant turn")
    first = 1 if messages[0].role == "system" else 0
    for i, message in enumerate(messages[first:num_kept]):
        if message.role != ("user", "assistant")[i % 2]:
            raise BadRowError("turns do not alternate")
    return tuple(messages[:num_kept])


def load_prompts(config: PromptsConfig) -> tuple[list[Conversation], dict[str, Any]]:
    """Reads all sources as prompts: one of each id, sorted by id, limited.

    Returns:
        The prompts, and the counts: rows read, kept, duplicates, dropped by reason.

    Raises:
        ValueError: a source is missing, nothing is left, or too many rows were dropped.
    """
    prompts: dict[str, Conversation] = {}
    reasons: Counter[str] = Counter()
    num_rows, first_bad = 0, ""
    for path in config.paths:
        for row in read_source(path, config.split, as_prompts=True):
            num_rows += 1
            if isinstance(row, Dropped):
                reasons[row.reason] += 1
                first_bad = first_bad or f"{row.where} ({row.reason})"
            else:
                prompts.setdefault(row.id, row)
    num_bad = sum(reasons.values())
    if num_rows and num_bad / num_rows > config.max_dropped_share:
        counts = ", ".join(f"{reason}: {count}" for reason, count in sorted(reasons.items()))
        raise ValueError(
            f"data.prompts.paths: {num_bad} of {num_rows} rows cannot be used ({counts}), first {first_bad}: "
            f"mend the source or raise data.prompts.max_dropped_share"
        )
    if not prompts:
        raise ValueError(f"data.prompts.paths: no prompt in {', '.join(config.paths)}")
    kept = sorted(prompts.values(), key=lambda prompt: prompt.id)[: config.limit or None]
    facts = {
        "rows_read": num_rows,
        "kept": len(kept),
        "duplicates": num_rows - num_bad - len(prompts),
        "dropped": dict(sorted(reasons.items())),
    }
    return kept, facts


def run(config: PromptsConfig, folder: Path) -> None:
    """The `prompts` stage: sources to `prompts.jsonl`."""
    files = {path: source_files(path) for path in config.paths}
    hashes = {path: [file_hash(file) for file in found] for path, found in files.items() if found}
    settings = {**asdict(config), "source_hashes": hashes}
    if (folder / MANIFEST).exists() and Stage(folder, "prompts", settings).is_complete:
        return
    # Read first: a source that cannot be used leaves nothing behind.
    prompts, facts = load_prompts(config)
    stage = Stage(folder, "prompts", settings)
    with atomic_path(folder / PROMPTS_FILE) as temporary, temporary.open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(asdict(prompt), ensure_ascii=False) + "\n" for prompt in prompts)
    stage.complete([PROMPTS_FILE], **facts)
    say(f"prompts      {facts['kept']:,} kept of {facts['rows_read']:,} rows, dropped: {facts['dropped']}")


def read_conversations(path: Path) -> list[Conversation]:
    """Reads `prompts.jsonl`."""
    with path.open("rb") as stream:
        return [_stored(json.loads(line)) for line in stream]


def _stored(row: Mapping[str, Any]) -> Conversation:
    messages = tuple(Message(**message) for message in row["messages"])
    return Conversation(id=row["id"], messages=messages, category=row["category"])
