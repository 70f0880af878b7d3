"""The stages and what they read."""

from slipstream.data.config import Source
from slipstream.recipes.schema import Recipe

INPUTS: dict[str, tuple[str, ...]] = {
    "prompts": (),
    "regenerated": ("prompts",),
    "tokens": ("regenerated",),
    "vocab_map": ("tokens",),
    "hidden_states": ("tokens",),
    "train": ("vocab_map", "hidden_states"),
    "export": ("train",),
    "evaluation": ("export",),
}
"""Every stage in order, by the name of its folder, with the stages it reads from."""

DATA_STAGES = ("prompts", "regenerated", "tokens", "hidden_states")
"""What stands in data_dir, so that several runs can share it."""


def stages_of(recipe: Recipe) -> tuple[str, ...]:
    """The stages of a recipe, in order; a live target leaves no states behind."""
    is_live = recipe.data.source is Source.live
    return tuple(stage for stage in INPUTS if stage != "hidden_states" or not is_live)


def inputs_of(recipe: Recipe, stage: str) -> tuple[str, ...]:
    """What a stage reads from."""
    if stage == "train" and recipe.data.source is Source.live:
        return ("vocab_map", "tokens")
    return INPUTS[stage]
