"""The page holds every number, loads nothing, and colours each token by its origin."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from rich.console import Console

from slipstream.data.files import write_json
from slipstream.data.target.toy import toy_tokenizer
from slipstream.eval.acceptance import summarise
from slipstream.eval.breakdown import break_down
from slipstream.eval.charts import bars, lines
from slipstream.eval.comparison import Comparison, _result, as_json
from slipstream.eval.decoder import Round
from slipstream.eval.page import page
from slipstream.eval.player import PlayedPrompt, Turn, parse_played
from slipstream.scripts.compare import compare

ROUNDS = (Round(drafted=2, accepted=2), Round(drafted=2, accepted=0))


def turn(rounds: tuple[Round, ...], context: int = 10) -> Turn:
    ids = tuple(range(40, 41 + sum(r.accepted + 1 for r in rounds)))
    return Turn(
        prompt_tokens=context,
        token_ids=ids,
        rounds=rounds,
        seconds=1.0,
        draft_seconds=0.3,
        verify_seconds=0.6,
    )


def played(name: str, suite: str, context: int = 10) -> PlayedPrompt:
    plain = (Round(drafted=0, accepted=0),) * 4
    answers = {
        "autoregressive": (turn(plain),),
        "head": (turn(ROUNDS, context),),
        "head:tree": (turn(ROUNDS),),
    }
    return PlayedPrompt(suite=suite, id=name, category="<code>", answers=answers)


@pytest.fixture
def comparison() -> Comparison:
    prompts = [played("a", "one"), played("b", "two", context=600)]
    names = ("head", "head:tree")
    return Comparison(
        reports={
            n: summarise([_result(p, n) for p in prompts], num_draft_tokens=2, is_greedy=True) for n in names
        },
        breakdowns={n: break_down(prompts, n) for n in names},
        overheads=dict.fromkeys(names, 0.1),
        played=prompts,
    )


def test_breakdown_by_hand(comparison: Comparison) -> None:
    cut = comparison.breakdowns["head"]
    assert (cut.overall.tau, cut.overall.rounds) == (2.0, 4)
    assert cut.by_suite.keys() == {"one", "two"}
    assert cut.by_context.keys() == {"0-127", "512-1023"}
    assert cut.by_position["0-15"].rounds == 4
    assert cut.overall.low == cut.overall.high == 2.0


def test_page_is_self_contained(comparison: Comparison) -> None:
    text = page(comparison, title="A <title>", tokenizer=toy_tokenizer(300))
    assert "http" not in text
    assert "<script" not in text
    assert not re.search(r'(src|href)="(?!data:)', text)
    for svg in re.findall(r"<svg.*?</svg>", text):
        ET.fromstring(svg)
    assert "&lt;code&gt;" in text
    assert "A &lt;title&gt;" in text
    kinds = re.findall(r'<span class="(drafted|own)">', text.split("sample")[-1])
    assert kinds == ["own", "drafted", "drafted", "own", "own"]


def test_charts_are_valid() -> None:
    ET.fromstring(bars([("a & b", 1.5, 1.2, 1.9)]))
    ET.fromstring(lines({"x": [(1, 0.5), (2, 0.25)], "<y>": [(1, 0.1)]}, x="k", y="rate"))


def test_rows_are_read_back(comparison: Comparison) -> None:
    import dataclasses
    import json

    row = json.loads(json.dumps(dataclasses.asdict(comparison.played[0])))
    assert parse_played(row) == comparison.played[0]


def test_compare_puts_measurements_side_by_side(
    comparison: Comparison, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run in ("first", "second"):
        write_json(tmp_path / run / "evaluation" / "abc" / "acceptance.json", as_json(comparison))
    compare([tmp_path / "first", tmp_path / "second"], Console(width=300))
    printed = capsys.readouterr().out
    assert printed.count("head:tree") == 4
    with pytest.raises(ValueError, match="run scripts/evaluate.py first"):
        compare([tmp_path / "none"], Console())
