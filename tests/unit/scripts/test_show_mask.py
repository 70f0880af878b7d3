"""Any row of any stage, in the terminal and as a page."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from slipstream.data import tokenize
from slipstream.data.config import TokenizeConfig
from slipstream.data.types import Conversation, Message
from slipstream.scripts.show_mask import documents, show
from tests.unit.data.test_tokenize import chat, make_target, write_answers

TEXT = "<|user|>Question 0?<|e|>\\n\n<|assistant|>Answer 1 to 0.<|e|>"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of the stages, and the target."""
    root = tmp_path_factory.mktemp("run")
    target = make_target(root / "target")
    chats = [chat("Question 0?", f"Answer {i} to 0.", recorded=True, name=f"p000-{i}") for i in range(2)]
    write_answers(root / "regenerated", chats)
    tokenize.run(TokenizeConfig(), target, root / "regenerated", root / "tokens", 0.0)
    prompt = Conversation(id="p000", messages=(Message(role="user", content="Question 0?"),))
    (root / "prompts").mkdir()

    (root / "prompts" / "prompts.jsonl").write_text(json.dumps(prompt.row()) + "\n")
    return root


@pytest.mark.parametrize(
    ("stage", "row", "num_supervised"),
    [("tokens", "p000-1", 15), ("tokens", "1", 15), ("regenerated", "1", 15), ("prompts", "0", 0)],
)
def test_rows_of_every_stage(run: Path, stage: str, row: str, num_supervised: int) -> None:
    target = make_target(run / "target")
    [sample] = documents(target, stage, run / stage, row)
    console = Console(record=True, width=200, force_terminal=True, file=(run / "out").open("w"))
    show(target, sample, console)
    page, shown = console.export_html(clear=False), console.export_text()
    assert f"{len(sample.loss_mask_T)} tokens, {num_supervised} supervised" in shown
    assert (TEXT if num_supervised else TEXT.partition("Answer")[0]) in shown
    assert "background-color" in page and "&lt;|user|&gt;" in page
    with pytest.raises(ValueError, match="row=7: no such row, give an id or a number below"):
        documents(target, stage, run / stage, "7")
