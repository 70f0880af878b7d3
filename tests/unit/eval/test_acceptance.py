"""Numbers of the report, and the stage: resume, refusals, two-turn prompts."""

import dataclasses
import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from slipstream.data.config import TargetConfig
from slipstream.data.files import read_json, write_json
from slipstream.data.target.resolve import Target, resolve_target
from slipstream.data.types import Conversation, Message
from slipstream.drafters.checkpoint_format import (
    CONFIG,
    WEIGHTS,
    serving_config,
    serving_tensors,
    write_weights,
)
from slipstream.drafters.config import DrafterConfig, Engine, resolve_geometry
from slipstream.drafters.eagle3 import Eagle3Head
from slipstream.eval import comparison
from slipstream.eval.acceptance import AcceptanceReport, PromptResult, summarise
from slipstream.eval.comparison import measure
from slipstream.eval.config import EvalConfig
from slipstream.eval.decoder import Round
from slipstream.eval.report import print_comparison, print_report
from slipstream.eval.room import check_room, without_unfit
from tests.tiny import make_tiny_target


def result(name: str, accepted: list[int], **overrides: Any) -> PromptResult:
    fields: dict[str, Any] = {
        "id": name,
        "category": "code",
        "rounds": tuple(Round(drafted=3, accepted=a) for a in accepted),
        "new_tokens": 1 + sum(accepted) + len(accepted),
        "baseline_new_tokens": 1 + sum(accepted) + len(accepted),
        "seconds": 1.0,
        "baseline_seconds": 1.5,
        "identical": True,
    }
    return PromptResult(**{**fields, **overrides})


def test_the_worked_example() -> None:
    report = summarise([result("a", [3, 0]), result("b", [2, 1])], num_draft_tokens=3, is_greedy=True)
    assert report.acceptance_length == 2.5
    assert report.acceptance_rate == 0.5
    assert report.accepted_per_round == 1.5
    assert report.unconditional_K == (0.75, 0.5, 0.25)
    assert report.conditional_K == pytest.approx((0.75, 2 / 3, 0.5))
    assert 1 + sum(report.unconditional_K) == report.acceptance_length
    assert (report.rounds, report.drafted, report.accepted, report.new_tokens) == (4, 12, 6, 12)
    assert report.speedup == pytest.approx(1.5)
    assert report.lossless is True


def test_a_short_last_draft_is_no_rejection() -> None:
    rounds = (Round(drafted=3, accepted=3), Round(drafted=1, accepted=1))
    report = summarise([result("a", [], rounds=rounds)], num_draft_tokens=3, is_greedy=True)
    assert report.conditional_K == (1.0, 1.0, 1.0)
    assert report.unconditional_K == (1.0, 0.5, 0.5)
    assert report.acceptance_length == 3.0


def test_mismatches_and_categories() -> None:
    results = [result("a", [3]), result("b", [0, 0], category="maths", identical=False)]
    report = summarise(results, num_draft_tokens=3, is_greedy=True)
    assert (report.lossless, report.mismatches) == (False, ("b",))
    assert report.acceptance_length_by_category == {"code": 4.0, "maths": 1.0}
    sampled = summarise(results, num_draft_tokens=3, is_greedy=False)
    assert sampled.lossless is None
    assert "by chance" in shown(sampled)


def shown(report: AcceptanceReport) -> str:
    console = Console(file=StringIO(), width=120)
    print_report(report, console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_report_shows_every_number() -> None:
    text = shown(summarise([result("a", [3, 0, 2, 1], identical=False)], num_draft_tokens=3, is_greedy=True))
    for expected in ("2.500", "50.0%", "0.750", "0.667", "1.50x", "NO: 1 answers differ (a)"):
        assert expected in text


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = make_tiny_target(tmp_path_factory.mktemp("target") / "tiny", tie=False, initializer_range=0.3)
    return resolve_target(TargetConfig(name=str(folder), device="cpu"))


def export(target: Target, folder: Path, seed: int = 0, **overrides: Any) -> Path:
    geometry = resolve_geometry(DrafterConfig(aux_layers=[2, 4, 6]), target.config.to_dict())
    geometry = dataclasses.replace(geometry, **overrides)
    torch.manual_seed(seed)
    tensors = serving_tensors(
        Eagle3Head(geometry), d2t_W=torch.empty(0), t2d_V=torch.empty(0), dtype=torch.float32
    )
    folder.mkdir()
    write_json(
        folder / CONFIG, serving_config(geometry, engines=list(Engine), bos=1, eos=2, dtype=torch.float32)
    )
    write_weights(folder / WEIGHTS, tensors)
    return folder


def chat(name: str, *texts: str) -> Conversation:
    return Conversation(
        id=name, messages=tuple(Message(role="user", content=text) for text in texts), category="x"
    )


CHATS = [chat("p1", "Where?"), chat("p2", "Count.", "And back?"), chat("p3", "Tell me.")]
CONFIG_16 = EvalConfig(num_draft_tokens=3, max_new_tokens=16)


def test_stage_measures_once(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = export(target, tmp_path / "export")
    measured = measure(target, bundle, CONFIG_16, {"x": CHATS}, tmp_path / "evaluation")
    report = measured.first
    assert report.lossless is True
    assert report.prompts == 3
    assert report.tokens_per_second > 0
    written = json.loads(json.dumps(comparison.as_json(measured)))
    assert read_json(tmp_path / "evaluation" / "acceptance.json") == written
    monkeypatch.setattr(comparison, "Player", None)  # nothing is decoded again
    assert measure(target, bundle, CONFIG_16, {"x": CHATS}, tmp_path / "evaluation").first == report


def test_stage_continues_behind_a_torn_line(target: Target, tmp_path: Path) -> None:
    bundle, folder = export(target, tmp_path / "export"), tmp_path / "evaluation"
    first = measure(target, bundle, CONFIG_16, {"x": CHATS}, folder).first
    lines = (folder / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "rounds.jsonl").write_bytes(lines[0] + lines[1][:40])
    manifest = read_json(folder / "manifest.json")
    write_json(folder / "manifest.json", {**manifest, "files": None})
    second = measure(target, bundle, CONFIG_16, {"x": CHATS}, folder).first
    again = (folder / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    assert again[0] == lines[0], "a finished prompt is not decoded again"
    assert [json.loads(line)["id"] for line in again] == ["p1", "p2", "p3"]
    assert (second.rounds, second.accepted) == (first.rounds, first.accepted)
    assert second.lossless is True


def test_sampled_measurement(target: Target, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG_16, temperature=1.0, top_k=4, max_new_tokens=8)
    bundle = export(target, tmp_path / "export")
    report = measure(target, bundle, config, {"x": CHATS[:1]}, tmp_path / "evaluation").first
    assert report.lossless is None
    assert report.acceptance_length >= 1.0


def test_refusals(target: Target, tmp_path: Path) -> None:
    bundle, folder = export(target, tmp_path / "export"), tmp_path / "evaluation"
    measure(target, bundle, dataclasses.replace(CONFIG_16, max_new_tokens=2), {"x": CHATS[:1]}, folder)
    with pytest.raises(ValueError, match="max_new_tokens: 2 there, 16 now"):
        measure(target, bundle, CONFIG_16, {"x": CHATS[:1]}, folder)
    more = target.config.vocab_size + 1
    other = export(target, tmp_path / "other", vocab_size=more, draft_vocab_size=more)
    with pytest.raises(ValueError, match="vocab_size is .* evaluate with the target"):
        measure(target, other, CONFIG_16, {"x": CHATS}, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_chats_that_do_not_fit_are_told_before_the_work(target: Target, tmp_path: Path) -> None:
    bundle, room = export(target, tmp_path / "export"), target.config.max_position_embeddings
    long = dataclasses.replace(CONFIG_16, max_new_tokens=room // 2)
    check_room(target, CHATS[:1], long.max_new_tokens)
    with pytest.raises(ValueError, match=f"p2 with 2 answers of eval.max_new_tokens={room // 2}"):
        measure(target, bundle, long, {"x": CHATS}, tmp_path / "evaluation")


def test_a_public_suite_goes_on_without_chats_that_do_not_fit(
    target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    half = target.config.max_position_embeddings // 2
    kept = without_unfit(target, "mt_bench", CHATS, half)
    assert [chat.id for chat in kept] == [chat.id for chat in CHATS if len(chat.messages) == 1]
    assert f"1 of {len(CHATS)} prompts skipped: p2 with 2 answers" in capsys.readouterr().err
    with pytest.raises(ValueError, match="eval.suite=mt_bench: no prompt fits: p2 with 2 answers"):
        without_unfit(target, "mt_bench", [chat for chat in CHATS if chat.id == "p2"], half)


def test_every_way_to_draft_is_lossless(target: Target, tmp_path: Path) -> None:
    """All shapes and kinds that need no training, side by side on the same prompts."""
    bundle = export(target, tmp_path / "export")
    entries = ["head", "head:tree", "head:static", "head:entropy", "prompt_lookup"]
    entries += [f"draft_model@{target.path}", f"draft_model:tree@{target.path}"]
    config = dataclasses.replace(CONFIG_16, drafter=entries)
    measured = measure(target, bundle, config, {"x": CHATS[:2], "y": CHATS[2:]}, tmp_path / "evaluation")
    assert list(measured.reports) == entries
    for report in measured.reports.values():
        assert report.lossless is True
    own = measured.reports[entries[-2]]
    assert own.conditional_K[0] == 1.0, "the target drafts for itself"
    assert measured.breakdowns["head"].by_suite.keys() == {"x", "y"}
    console = Console(file=StringIO(), width=140)
    print_comparison(measured, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(entry.partition("@")[0] in text for entry in entries)
    assert "tau by suite, with its 95 % interval" in text


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ("nothing", "kind nothing is not one of head"),
        ("head:bush", "shape bush is not one of chain"),
        ("prompt_lookup:tree", "drafts no trees"),
        ("draft_model", "name the model's folder"),
        ("draft_model@gone", "gone holds no model"),
        ("eagle3@gone", "gone"),
    ],
)
def test_bad_drafters_are_named(target: Target, tmp_path: Path, entry: str, named: str) -> None:
    config = dataclasses.replace(CONFIG_16, drafter=entry)
    with pytest.raises(ValueError, match=named):
        measure(target, tmp_path / "none", config, {"x": CHATS}, tmp_path / "evaluation")
    assert not (tmp_path / "evaluation").exists()
