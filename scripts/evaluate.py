"""Acceptance length of the exported head: `scripts/evaluate.py recipe=NAME eval.num_draft_tokens=K`."""

from rich.console import Console

from slipstream.recipes.schema import Recipe
from slipstream.scripts.cli import command
from slipstream.scripts.stages import Run


def evaluate(recipe: Recipe) -> None:
    """Measures and prints the table."""
    from slipstream.eval.report import print_report

    print_report(Run(recipe).run("evaluation"), Console())


main = command(evaluate)

if __name__ == "__main__":
    main()
