"""Serving bundle: `scripts/export.py recipe=NAME [push=OWNER/NAME | pull=OWNER/NAME]`."""

from slipstream.recipes.schema import Recipe
from slipstream.scripts.cli import command
from slipstream.scripts.stages import Run


def export(recipe: Recipe) -> None:
    """Writes the bundle of the trained head, or brings one here; sends it to the hub if asked."""
    from slipstream.scripts import hub

    run = Run(recipe)
    if recipe.pull:
        hub.pull(run)
        return
    run.run("export")
    if recipe.push:
        hub.push(run)


main = command(export)

if __name__ == "__main__":
    main()
