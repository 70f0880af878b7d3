"""Reads chats of any supported form into one normal form, and the `prompts` stage.

A row is used in one of two ways. As a *prompt*, its assistant turns are removed: the target
answers the system and user turns itself. *As it is*, it must alternate user and assistant.
"""

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from slipstream.data.config import PromptsConfig
from slipstream.data.files import Stage, append_jsonl, atomic_path, file_hash, read_json, read_jsonl
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
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard"), "assistant"),
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
    """Reads one source row by row: a path as in `PromptsConfig.paths`.

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
            yield from ((f"{file}:row {i}", row) for i, row in enumerate(read_json(file), 1))
            return
        stream.seek(0)
        for i, line in enumerate(stream, 1):
            row = None
            with contextlib.suppress(ValueError):
                row = json.loads(line)
            if line.strip():
                yield f"{file}:{i}", row


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
    return Conversation(id=content_id(kept), messages=kept, category=str(row.get("category") or ""))


def _message(turn: Any) -> Message:
    if not isinstance(turn, Mapping):
        raise BadRowError("message is not an object")
    keys = ("from", "value") if turn.get("from") else ("role", "content")
    role, content = str(turn.get(keys[0])), turn.get(keys[1])
    if role not in ROLES:
        raise BadRowError("unknown role")
    if content is None:
        raise BadRowError("null content")
    # Either text or parts: [{"type": "text", "text": ...}, ...]
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise BadRowError("content is not text")
    text = "".join(map(str, texts))
    if not text.strip():
        raise BadRowError("empty content")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRowError("broken unicode") from None
    return Message(role=ROLES[role], content=text)


def _alternating(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The chat up to its last assistant turn."""
    roles = [message.role for message in messages]
    if "assistant" not in roles:
        raise BadRowError("no assistant turn")
    num_kept = len(roles) - roles[::-1].index("assistant")
    turns = [role for role in roles[:num_kept] if role != "system"]
    if turns != ["user", "assistant"] * (len(turns) // 2):
        raise BadRowError("turns do not alternate")
    return tuple(messages[:num_kept])


def load_prompts(config: PromptsConfig) -> tuple[list[Conversation], dict[str, Any]]:
    """All sources as prompts, one of each id, sorted by id, limited; and the counts of rows.

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
    num_bad = reasons.total()
    if num_rows and num_bad / num_rows > config.max_dropped_share:
        counts = ", ".join(f"{reason}: {count}" for reason, count in sorted(reasons.items()))
        raise ValueError(
            f"data.prompts.paths: {num_bad} of {num_rows} rows cannot be used ({counts}), first {first_bad}: "
            f"mend the source or raise data.prompts.max_dropped_share"
        )
    if not prompts:
        raise ValueError(f"data.prompts.paths: no prompt in {', '.join(config.paths)}")
    kept = [prompt for _, prompt in sorted(prompts.items())][: config.limit or None]
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
    stage = Stage(folder, "prompts", {**asdict(config), "source_hashes": hashes})
    if stage.is_complete:
        return
    prompts, facts = load_prompts(config)
    stage.begin()
    with atomic_path(folder / PROMPTS_FILE) as temporary:
        append_jsonl(temporary, (asdict(prompt) for prompt in prompts))
    stage.complete([PROMPTS_FILE], **facts)
    say(f"prompts      {facts['kept']:,} kept of {facts['rows_read']:,} rows, dropped: {facts['dropped']}")


def read_conversations(path: Path) -> list[Conversation]:
    """Reads `prompts.jsonl`."""
    return [
        Conversation(
            id=row["id"],
            messages=tuple(Message(**message) for message in row["messages"]),
            category=row["category"],
        )
        for row in read_jsonl(path)
    ]
