"""Every command of docs/evaluation.md: all compose, and those that need no training run, on a toy."""

import gzip
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from slipstream.data.config import TargetConfig
from slipstream.data.files import Stage
from slipstream.data.target.resolve import resolve_target
from slipstream.drafters.checkpoint_format import CONFIG, WEIGHTS
from slipstream.drafters.config import DrafterConfig, resolve_geometry
from slipstream.scripts.compare import compare
from slipstream.scripts.evaluate import evaluate
from slipstream.scripts.load import load as measure_load
from tests.heads import make_head, write_export
from tests.test_recipes import load
from tests.tree import ROOT

BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMANDS: dict[str, Callable[[Any], None]] = {
    "scripts/evaluate.py": evaluate,
    "scripts/load.py": measure_load,
}
SHORT = {"limit": "2", "max_new_tokens": "6", "lossless_samples": "12", "batch_sizes": "[1,3]"}
"""Instead of what the page says."""


def page_commands() -> list[list[str]]:
    text = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    return [shlex.split(line)[1:] for block in BLOCK.findall(text) for line in block.splitlines()]


def names_other_runs(words: list[str]) -> bool:
    return any("@" in word for word in words)


@pytest.mark.parametrize("words", page_commands(), ids=" ".join)
def test_command_composes(words: list[str]) -> None:
    assert (ROOT / words[0]).is_file()
    load("tiny", *(word for word in words[1:] if word != "recipe=tiny"))


def make_run(folder: Path, target_folder: Path) -> None:
    """A run of which only the export was kept."""
    target = resolve_target(TargetConfig(name=str(target_folder)))
    geometry = resolve_geometry(DrafterConfig(draft_vocab_size=200), target.config.to_dict())
    stage = Stage(folder / "export", "export", {"target_fingerprint": target.fingerprint})
    stage.begin()
    write_export(stage.folder, make_head(geometry), torch.arange(200))
    stage.complete([CONFIG, WEIGHTS])


def make_suites(folder: Path) -> None:
    """Files of the public formats."""
    turns = [{"question_id": i, "category": "math", "turns": [f"Add {i}.", "Again."]} for i in range(3)]
    (folder / "question.jsonl").write_text("\n".join(map(json.dumps, turns)))
    (folder / "test.jsonl").write_text(json.dumps({"question": "How many?", "answer": "#### 3"}))
    problem = {"task_id": "HumanEval/0", "prompt": "def f(x):\n", "entry_point": "f"}
    (folder / "HumanEval.jsonl.gz").write_bytes(gzip.compress(json.dumps(problem).encode()))


@pytest.mark.slow
def test_commands_run(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(Path("runs/tiny"), tiny_target)
    make_suites(tmp_path)
    short = [f"eval.{key}={value}" for key, value in SHORT.items()]
    runnable = [words for words in page_commands() if words[0] in COMMANDS and not names_other_runs(words)]
    assert len(runnable) >= 6
    for words in runnable:
        kept = [w for w in words[1:] if w != "recipe=tiny" and w.partition("=")[0][5:] not in SHORT]
        COMMANDS[words[0]](load("tiny", *kept, *short, f"target.name={tiny_target}"))
    folder = Path("runs/tiny")
    measured = [json.loads(path.read_text()) for path in folder.glob("evaluation/*/acceptance.json")]
    assert len(measured) == len(runnable) - 1
    assert all(report["lossless"] is not False for report in measured)
    mt_bench = next(r for r in measured if "mt_bench" in next(iter(r["drafters"].values()))["by_suite"])
    taus = next(iter(mt_bench["drafters"].values()))["by_category"]["math"]
    assert (taus["prompts"], taus["low"] <= taus["tau"] <= taus["high"]) == (2, True)
    compare([folder, folder], Console(width=200))
    assert "tau by suite, with its 95 % interval" in capsys.readouterr().out
