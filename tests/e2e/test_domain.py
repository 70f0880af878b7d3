"""The `domain` recipe: a head that knows other text is brought back on one's own, by decoding."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from slipstream.data.files import read_json
from slipstream.data.target.toy import toy_chat
from slipstream.data.vocab_map import read_vocab_map
from slipstream.scripts.graph import INPUTS
from slipstream.scripts.stages import Run
from tests.test_recipes import load

pytestmark = pytest.mark.slow

SMALL = (
    "data.regenerate.samples=[{temperature: 0}]",
    "data.regenerate.max_new_tokens=48",
    "data.regenerate.workers=1",
    "data.tokenize.max_length=128",
    "data.capture.dtype=float32",
    "data.validation_share=0",
    "drafter.draft_vocab_size=400",
    "train.learning_rate=2e-3",
    "train.tokens_per_pack=256",
    "train.packs_per_step=1",
    "train.unroll.num_steps=3",
    "train.deepspeed.dtype=float32",
    "train.deepspeed.zero_stage=0",
    "train.wandb.mode=disabled",
    "eval.num_draft_tokens=3",
    "eval.max_new_tokens=32",
    "eval.limit=6",
)


def write_prompts(path: Path, kind: str, num: int, seed: int) -> Path:
    """Different prompts of the toy's grammar that begin with a word."""
    rng, found = random.Random(seed), set()
    while len(found) < num:
        question = toy_chat(rng)[0]["content"]
        found |= {question} if question.startswith(kind) else set()
    rows = [{"messages": [{"role": "user", "content": question}]} for question in sorted(found)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_all(recipe: str, folder: Path, prompts: Path, target: Path, *overrides: str) -> Any:
    """Every stage of a recipe in this process; the comparison of its end."""
    words = (f"run_dir={folder}", f"data.prompts.paths=[{prompts}]", f"target.name={target}")
    run = Run(load(recipe, *words, *SMALL, *overrides))
    run.check()
    return [run.run(stage) for stage in INPUTS][-1]


def test_a_general_head_is_brought_back_on_domain_text(
    trained_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counting = write_prompts(tmp_path / "counting.jsonl", "Count", 40, seed=0)
    stories = write_prompts(tmp_path / "stories.jsonl", "Tell", 75, seed=1)
    general, domain = tmp_path / "general", tmp_path / "domain"
    own = run_all("tiny", general, counting, trained_target, "train.epochs=10", f"eval.prompts=[{counting}]")
    assert own.first.unconditional_K[0] > 0.5, "it knows its own text"
    found = run_all(
        "domain",
        domain,
        stories,
        trained_target,
        f"train.init_from={general / 'export'}",
        "data.prompts.heldout_share=0.2",
        "data.prompts.near_duplicates=0",
        "train.epochs=14",
        f"eval.drafter=[head@{general / 'export'},head]",
    )
    before, after = (report.unconditional_K[0] for report in found.reports.values())
    assert before < 0.5
    assert after > 0.8
    assert read_vocab_map(domain / "vocab_map").d2t_W.equal(read_vocab_map(general / "vocab_map").d2t_W)
    facts = read_json(domain / "prompts/manifest.json")["facts"]
    assert facts["kept"] + facts["heldout"] == 75
    coverage = read_json(domain / "vocab_map/manifest.json")["facts"]["coverage"]
    assert f"cover {coverage:.4f} of the answers" in capsys.readouterr().err
