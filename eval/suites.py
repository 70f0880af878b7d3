"""Public benchmark suites in their own formats, and any file of chats, as prompts by suite.

A suite is read from a file (`.jsonl`, `.json`, `.jsonl.gz`, `.parquet`) or from the hub. A line that
cannot be used is named and skipped; the others run.
"""

import contextlib
import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.data.choosing import load_prompts
from slipstream.data.config import PromptsConfig
from slipstream.data.conversations import ROLES, content_id
from slipstream.data.progress import say
from slipstream.data.types import Conversation, Message
from slipstream.eval.config import EvalConfig, as_list

MAX_NAMED = 5
"""Broken lines that are named; all are counted."""

Read = Callable[[Mapping[str, Any]], tuple[Sequence[Any], Any]]
"""A row to the texts of the user's turns, or whole messages, and the category."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """How a suite's rows become prompts, and where the hub has it."""

    read: Read
    hub: tuple[str, str, str] | None = None
    """Id, configuration and split."""


def _turns(row: Mapping[str, Any]) -> tuple[Sequence[Any], Any]:
    return row["turns"], row.get("category")


def _mt_bench(row: Mapping[str, Any]) -> tuple[Sequence[Any], Any]:
    return (row["prompt"] if "prompt" in row else row["turns"]), row.get("category")


def _human_eval(row: Mapping[str, Any]) -> tuple[Sequence[Any], Any]:
    return [f"Complete this Python function.\n\n```python\n{row['prompt'].strip()}\n```"], "code"


def _mbpp(row: Mapping[str, Any]) -> tuple[Sequence[Any], Any]:
    task = row["text"] if "text" in row else row["prompt"]
    tests = "\n".join(row["test_list"])
    return [f"{task}\nYour Python code should pass these tests:\n\n```python\n{tests}\n```"], "code"


def _alpaca(row: Mapping[str, Any]) -> tuple[Sequence[Any], Any]:
    return ["\n\n".join(text for text in (row["instruction"], row.get("input")) if text)], "instruction"


def _messages(row: Mapping[str, Any]) -> tuple[Sequence[Any], Any]:
    turns = row["conversations"] if "conversations" in row else row["messages"]
    chat = [(ROLES.get(t.get("role", t.get("from"))), t.get("content", t.get("value"))) for t in turns]
    kept = [Message(role=role, content=text) for role, text in chat if role in PLAYED]
    return kept, row.get("category")


PLAYED = ("system", "user")
"""Roles of the messages that are not the target's to write."""
SUITES: dict[str, Suite] = {
    "mt_bench": Suite(read=_mt_bench, hub=("HuggingFaceH4/mt_bench_prompts", "default", "train")),
    "humaneval": Suite(read=_human_eval, hub=("openai/openai_humaneval", "openai_humaneval", "test")),
    "gsm8k": Suite(read=lambda row: ([row["question"]], "maths"), hub=("openai/gsm8k", "main", "test")),
    "math500": Suite(
        read=lambda row: ([row["problem"]], row.get("subject")),
        hub=("HuggingFaceH4/MATH-500", "default", "test"),
    ),
    "mbpp": Suite(read=_mbpp, hub=("google-research-datasets/mbpp", "full", "test")),
    "alpaca": Suite(read=_alpaca, hub=("tatsu-lab/alpaca", "default", "train")),
    "cnn_dm": Suite(
        read=lambda row: ([f"Summarize this article.\n\n{row['article']}"], "summarization"),
        hub=("abisee/cnn_dailymail", "3.0.0", "test"),
    ),
    "spec_bench": Suite(read=_turns),
    "speed_bench": Suite(read=_turns, hub=("nvidia/SPEED-Bench", "qualitative", "test")),
    "messages": Suite(read=_messages),
}
"""Every suite by the name that `eval.suite` uses. A row with `turns` is read as such in all of them."""


def load_suites(config: EvalConfig) -> dict[str, list[Conversation]]:
    """The prompts to decode, by suite.

    Raises:
        ValueError: a suite or file that does not exist, or one without a usable line.
    """
    names, paths = as_list(config.suite), as_list(config.path)
    if not names:
        if paths:
            raise ValueError("eval.path names a file and eval.suite no format: add eval.suite=messages")
        prompts = load_prompts(
            PromptsConfig(paths=list(config.prompts), limit=config.limit), key="eval.prompts"
        )
        return {"prompts": prompts}
    if unknown := [name for name in names if name not in SUITES]:
        raise ValueError(f"eval.suite={unknown[0]} is not one of {', '.join(SUITES)}")
    if paths and len(paths) != len(names):
        raise ValueError(f"eval.path names {len(paths)} files for {len(names)} suites: give one for each")
    paths = paths or [""] * len(names)
    labels = [n if names.count(n) == 1 else f"{n}:{Path(p).stem}" for n, p in zip(names, paths, strict=True)]
    if len(set(labels)) < len(labels):
        raise ValueError(f"eval.suite={','.join(names)} names a file twice: give each another name")
    suites = zip(labels, names, paths, strict=True)
    return {label: _load(name, path, config.limit) for label, name, path in suites}


def _load(name: str, path: str, limit: int) -> list[Conversation]:
    suite, broken, num_rows = SUITES[name], [], 0
    prompts: dict[str, Conversation] = {}
    for where, row in _rows(name, path):
        num_rows += 1
        try:
            prompt = _prompt(suite, row)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            broken.append(f"{where} ({reason})")
            continue
        prompts.setdefault(prompt.id, prompt)
        if limit and len(prompts) == limit:
            break
    if broken:
        more = ", ..." if len(broken) > MAX_NAMED else ""
        say(
            f"eval.suite={name}: {len(broken)} of {num_rows} lines skipped: "
            f"{', '.join(broken[:MAX_NAMED])}{more}"
        )
    if not prompts:
        raise ValueError(f"eval.path={path}: no line of {num_rows} is in the format of eval.suite={name}")
    return list(prompts.values())


def _prompt(suite: Suite, row: Any) -> Conversation:
    if not isinstance(row, Mapping):
        raise ValueError("not a JSON object")
    texts, category = (_turns if "turns" in row else suite.read)(row)
    if isinstance(texts, str) or not texts:
        raise ValueError("no user turn")
    messages = tuple(t if isinstance(t, Message) else Message(role="user", content=t) for t in texts)
    if not all(isinstance(message.content, str) and message.content.strip() for message in messages):
        raise ValueError("a turn is not text")
    if messages[-1].role != "user":
        raise ValueError("no user turn")
    return Conversation(id=content_id(messages), messages=messages, category=str(category or ""))


def _rows(name: str, path: str) -> Iterator[tuple[str, Any]]:
    file = Path(path).expanduser()
    if not path or (not file.is_file() and path.count("/") == 1 and not file.suffix):
        yield from _hub_rows(name, path)
    elif not file.is_file():
        raise ValueError(f"eval.path={path} does not exist")
    elif file.suffix == ".parquet":
        import pyarrow.parquet

        yield from (
            (f"row {i}", row) for i, row in enumerate(pyarrow.parquet.read_table(file).to_pylist(), 1)
        )
    else:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        yield from _json_rows(content, path)


def _json_rows(content: bytes, path: str) -> Iterator[tuple[str, Any]]:
    if content.lstrip().startswith(b"["):
        try:
            rows = json.loads(content)
        except ValueError as error:
            raise ValueError(f"eval.path={path} is not valid JSON ({error})") from None
        yield from ((f"row {i}", row) for i, row in enumerate(rows, 1))
        return
    for i, line in enumerate(content.splitlines(), 1):
        row = None
        with contextlib.suppress(ValueError):
            row = json.loads(line)
        if line.strip():
            yield f"line {i}", row


def _hub_rows(name: str, path: str) -> Iterator[tuple[str, Any]]:
    known = SUITES[name].hub
    if known is None and not path:
        raise ValueError(f"eval.suite={name} has no hub id that is known: name a file, eval.path=FILE")
    import datasets  # takes seconds to import and most suites are files

    hub_id, config, split = known or (path, "default", "test")
    try:
        rows = datasets.load_dataset(path or hub_id, config, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"eval.suite={name}: the hub does not give {path or hub_id} ({reason}): set eval.path=FILE"
        ) from None
    yield from ((f"row {i}", row) for i, row in enumerate(rows, 1))
