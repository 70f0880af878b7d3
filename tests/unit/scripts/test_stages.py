"""The seconds of stages, killed ones included, and what is told before the first one."""

import os
import time
from pathlib import Path

import pytest

from slipstream.data.files import Stage
from slipstream.recipes.schema import Recipe
from slipstream.scripts.clock import seconds_before
from slipstream.scripts.stages import Run
from tests.test_recipes import load


def tiny(folder: Path, *overrides: str) -> Recipe:
    return load("tiny", f"run_dir={folder}", *overrides)


def test_seconds_of_a_killed_run_count(tmp_path: Path) -> None:
    run = Run(tiny(tmp_path))
    assert seconds_before(tmp_path, run.path("tokens")) == 0.0
    stage = Stage(run.path("tokens"), "tokens", {})
    stage.begin()
    (stage.folder / "out").write_text("x")
    start = time.time() - 100
    os.utime(stage.folder / "manifest.json", (start, start))
    for file, age in ((stage.folder, 90), (stage.folder / "out", 70)):
        os.utime(file, (start + 100 - age,) * 2)
    leftover = tmp_path / ".seconds.json.1.tmp"
    leftover.touch()
    os.utime(leftover, (start, start))
    assert seconds_before(tmp_path, run.path("tokens")) == pytest.approx(30, abs=0.1)
    assert not leftover.exists()
    assert seconds_before(tmp_path, run.path("tokens")) == pytest.approx(30, abs=0.1), "they count once"
    assert run.seconds() == {"tokens": pytest.approx(30, abs=0.1)}


@pytest.mark.parametrize("content", ["[1]", "{", '{"train": "long"}'])
def test_broken_seconds_are_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "seconds.json").write_text(content)
    with pytest.raises(ValueError, match=r"seconds.json cannot be read .* delete it"):
        Run(tiny(tmp_path)).seconds()


def test_a_refused_run_leaves_the_recipe_of_the_other(tmp_path: Path) -> None:
    Run(tiny(tmp_path)).run("prompts")
    written = (tmp_path / "recipe.yaml").read_text()
    with pytest.raises(ValueError, match="limit: 0 there, 3 now"):
        Run(tiny(tmp_path, "data.prompts.limit=3")).run("prompts")
    assert (tmp_path / "recipe.yaml").read_text() == written
    assert "run_dir" in written


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("drafter.aux_layers=[2,4,99]", "drafter.aux_layers"),
        ("drafter.draft_vocab_size=301", "drafter.draft_vocab_size=301"),
        ("drafter.num_attention_heads=3", "num_attention_heads=3"),
        ("eval.prompts=[gone.jsonl]", "eval.prompts: gone.jsonl"),
        ("eval.max_new_tokens=100000", "eval.max_new_tokens=100000"),
    ],
)
def test_faults_of_the_last_stages_are_told_first(
    override: str, named: str, tiny_target: Path, tmp_path: Path
) -> None:
    fitting = ("drafter.draft_vocab_size=200", f"target.name={tiny_target}")
    Run(tiny(tmp_path, *fitting)).check()
    with pytest.raises(ValueError, match=named.replace("[", r"\[")):
        Run(tiny(tmp_path, *fitting, override)).check()
    assert list(tmp_path.iterdir()) == []
