"""Which prompts are kept: by content, whatever their order, every other one counted by its reason."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from slipstream.data import choosing, recorded
from slipstream.data.choosing import HELDOUT_FILE, load_prompts
from slipstream.data.config import DataConfig, PromptsConfig
from slipstream.data.conversations import PROMPTS_FILE, read_answers, read_conversations
from slipstream.data.files import file_hash, read_json
from slipstream.data.types import Message
from tests.unit.data.test_conversations import ASSISTANT, USER, write_jsonl

WORDS = [f"word{i}" for i in range(500)]


def test_a_name_that_is_no_file_is_not_searched_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    with pytest.raises(ValueError, match="eval.prompts: nofile is neither a file nor a data set with split"):
        load_prompts(PromptsConfig(paths=["nofile"]), key="eval.prompts")
    assert datasets.config.HF_HUB_OFFLINE, "datasets would have tried again and again"


def prompt_rows(num: int) -> list[Any]:
    """Distinct usable rows."""
    return [
        {"category": "c", "messages": [{"role": "user", "content": f"Question {i}?"}]} for i in range(num)
    ]


def test_stage_deduplicates_sorts_limits_and_counts(tmp_path: Path) -> None:
    rows = [*prompt_rows(40), prompt_rows(1)[0], "not json", ""]
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    reordered = write_jsonl(tmp_path / "b.jsonl", rows[::-1])
    for name, path in (("one", source), ("two", reordered)):
        choosing.run(PromptsConfig(paths=[path], limit=30), tmp_path / name)
    facts = read_json(tmp_path / "one/manifest.json")["facts"]
    dropped = {"duplicate": 1, "not a JSON object": 1, "over the limit": 10}
    [counts] = facts.pop("sources")
    assert facts == {"rows_read": 42, "kept": 30, "heldout": 0, "dropped": dropped}
    assert counts == {"path": source, "read": 42, "kept": 30, "heldout": 0, "dropped": dropped}
    assert file_hash(tmp_path / "one/prompts.jsonl") == file_hash(tmp_path / "two/prompts.jsonl")
    prompts = read_conversations(tmp_path / "one/prompts.jsonl")
    assert prompts == sorted(prompts, key=lambda prompt: prompt.id)
    assert prompts[0].category == "c"
    assert isinstance(prompts[0].messages[0], Message)
    assert max(Counter(prompt.id for prompt in prompts).values()) == 1


def test_stage_refuses_bad_sources_and_leaves_nothing(tmp_path: Path) -> None:
    bad = write_jsonl(tmp_path / "bad.jsonl", [*prompt_rows(9), {"messages": []}])
    empty = write_jsonl(tmp_path / "empty.jsonl", [])
    broken = tmp_path / "broken.json"
    broken.write_text("[{]")
    cases = {
        bad: r"1 of 10 rows cannot be used \(no messages: 1\), first .*bad.jsonl:10 ",
        empty: "no prompt in",
        str(broken): "broken.json is not valid JSON",
        str(tmp_path / "missing.jsonl"): "missing.jsonl does not exist",
    }
    for path, message in cases.items():
        with pytest.raises(ValueError, match=message):
            choosing.run(PromptsConfig(paths=[path]), tmp_path / "prompts")
        with pytest.raises(ValueError, match=message) as refused:
            load_prompts(PromptsConfig(paths=[path]), key="eval.prompts")
        assert "data.prompts" not in str(refused.value)
        assert not (tmp_path / "prompts").exists()


def test_stage_is_not_repeated_and_notices_a_changed_source(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", prompt_rows(3))
    config = PromptsConfig(paths=[source])
    choosing.run(config, tmp_path / "prompts")
    written = (tmp_path / "prompts/prompts.jsonl").stat().st_mtime_ns
    choosing.run(config, tmp_path / "prompts")
    assert (tmp_path / "prompts/prompts.jsonl").stat().st_mtime_ns == written
    write_jsonl(tmp_path / "a.jsonl", prompt_rows(4))
    with pytest.raises(ValueError, match="source_hashes"):
        choosing.run(config, tmp_path / "prompts")


def choose(tmp_path: Path, rows: list[Any], **settings: Any) -> tuple[list[str], dict[str, int]]:
    """User texts that the stage keeps of the rows, and what it dropped."""
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    folder = tmp_path / f"prompts-{len(list(tmp_path.iterdir()))}"
    choosing.run(PromptsConfig(paths=[source], **settings), folder)
    kept = [prompt.messages[-1].content for prompt in read_conversations(folder / PROMPTS_FILE)]
    return kept, read_json(folder / "manifest.json")["facts"]["dropped"]


def asking(content: str) -> dict[str, Any]:
    """A row with one user turn."""
    return {"messages": [{"role": "user", "content": content}]}


def test_near_duplicates_go_whatever_the_order(tmp_path: Path) -> None:
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=80)) for _ in range(50)]
    copies = [f"{text} please" for text in texts[:10]]
    rows = [asking(text) for text in [*texts, *copies, "?!", "??", "Hi"]]
    kept, dropped = choose(tmp_path, rows, near_duplicates=0.8)
    assert dropped == {"near duplicate": 10}
    for text, copy in zip(texts, copies, strict=False):
        assert (text in kept) != (copy in kept)
    assert {"?!", "??", "Hi"} <= set(kept)
    assert choose(tmp_path, rows[::-1], near_duplicates=0.8) == (kept, dropped)
    assert choose(tmp_path, rows)[1] == {}


def test_near_duplicates_in_a_script_without_spaces(tmp_path: Path) -> None:
    rng = random.Random(0)
    text = "".join(chr(rng.randrange(0x4E00, 0x5E00)) for _ in range(100))
    other = "".join(chr(rng.randrange(0x4E00, 0x5E00)) for _ in range(100))
    kept, dropped = choose(tmp_path, [asking(text), asking(text[:-1]), asking(other)], near_duplicates=0.8)
    assert (len(kept), dropped) == (2, {"near duplicate": 1})


def test_lengths(tmp_path: Path) -> None:
    kept, dropped = choose(tmp_path, [asking("x" * n) for n in range(1, 11)], min_chars=3, max_chars=8)
    assert sorted(map(len, kept)) == [3, 4, 5, 6, 7, 8]
    assert dropped == {"too short": 2, "too long": 2}


def test_languages(tmp_path: Path) -> None:
    german = "Wie lange dauert es, bis ein neues Haus in der Stadt fertig gebaut ist?"
    english = "How long does it take until a new house in the city has been built?"
    unsure = "OK 42"
    rows = [asking(text) for text in (german, english, unsure)]
    assert sorted(choose(tmp_path, rows, languages=["en"])[0]) == sorted([english, unsure])
    kept, dropped = choose(tmp_path, rows, languages=["de", "fr"])
    assert sorted(kept) == sorted([german, unsure])
    assert dropped == {"other language": 1}
    with pytest.raises(ValueError, match="data.prompts.languages: english is none of .*, en, "):
        choose(tmp_path, rows, languages=["english"])


def test_sources_have_weights_and_limits(tmp_path: Path) -> None:
    paths = [
        write_jsonl(tmp_path / f"{name}.jsonl", [asking(f"{name} {i}") for i in range(num)])
        for name, num in (("a", 100), ("b", 30), ("c", 50), ("d", 20))
    ]
    entries = [
        {"path": paths[0], "weight": 2},
        {"path": paths[1], "weight": 1.0},
        {"path": paths[2], "limit": 7},
        paths[3],
    ]
    prompts = load_prompts(PromptsConfig(paths=entries))
    kept = Counter(prompt.messages[0].content[0] for prompt in prompts)
    assert kept == {"a": 60, "b": 30, "c": 7, "d": 20}
    choosing.run(PromptsConfig(paths=entries), tmp_path / "prompts")
    sources = read_json(tmp_path / "prompts/manifest.json")["facts"]["sources"]
    assert [source["dropped"] for source in sources] == [
        {"over its weight": 40},
        {},
        {"over its limit": 43},
        {},
    ]


def test_what_is_held_out_stays_so_when_the_data_grow(tmp_path: Path) -> None:
    texts = [f"Question {i}?" for i in range(600)]
    held, kept = [], []
    for num in (300, 600):
        source = write_jsonl(tmp_path / f"{num}.jsonl", [asking(text) for text in texts[:num]])
        choosing.run(PromptsConfig(paths=[source], heldout_share=0.1), tmp_path / str(num))
        held.append({p.id for p in read_conversations(tmp_path / str(num) / HELDOUT_FILE)})
        kept.append({p.id for p in read_conversations(tmp_path / str(num) / PROMPTS_FILE)})
    assert held[0] < held[1]
    assert kept[0] < kept[1]
    assert not held[1] & kept[1]
    assert len(held[1] | kept[1]) == 600
    assert 40 < len(held[1]) < 80
    [_, *again] = load_prompts(PromptsConfig(paths=[str(tmp_path / "600" / HELDOUT_FILE)]))
    assert {prompt.id for prompt in again} < held[1], "eval.prompts reads the file"
    with pytest.raises(ValueError, match="data.prompts.heldout_share=1e-06 sets none of 300 prompts aside"):
        choosing.run(
            PromptsConfig(paths=[str(tmp_path / "300.jsonl")], heldout_share=1e-6), tmp_path / "none"
        )
    assert not (tmp_path / "none").exists()


def test_everything_filtered_names_the_reasons(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", prompt_rows(3))
    with pytest.raises(ValueError, match=r"no prompt in .*a.jsonl is left \(dropped: {'too short': 3}\)"):
        choosing.run(PromptsConfig(paths=[source], min_chars=100), tmp_path / "prompts")
    assert not (tmp_path / "prompts").exists()


def test_the_counts_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    choose(tmp_path, [*prompt_rows(30), *prompt_rows(15)[10:], "x"], min_chars=12)
    shown = capsys.readouterr().err
    assert "20 kept" in shown
    for reason in ("5 duplicate", "10 too short", "1 not a JSON object"):
        assert reason in shown


def test_recorded_answers_are_used_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = {**ASSISTANT, "content": "Another answer."}
    rows = [{"messages": [USER, ASSISTANT, USER]}, {"messages": [USER, other]}]
    source = write_jsonl(tmp_path / "a.jsonl", [*rows, {"messages": [USER]}])
    config = PromptsConfig(paths=[source], max_dropped_share=0.5)
    choosing.run(config, tmp_path / "prompts", with_answers=True)
    recorded.run(tmp_path / "prompts", tmp_path / "regenerated")
    [answer] = read_answers(tmp_path / "regenerated/answers.jsonl")
    assert [message.content for message in answer.messages] == [USER["content"], ASSISTANT["content"]]
    assert answer.turns == ()
    choosing.run(PromptsConfig(paths=[write_jsonl(tmp_path / "b.jsonl", [rows[1]])]), tmp_path / "own")
    [prompt] = read_conversations(tmp_path / "own" / PROMPTS_FILE)
    assert answer.prompt_id == prompt.id, "the split is by prompt, not by answer"
    assert read_json(tmp_path / "prompts/manifest.json")["facts"]["dropped"] == {
        "duplicate": 1,
        "no assistant turn": 1,
    }
    assert "warning: data.regenerate.backend=recorded" in capsys.readouterr().err
    with pytest.raises(ValueError, match="with_answers: True there, False now"):
        choosing.run(config, tmp_path / "prompts")


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        (3, r"data.prompts.paths\[0\]=3: a path, or"),
        ({"weight": 1}, "a path, or"),
        ({"path": "a", "wieght": 1}, r"data.prompts.paths\[0\].wieght: no such key"),
        ({"path": "a", "weight": -1}, r"paths\[0\].weight=-1 must be"),
        ({"path": "a", "weight": float("nan")}, "weight=nan must be"),
        ({"path": "a", "limit": 1.5}, "limit=1.5 must be"),
        ({"path": "a", "limit": True}, "limit=True must be"),
    ],
)
def test_a_mistaken_source_is_named(entry: Any, named: str) -> None:
    [problem] = DataConfig(prompts=PromptsConfig(paths=[entry])).problems()
    with pytest.raises(ValueError, match=named):
        raise ValueError(problem)
