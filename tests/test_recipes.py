"""Every recipe composes, checks and prints its plan without network or target."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from slipstream.recipes.schema import Recipe, check_keys, known_keys, nearest_key, register, unknown_key
from slipstream.scripts.plan import print_plan
from slipstream.scripts.stages import Run
from tests.tree import ROOT

NAMES = sorted(path.stem for path in (ROOT / "recipes" / "recipe").glob("*.yaml"))


def load(name: str, *overrides: str) -> Recipe:
    """A recipe as the commands see it."""
    register()
    with initialize_config_module("slipstream.recipes", version_base="1.3"):
        composed = compose("pipeline", overrides=[f"recipe={name}", f"name={name}", *overrides])
    check_keys(composed)
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


BAD_VALUES = {
    "train.weight_decay": ("-0.1", "nan", "inf"),
    "train.max_steps": ("-1",),
    "train.final_lr_share": ("-0.1", "1.1", "nan"),
    "train.clip_norm": ("0", "nan", "inf"),
    "train.learning_rate": ("0", "nan", "inf"),
    "train.fc_learning_rate_share": ("0", "-1", "nan"),
    "train.betas": ("[0.9]", "[0.9,1.0]", "[-0.1,0.9]", "[0.9,nan]"),
    "train.validate_tokens": ("0",),
    "train.unroll.survival": ("0", "nan"),
    "train.ema": ("-0.1", "1", "nan"),
    "train.decay_share": ("0", "1.1", "nan"),
    "train.selection.every": ("-1",),
    "train.selection.num_prompts": ("0",),
    "train.selection.max_new_tokens": ("1",),
    "train.selection.seconds": ("-1", "nan", "inf"),
    "train.selection.keep": ("0",),
    "eval.limit": ("-1",),
    "eval.temperature": ("-1", "nan", "inf"),
    "eval.max_new_tokens": ("1",),
    "drafter.draft_vocab_size": ("-1",),
    "drafter.intermediate_size": ("-1",),
    "drafter.num_attention_heads": ("-1",),
    "drafter.num_key_value_heads": ("-1",),
    "drafter.head_dim": ("-2", "33"),
    "run_dir": ("",),
    "seed": ("-1", "2147483648"),
}


@pytest.mark.parametrize("turn", range(max(map(len, BAD_VALUES.values()))))
def test_bad_values_are_named(turn: int) -> None:
    with pytest.raises(ValueError) as caught:
        load("tiny", *(f"{key}={values[turn % len(values)]}" for key, values in BAD_VALUES.items()))
    problems = str(caught.value).split("; ")
    assert len(problems) == len(BAD_VALUES)
    for key in BAD_VALUES:
        assert any(
            line.startswith(key) or (key, line[:5]) == ("eval.temperature", "eval:") for line in problems
        )


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("+train.epoch=2", "unknown key train.epoch: did you mean train.epochs"),
        ("+foo=1", "unknown key foo"),
        ("~seed", "~seed deletes a setting"),
        ("~train", "~train deletes a setting"),
    ],
)
def test_keys_are_neither_added_nor_deleted(override: str, answer: str) -> None:
    with pytest.raises(ValueError, match=answer):
        load("tiny", override)


def test_entries_of_the_geometry_may_be_added() -> None:
    recipe = load("tiny", "+target.geometry.hidden_size=128", "++seed=3")
    assert (recipe.target.geometry, recipe.seed) == ({"hidden_size": 128}, 3)
    assert "+target.geometry.ENTRY" in unknown_key("target.geometry")


def test_a_partial_geometry_does_not_plan(tiny_target: Path, tmp_path: Path) -> None:
    own = (f"run_dir={tmp_path}", f"target.name={tiny_target}", "+target.geometry.hidden_size=64")
    print_plan(Run(load("tiny", *own)))
    with pytest.raises(ValueError, match=r"target.geometry.hidden_size says 65"):
        print_plan(Run(load("tiny", *own[:2], "+target.geometry.hidden_size=65")))
