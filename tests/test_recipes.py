"""Every recipe composes, checks and prints its plan without network or target."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from slipstream.recipes.schema import Recipe, known_keys, nearest_key, register
from slipstream.scripts.plan import print_plan
from slipstream.scripts.stages import Run
from tests.tree import ROOT

NAMES = sorted(path.stem for path in (ROOT / "recipes" / "recipe").glob("*.yaml"))


def load(name: str, *overrides: str) -> Recipe:
    """A recipe as the commands see it."""
    register()
    with initialize_config_module("slipstream.recipes", version_base="1.3"):
        composed = compose("pipeline", overrides=[f"recipe={name}", f"name={name}", *overrides])
    recipe: Recipe = OmegaConf.to_object(composed)  # type: ignore[assignment]
    recipe.check()
    return recipe


@pytest.mark.parametrize("name", NAMES)
def test_plan(name: str, tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [f"run_dir={tmp_path}"]
    if name in ("tiny", "tiny-eagle3.1", "eagle3"):
        overrides += [f"target.name={tiny_target}", "drafter.draft_vocab_size=0"]
    if name == "eagle3":
        overrides += ["data.prompts.paths=[x.jsonl]"]
    print_plan(Run(load(name, *overrides)))
    printed = capsys.readouterr().out
    for word in (
        "regenerated",
        "hidden_states",
        "parameters of the head",
        "disk per token",
        "optimizer steps",
    ):
        assert word in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["llama3.1-8b-eagle3", "qwen3-8b-eagle3"])
def test_published_settings(name: str) -> None:
    train = load(name).train
    assert (train.learning_rate, train.betas, train.clip_norm) == (5e-5, [0.9, 0.95], 0.5)
    assert (train.unroll.num_steps, train.unroll.step_decay, train.unroll.survival) == (7, 0.8, 1.0)
    assert (train.deepspeed.zero_stage, train.deepspeed.dtype.value) == (2, "bfloat16")
    assert load(name).drafter.draft_vocab_size == 32000


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("-eagle3.1")])
def test_eagle31_differs_in_the_head_alone(name: str) -> None:
    """Same data and budget as the recipe without it."""
    ours = load(name)
    base = load(name.removesuffix("-eagle3.1") if name[:4] in ("tiny", "demo", "smol") else name[:-2])
    assert (ours.drafter.fc_norm, ours.drafter.norm_output) == (True, True)
    assert ours.data == base.data
    assert ours.eval == base.eval
    base.train.fc_learning_rate_share = ours.train.fc_learning_rate_share
    assert ours.train == base.train


def test_what_an_engine_cannot_express_is_refused_at_once() -> None:
    load("tiny", "drafter.qk_norm=true", "export.engines=[vllm]")
    with pytest.raises(ValueError, match=r"drafter.qk_norm=true: SGLang .* export.engines=\[vllm\]"):
        load("tiny", "drafter.qk_norm=true")
    with pytest.raises(ValueError, match=r"export.format=speculators: SGLang"):
        load("tiny", "export.format=speculators")


def test_the_recipe_wins_over_the_root() -> None:
    assert load("tiny").data.capture.dtype.value == "float32"
    assert load("tiny", "data.capture.dtype=bfloat16").data.capture.dtype.value == "bfloat16"


def test_nearest_key() -> None:
    assert "train.unroll.num_steps" in known_keys()
    assert nearest_key("train.unrol.num_step") == "train.unroll.num_steps"
    assert nearest_key("learning_rate") == "train.learning_rate"


def test_every_mistake_is_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"train.epochs.*eval.num_draft_tokens"):
        load("tiny", "train.epochs=0", "eval.num_draft_tokens=0")
