"""Reads chats of any supported form into one normal form.

A row is used in one of two ways. As a *prompt*, its assistant turns are removed: the target
answers the system and user turns itself. *As it is*, it must alternate user and assistant.
"""

import hashlib
import json
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from slipstream.data.files import read_json, read_jsonl, text
from slipstream.data.hub import hub_answers
from slipstream.data.types import Conversation, GeneratedConversation, GeneratedTurn, Message

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
    "tool": "tool",
}
"""Role names of the OpenAI and ShareGPT forms."""
EXTRA = ("tool_calls", "tool_call_id", "name")
"""Keys of a message that are kept beside role and content."""
PATHS_KEY = "data.prompts.paths"


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
    turns = [[m.role, m.content, *([m.extra] if m.extra else [])] for m in messages]
    text = json.dumps(turns, ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_source(
    path: str, split: str = "train", *, as_prompts: bool = False, key: str = PATHS_KEY
) -> Iterator[Conversation | Dropped]:
    """Reads one source row by row: a path of a `PromptSource`.

    Raises:
        ValueError: the source as a whole cannot be read; names `key`, the setting it comes from.
    """
    files = source_files(path, key)
    rows = (
        _hub_rows(path, split, key) if files is None else (row for file in files for row in _file_rows(file))
    )
    for where, row in rows:
        try:
            yield _conversation(row, as_prompts=as_prompts)
        except BadRowError as bad:
            yield Dropped(where=where, reason=str(bad))


def source_files(path: str, key: str = PATHS_KEY) -> list[Path] | None:
    """The files of a source; None for a data set, which `datasets` resolves.

    Raises:
        ValueError: there is no such file or builtin set.
    """
    if path.startswith("builtin:"):
        name = path.removeprefix("builtin:")
        if name not in BUILTIN:
            raise ValueError(f"{key}: {path} does not exist, choose from {', '.join(BUILTIN)}")
        folder = Path(str(resources.files("slipstream.data") / "prompts"))
        return [folder / file for file in BUILTIN[name]]
    file = Path(path).expanduser()
    if file.is_file():
        return [file]
    if file.suffix in (".json", ".jsonl"):
        raise ValueError(f"{key}: {path} does not exist")
    return None


def _file_rows(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open("rb") as stream:
        first = stream.readline()
        # A .json file may hold a row a line too; one row on many lines begins with half an object.
        is_list = first.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
        if file.suffix == ".json" and (is_list or _parsed(first) is None):
            content = read_json(file)
            rows = content if isinstance(content, list) else [content]
            yield from ((f"{file}:row {i}", row) for i, row in enumerate(rows, 1))
            return
        stream.seek(0)
        for i, line in enumerate(stream, 1):
            if line.strip():
                yield f"{file}:{i}", _parsed(line)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _hub_rows(path: str, split: str, key: str) -> Iterator[tuple[str, Any]]:
    import datasets  # takes seconds to import and most sources are files
    from huggingface_hub import dataset_info

    name, _, own_split = path.partition("@")
    split = own_split or split
    try:
        if not Path(name).exists() and not hub_answers(dataset_info, name):
            datasets.config.HF_HUB_OFFLINE = (
                True  # looks into its cache only, without trying for half a minute
            )
        rows = datasets.load_dataset(name, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{key}: {path} is neither a file nor a data set with split {split} ({reason}): give a .jsonl "
            f"or .json file, OWNER/NAME or OWNER/NAME@SPLIT of the hub, or builtin:NAME"
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
    kept = _prompt_turns(messages) if as_prompts else _alternating(messages)
    category = row.get("category")
    category = str(category) if isinstance(category, str | int) else ""
    return Conversation(
        id=content_id(kept), messages=kept, category=_encodable(category), tools=_tools(row.get("tools"))
    )


def _prompt_turns(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The chat without its answers; of those that call tools, the calls stay where results follow."""
    kept: list[Message] = []
    for i, message in enumerate(messages):
        calls = {key: value for key, value in message.extra.items() if key == "tool_calls"}
        follower = messages[i + 1].role if i + 1 < len(messages) else ""
        if message.role == "tool" and (not kept or kept[-1].role not in ("assistant", "tool")):
            raise BadRowError("tool result without its call")
        if message.role != "assistant":
            kept.append(message)
        elif calls and follower == "tool":
            if not kept or kept[-1].role not in ("user", "tool"):
                raise BadRowError("tool call without a question")
            kept.append(replace(message, content="", extra=calls))
    return tuple(kept)


def _tools(found: Any) -> tuple[dict[str, Any], ...]:
    """Schemas of a row's tools, which some data sets hold as JSON text."""
    tools = _parsed(found.encode()) if isinstance(found, str) and found.strip() else found or []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise BadRowError("tools are not a list of objects")
    return tuple(dict(tool) for tool in tools)


def _encodable(content: str) -> str:
    try:
        return text(content)
    except UnicodeEncodeError:
        raise BadRowError("broken unicode") from None


def _message(turn: Any) -> Message:
    if not isinstance(turn, Mapping):
        raise BadRowError("message is not an object")
    keys = ("from", "value") if turn.get("from") else ("role", "content")
    role, content = turn.get(keys[0]), turn.get(keys[1])
    if not isinstance(role, str) or role not in ROLES:
        raise BadRowError("unknown role")
    extra = _extra(turn)
    if content is None and "tool_calls" in extra:
        content = ""
    if content is None:
        raise BadRowError("null content")
    # Either text or parts: [{"type": "text", "text": ...}, ...]
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise BadRowError("content is not text")
    whole = "".join(map(str, texts))
    if not whole.strip() and "tool_calls" not in extra and role != "tool":
        raise BadRowError("empty content")
    return Message(role=ROLES[role], content=_encodable(whole), extra=extra)


def _extra(turn: Mapping[str, Any]) -> dict[str, Any]:
    """What a message holds beside role and content; arguments of calls as objects, as templates want."""
    extra = {
        key: turn[key] for key in EXTRA if turn.get(key) and (key != "name" or turn.get("role") == "tool")
    }
    calls = extra.get("tool_calls", [])
    if not isinstance(calls, list):
        raise BadRowError("tool_calls is not a list")
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRowError("tool call without a function")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = _parsed(arguments.encode())
        if not isinstance(arguments, Mapping):
            raise BadRowError("arguments of a tool call are not an object")
        calls[i] = {**call, "function": {**function, "arguments": dict(arguments)}}
    return extra


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


def read_conversations(path: Path) -> list[Conversation]:
    """Reads `prompts.jsonl`; ValueError names a line that is not as it was written."""
    return read_jsonl(path, parse_prompt)


def read_answers(path: Path) -> list[GeneratedConversation]:
    """Reads `answers.jsonl`; ValueError names a line that is not as it was written."""
    return read_jsonl(path, parse_answer)


def parse_prompt(row: Any) -> Conversation:
    """A row of `prompts.jsonl`."""
    messages = _messages(row)
    if all(message.role != "user" for message in messages):
        raise ValueError("no user turn")
    tools = tuple(row.get("tools", ()))
    return Conversation(id=text(row["id"]), messages=messages, category=text(row["category"]), tools=tools)


def parse_answer(row: Any) -> GeneratedConversation:
    """A row of `answers.jsonl`."""
    messages = _messages(row)
    turns = tuple(
        GeneratedTurn(
            text=text(turn["text"]),
            token_ids=tuple(map(operator.index, turn["token_ids"])),
            finish_reason=text(turn["finish_reason"]),
        )
        for turn in row["turns"]
    )
    if len(turns) not in (0, sum(message.role == "assistant" for message in messages)):
        raise ValueError("turns and assistant messages differ in number")
    return GeneratedConversation(
        id=text(row["id"]),
        prompt_id=text(row["prompt_id"]),
        messages=messages,
        turns=turns,
        category=text(row["category"]),
        tools=tuple(row.get("tools", ())),
        cut=text(row.get("cut", "")),
    )


def _messages(row: Any) -> tuple[Message, ...]:
    return tuple(
        Message(
            role=text(m["role"]),
            content=text(m["content"]),
            extra={key: m[key] for key in EXTRA if key in m},
        )
        for m in row["messages"]
    )
