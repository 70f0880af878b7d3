"""A small standalone draft model from a run's tokens: `scripts/draft_model.py recipe=NAME`.

For comparison with heads: `eval.drafter=[head,draft_model@RUN/draft_model]`.
"""

from slipstream.data.files import Stage, stage_fingerprint
from slipstream.data.progress import say
from slipstream.recipes.schema import Recipe
from slipstream.scripts.cli import command
from slipstream.scripts.stages import Run, plain

WEIGHTS = "model.safetensors"


def draft_model(recipe: Recipe) -> None:
    """Trains and writes the model into the run's folder `draft_model`."""
    from slipstream.data.tokenize import read_samples
    from slipstream.train.small_model import train_small_model

    run, config = Run(recipe), recipe.draft_model
    run.require("tokens")
    folder = run.path("draft_model")
    settings = {"tokens": stage_fingerprint(run.path("tokens")), **plain(config), "seed": recipe.seed}
    stage = Stage(folder, "draft_model", settings)
    if stage.is_complete:
        return
    samples = [s for s in read_samples(run.path("tokens")) if s.split == "train" and s.loss_mask_T.any()]
    stage.begin()
    size = train_small_model(
        run.target,
        samples,
        folder,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_steps=config.num_steps,
        rows_per_step=config.rows_per_step,
        seed=recipe.seed,
    )
    stage.complete([WEIGHTS], parameters=size)
    say(f"draft model  {size:,} parameters in {folder}")


main = command(draft_model)

if __name__ == "__main__":
    main()
