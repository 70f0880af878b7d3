"""Looks after a hidden-state cache: `scripts/cache.py verify|stats|repair|trim recipe=NAME key=value`."""

import sys
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from slipstream.data.files import Stage
from slipstream.data.maintenance import STAGE, damaged_shards, discard, statistics, trim
from slipstream.data.progress import say
from slipstream.recipes.schema import Recipe
from slipstream.scripts.cli import command, fail
from slipstream.scripts.stages import Run


def verify(run: Run) -> None:
    """Reads every shard; ValueError names those that are not as they were written."""
    damaged = damaged_shards(run.path(STAGE))
    if damaged:
        names = ", ".join(f"{name} ({len(ids)} documents)" for name, ids in damaged.items())
        raise ValueError(f"{run.path(STAGE)}: damaged: {names}: run scripts/cache.py repair")
    print("every shard is as it was written")


def stats(run: Run) -> None:
    """Prints what the cache holds."""
    table = Table(show_header=False)
    for name, value in statistics(run.path(STAGE)).items():
        table.add_row(name, value)
    Console().print(table)


def repair(run: Run) -> None:
    """Captures the documents of damaged shards again, and no others."""
    run.require("tokens")
    Stage(run.path(STAGE), STAGE, run.states.settings())  # before anything is thrown away
    damaged = damaged_shards(run.path(STAGE))
    for name, ids in damaged.items():
        say(f"{name} is damaged: its {len(ids)} documents are captured again")
    discard(run.path(STAGE), damaged)
    run.run(STAGE)


def shrink(run: Run) -> None:
    """Stores whole states in the one-byte form that data.capture.store names, without the target."""
    run.require("tokens")
    trim(run.path(STAGE), run.states.settings(), run.recipe.data.capture.store)


ACTIONS: dict[str, Callable[[Run], None]] = {
    "verify": verify,
    "stats": stats,
    "repair": repair,
    "trim": shrink,
}


def main() -> None:
    """The first word says what to do."""
    word = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if word not in ACTIONS:
        fail(ValueError(f"scripts/cache.py {word}: the first word is one of {', '.join(ACTIONS)}"))

    def act(recipe: Recipe) -> None:
        ACTIONS[word](Run(recipe))

    command(act)()


if __name__ == "__main__":
    main()
