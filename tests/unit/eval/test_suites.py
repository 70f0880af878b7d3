"""Public formats become prompts; broken lines are named and skipped."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.data.types import first_turn
from slipstream.eval.config import EvalConfig
from slipstream.eval.suites import SUITES, load_suites

ROWS: dict[str, dict[str, Any]] = {
    "mt_bench": {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def f(x):\n", "entry_point": "f"},
    "gsm8k": {"question": "How many?", "answer": "#### 3"},
    "math500": {"problem": "Convert $x$.", "solution": "s", "subject": "Algebra", "level": 2},
    "mbpp": {"text": "Write a function.", "code": "c", "test_list": ["assert f(1)"]},
    "alpaca": {"instruction": "Sort.", "input": "3 1 2", "output": "1 2 3"},
    "cnn_dm": {"article": "News.", "highlights": "n", "id": "1"},
    "spec_bench": {"question_id": 1, "category": "rag", "turns": ["Answer."]},
    "speed_bench": {"question_id": "a", "category": "coding", "turns": ["Code.", "More."], "multiturn": True},
    "messages": {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]},
}
CATEGORIES = {"humaneval": "code", "math500": "Algebra", "speed_bench": "coding", "gsm8k": "maths"}


def test_every_suite_has_an_example() -> None:
    assert ROWS.keys() == SUITES.keys()


@pytest.mark.parametrize("name", ROWS)
def test_public_format(name: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[name]) + "\n")
    (prompt,) = load_suites(EvalConfig(suite=name, path=str(path)))[name]
    assert [m.role for m in prompt.messages] == ["user"] * len(ROWS[name].get("turns", "x"))
    assert prompt.category == CATEGORIES.get(name, prompt.category)
    text = prompt.messages[0].content
    assert any(str(value)[:5] in text for value in ROWS[name].values() if isinstance(value, str)) or (
        text in ("Write.", "Answer.", "Code.", "Hi")
    )


def test_papers_question_files_are_read_in_every_suite(tmp_path: Path) -> None:
    path = tmp_path / "question.jsonl"
    path.write_text(json.dumps({"question_id": 0, "category": "math", "turns": ["Add."]}))
    (prompt,) = load_suites(EvalConfig(suite="gsm8k", path=str(path)))["gsm8k"]
    assert (prompt.messages[0].content, prompt.category) == ("Add.", "math")


def test_broken_lines_are_named_and_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(ROWS["gsm8k"]), "{", json.dumps({"answer": 1}), "", json.dumps({"question": 3})]
    lines.append(json.dumps({"turns": ["Add.", None]}))
    path.write_text("\n".join(lines))
    assert len(load_suites(EvalConfig(suite="gsm8k", path=str(path)))["gsm8k"]) == 1
    said = capsys.readouterr().err
    assert "4 of 5 lines skipped: line 2 (not a JSON object)" in said
    assert "line 3 ('question' is missing)" in said
    assert "line 5 (a turn is not text), line 6 (a turn is not text)" in said


def test_a_system_message_stays_and_answers_go(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    turns = [
        ("system", "Be brief."),
        ("human", "One?"),
        ("gpt", "1"),
        ("function_call", "{}"),
        ("human", "Two?"),
    ]
    sharegpt = {"conversations": [{"from": role, "value": text} for role, text in turns], "category": "sums"}
    path.write_text(json.dumps([sharegpt, {"messages": [{"role": "system", "content": "Alone."}]}]))
    (prompt,) = load_suites(EvalConfig(suite="messages", path=str(path)))["messages"]
    assert [(m.role, m.content) for m in prompt.messages] == [turns[0], ("user", "One?"), ("user", "Two?")]
    assert prompt.category == "sums"
    assert [message.content for message in first_turn(prompt)] == ["Be brief.", "One?"]


def test_one_format_for_several_files(tmp_path: Path) -> None:
    paths = [tmp_path / "qa.jsonl", tmp_path / "rag.jsonl"]
    for path in paths:
        path.write_text(json.dumps(ROWS["spec_bench"]))
    config = EvalConfig(suite=["spec_bench"] * 2, path=[str(path) for path in paths])
    assert list(load_suites(config)) == ["spec_bench:qa", "spec_bench:rag"]
    with pytest.raises(ValueError, match="names a file twice"):
        load_suites(EvalConfig(suite=["spec_bench"] * 2, path=[str(paths[0])] * 2))


def test_other_containers_and_several_suites(tmp_path: Path) -> None:
    array, packed = tmp_path / "rows.json", tmp_path / "rows.jsonl.gz"
    array.write_text(json.dumps([ROWS["alpaca"]] * 2))
    packed.write_bytes(gzip.compress(json.dumps(ROWS["humaneval"]).encode()))
    suites = load_suites(EvalConfig(suite=["alpaca", "humaneval"], path=[str(array), str(packed)]))
    assert {name: len(prompts) for name, prompts in suites.items()} == {"alpaca": 1, "humaneval": 1}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"suite": "nope"}, "eval.suite=nope is not one of mt_bench"),
        ({"suite": "gsm8k", "path": "gone.jsonl"}, "eval.path=gone.jsonl does not exist"),
        ({"suite": "spec_bench"}, "name a file"),
        ({"path": "a.jsonl"}, "add eval.suite=messages"),
        ({"suite": ["gsm8k", "mbpp"], "path": "a"}, "give one for each"),
    ],
)
def test_refusals(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        load_suites(EvalConfig(**settings))
