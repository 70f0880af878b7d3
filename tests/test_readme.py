"""What the README tells a reader to type exists and composes."""

import re
import shlex

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from slipstream.recipes.schema import register
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


@pytest.mark.parametrize("words", readme_commands(), ids=" ".join)
def test_command(words):
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words[1:]) <= set(targets)
    place = ours(words)
    if place is not None:
        if words[place].endswith(".py"):
            assert (ROOT / words[place]).is_file()
        register()
        with initialize_config_module("slipstream.recipes", version_base="1.3"):
            composed = compose("pipeline", overrides=[*words[place + 1 :], "name=x"])
        OmegaConf.to_object(composed).check()
