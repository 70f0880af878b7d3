"""Serving bundle: `scripts/export.py recipe=NAME`."""

from slipstream.scripts.cli import command
from slipstream.scripts.stages import Run

main = command(lambda recipe: Run(recipe).run("export"))

if __name__ == "__main__":
    main()
