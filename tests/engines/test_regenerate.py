"""A real vLLM server answers the prompts as transformers does, token for token."""

import json
from pathlib import Path

import pytest

from slipstream.data.regenerate import ANSWERS_FILE, read_answers
from slipstream.data.target.toy import toy_prompts
from slipstream.scripts.stages import Run
from tests.test_recipes import load

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

NUM_PROMPTS = 24


def test_vllm_answers_as_transformers(trained_target: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in toy_prompts(NUM_PROMPTS, seed=5)))
    answers = {}
    for backend in ("hf", "vllm"):
        words = (
            f"run_dir={tmp_path / backend}",
            f"target.name={trained_target}",
            f"data.prompts.paths=[{prompts}]",
            f"data.regenerate.backend={backend}",
            "data.regenerate.samples=[{temperature: 0}]",
            "target.geometry={}",
        )
        run = Run(load("tiny", *words))
        run.run("prompts")
        run.run("regenerated")
        answers[backend] = {a.id: a for a in read_answers(run.path("regenerated") / ANSWERS_FILE)}
    assert answers["hf"].keys() == answers["vllm"].keys()
    assert answers["hf"] == answers["vllm"]
    assert len(answers["hf"]) > NUM_PROMPTS // 2, "a few prompts of the grammar are equal"
