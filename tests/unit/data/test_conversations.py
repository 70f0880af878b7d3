"""One normal form: bad rows are dropped with a reason, equal text has one id, prompts are stable."""

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.data.conversations import (
    Dropped,
    read_answers,
    read_conversations,
    read_source,
)
from slipstream.data.types import Conversation

USER, ASSISTANT = {"role": "user", "content": "Hi  there"}, {"role": "assistant", "content": "Hello.\n"}
SYSTEM = {"role": "system", "content": "Be kind."}


def write_jsonl(path: Path, rows: list[Any]) -> str:
    """One JSON value a line; strings are written as they are."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def read_one(tmp_path: Path, messages: Any, **options: Any) -> Conversation | Dropped:
    """Reads one row of messages."""
    [row] = read_source(write_jsonl(tmp_path / "one.jsonl", [{"messages": messages}]), **options)
    return row


def roles(conversation: Conversation | Dropped) -> list[str]:
    """Roles of a row that was not dropped."""
    assert isinstance(conversation, Conversation), conversation
    return [message.role for message in conversation.messages]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "no messages"),
        (None, "no messages"),
        ("Hi", "no messages"),
        (["Hi"], "message is not an object"),
        ([USER], "no assistant turn"),
        ([SYSTEM, USER], "no assistant turn"),
        ([ASSISTANT], "no user turn"),
        ([USER, {"role": "narrator", "content": "x"}], "unknown role"),
        ([USER, {"content": "x"}], "unknown role"),
        ([USER, {"role": ["assistant"], "content": "x"}], "unknown role"),
        ([USER, {"role": "assistant", "content": None}], "null content"),
        ([USER, {"role": "assistant", "content": " \n"}], "empty content"),
        ([USER, {"role": "assistant", "content": 3}], "content is not text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, ASSISTANT],
            "content is not text",
        ),
        ([{"role": "user", "content": "\ud83d"}, ASSISTANT], "broken unicode"),
        ([USER, USER, ASSISTANT], "turns do not alternate"),
        ([ASSISTANT, USER, ASSISTANT], "turns do not alternate"),
        ([USER, ASSISTANT, SYSTEM], "system message after the first"),
    ],
)
def test_bad_rows_are_dropped_with_a_reason(tmp_path: Path, messages: Any, reason: str) -> None:
    assert read_one(tmp_path, messages) == Dropped(where=f"{tmp_path}/one.jsonl:1", reason=reason)


def test_odd_files(tmp_path: Path) -> None:
    row = json.dumps({"messages": [USER, ASSISTANT]})
    deep = '{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}"
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + f"{row}\n{deep}\n\xff\n".encode("latin-1") + row.encode())
    rows = list(read_source(str(file)))
    assert [isinstance(found, Conversation) for found in rows] == [True, False, False, True]
    assert rows[1] == Dropped(where=f"{file}:2", reason="not a JSON object")
    surrogate = write_jsonl(tmp_path / "s.jsonl", [{"messages": [USER, ASSISTANT], "category": "\ud83d"}])
    assert list(read_source(surrogate)) == [Dropped(where=f"{surrogate}:1", reason="broken unicode")]
    odd = write_jsonl(tmp_path / "odd.jsonl", [{"messages": [USER, ASSISTANT], "category": {"a": 1}}])
    assert next(read_source(odd)).category == ""  # type: ignore[union-attr]
    whole = tmp_path / "whole.json"
    for content in (json.dumps(json.loads(row), indent=1), f"\ufeff[{row}]", f"{row}\n", f"\n[\n{row}\n]"):
        whole.write_text(content)
        [found] = read_source(str(whole))
        assert roles(found) == ["user", "assistant"]
    whole.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"whole\.json is not valid JSON"):
        list(read_source(str(whole)))


def test_a_chat_ends_with_its_last_answer(tmp_path: Path) -> None:
    assert roles(read_one(tmp_path, [USER, ASSISTANT, USER])) == ["user", "assistant"]
    assert roles(read_one(tmp_path, [SYSTEM, USER, ASSISTANT, USER, ASSISTANT]))[0] == "system"


def test_a_prompt_keeps_what_the_target_has_to_answer(tmp_path: Path) -> None:
    assert roles(read_one(tmp_path, [SYSTEM, USER, ASSISTANT, USER], as_prompts=True)) == [
        "system",
        "user",
        "user",
    ]
    assert roles(read_one(tmp_path, [USER, USER], as_prompts=True)) == ["user", "user"]
    assert read_one(tmp_path, [ASSISTANT], as_prompts=True).reason == "no user turn"  # type: ignore[union-attr]


CALLS = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
}
RESULT = {"role": "tool", "content": "3", "tool_call_id": "1", "name": "add"}


def test_recorded_tool_calls_stay_in_a_prompt(tmp_path: Path) -> None:
    found = read_one(tmp_path, [USER, CALLS, RESULT, ASSISTANT, USER], as_prompts=True)
    assert isinstance(found, Conversation)
    assert roles(found) == ["user", "assistant", "tool", "user"]
    call = found.messages[1].extra["tool_calls"][0]
    assert call["function"] == {"name": "add", "arguments": {"a": 1}}
    assert found.messages[2].row() == RESULT
    later = read_one(tmp_path, [USER, {**CALLS, "content": "I add."}, RESULT, USER], as_prompts=True)
    assert isinstance(later, Conversation) and later.id == found.id  # the target writes the text itself
    row = {"messages": [USER, CALLS, RESULT], "tools": '[{"type": "function"}]'}
    source = write_jsonl(tmp_path / "tools.jsonl", [row, {**row, "tools": "none"}])
    first, second = read_source(source, as_prompts=True)
    assert isinstance(first, Conversation) and first.tools == ({"type": "function"},)
    assert isinstance(second, Dropped) and second.reason == "tools are not a list of objects"
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(first.row()) + "\n")
    assert read_conversations(file) == [first]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([USER, RESULT], "tool result without its call"),
        ([CALLS, RESULT, USER], "tool call without a question"),
        ([USER, {**CALLS, "tool_calls": [{"function": {}}]}], "tool call without a function"),
        (
            [USER, {**CALLS, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "arguments of a tool call are not an object",
        ),
    ],
)
def test_bad_tool_rows(tmp_path: Path, messages: Any, reason: str) -> None:
    found = read_one(tmp_path, messages, as_prompts=True)
    assert isinstance(found, Dropped) and found.reason == reason


def test_same_text_has_one_id_whatever_its_form(tmp_path: Path) -> None:
    sharegpt = [{"from": "human", "value": USER["content"]}, {"from": "gpt", "value": ASSISTANT["content"]}]
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "Hi  "}, {"type": "text", "text": "there"}]}
    ]
    (tmp_path / "share.json").write_text(json.dumps([{"id": "x", "conversations": sharegpt}], indent=1))
    sources = [
        write_jsonl(tmp_path / "openai.jsonl", [{"messages": [USER, ASSISTANT]}]),
        write_jsonl(tmp_path / "share.jsonl", [{"conversations": sharegpt}]),
        str(tmp_path / "share.json"),
        write_jsonl(tmp_path / "parts.jsonl", [{"messages": [*parts, ASSISTANT]}]),
    ]
    rows = [row for source in sources for row in read_source(source)]
    assert len(rows) == 4
    assert {row.id for row in rows if isinstance(row, Conversation)} == {rows[0].id}  # type: ignore[union-attr]
    trimmed = read_one(tmp_path, [USER, {**ASSISTANT, "content": "Hello."}])
    assert isinstance(trimmed, Conversation)
    assert trimmed.id not in {row.id for row in rows if isinstance(row, Conversation)}


def test_data_sets_are_read_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "chats"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", [{"messages": [USER, ASSISTANT]}, {"messages": []}])
    rows = list(read_source(str(folder), "train"))
    assert rows[1] == Dropped(where=f"{folder}:row 2", reason="no messages")
    assert roles(rows[0]) == ["user", "assistant"]
    assert (tmp_path / "cache").is_dir()
    with pytest.raises(ValueError, match=r"neither a file nor a data set with split test"):
        list(read_source(f"{folder}@test", "train"))


def test_builtin_prompts(tmp_path: Path) -> None:
    train = list(read_source("builtin:train", as_prompts=True))
    heldout = list(read_source("builtin:heldout", as_prompts=True))
    assert all(isinstance(row, Conversation) and row.category for row in [*train, *heldout])
    assert len(train) >= 400
    assert len(heldout) == 40
    assert not {row.id for row in train} & {row.id for row in heldout}  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="choose from heldout, train"):
        list(read_source("builtin:other"))


PROMPT = {"id": "p", "category": "", "messages": [USER]}
TURN = {"text": "Hello.\n", "token_ids": [5, 6], "finish_reason": "stop"}
ANSWER = {"id": "p-0", "prompt_id": "p", "category": "", "messages": [USER, ASSISTANT], "turns": [TURN]}


@pytest.mark.parametrize(
    "changes",
    [
        {"id": 3},
        {"category": "\ud83d"},
        {"messages": 3},
        {"messages": {}},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": "\ud83d"}]},
        {"turns": [{**TURN, "token_ids": ["5"]}]},
        {"turns": [{**TURN, "token_ids": None}]},
        {"turns": [TURN, TURN]},
        {"turns": [{}]},
    ],
)
def test_a_damaged_line_of_a_stage_is_named(tmp_path: Path, changes: dict[str, Any]) -> None:
    for row, reader in ((PROMPT, read_conversations), (ANSWER, read_answers)):
        path = Path(write_jsonl(tmp_path / "rows.jsonl", [row, {**row, **changes}]))
        if "turns" in changes and row is PROMPT:
            continue
        with pytest.raises(
            ValueError, match=f"^{path}:2 cannot be read .*: delete {tmp_path} to make it again"
        ):
            reader(path)
        write_jsonl(path, [row])
        assert len(reader(path)) == 1
