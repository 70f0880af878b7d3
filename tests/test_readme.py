"""What the README tells a reader to type works: every command is run, `make` targets exist."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from slipstream.recipes.schema import register
from tests.tiny import make_tiny_target
from tests.tree import ROOT, pyproject

BLOCK = re.compile(r"^```(?:bash|sh|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def readme_commands() -> list[list[str]]:
    """The words of every command line in a shell block, without prompt, comment and continuation."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = "\n".join(BLOCK.findall(text)).replace("\\\n", " ").splitlines()
    commands = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]
    return [words for words in commands if words]


def ours(words: list[str]) -> int | None:
    """Where in a command our own program stands, if it is one of ours."""
    programs = pyproject()["project"]["scripts"]
    for i, word in enumerate(words):
        if word == "train.py" or word.startswith("scripts/") or word in programs:
            return i
    return None


def test_there_are_commands():
    assert any(ours(words) is not None for words in readme_commands())


def test_recipe_table_is_complete():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"`{path.stem}`" in text for path in (ROOT / "recipes" / "recipe").glob("*.yaml"))


@pytest.mark.parametrize("words", readme_commands(), ids=" ".join)
def test_command_composes(words):
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words[1:]) <= set(targets)
    place = ours(words)
    if place is not None:
        register()
        with initialize_config_module("slipstream.recipes", version_base="1.3"):
            composed = compose("pipeline", overrides=[*words[place + 1 :], "name=x"])
        OmegaConf.to_object(composed).check()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_command_runs(tmp_path):
    """In the order of the README, in a folder that looks like a clone."""
    for name in ("scripts", "train.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    make_tiny_target(tmp_path / "my-model", vocab_size=40000)
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "Hi"}]}))
    programs = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    environment = {**os.environ, "SLIPSTREAM_CACHE": str(tmp_path / "cache")}
    run = [words for words in readme_commands() if words[0] != "make"]
    assert len(run) > 10
    for words in run:
        command = [*programs[words[0]], *words[1:]]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
    assert (tmp_path / "runs/tiny/export/model.safetensors").is_file()
