"""Every way to draft on the same prompts: `scripts/evaluate.py recipe=NAME eval.drafter=[head,head:tree]`."""

from rich.console import Console

from slipstream.recipes.schema import Recipe
from slipstream.scripts.cli import command
from slipstream.scripts.stages import Run


def evaluate(recipe: Recipe) -> None:
    """Measures and prints the table."""
    from slipstream.eval.report import print_comparison

    print_comparison(Run(recipe).evaluate(), Console())


main = command(evaluate)

if __name__ == "__main__":
    main()
