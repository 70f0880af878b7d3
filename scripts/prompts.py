"""Reads prompts of any supported form: `scripts/prompts.py recipe=NAME`."""

from slipstream.scripts.cli import command
from slipstream.scripts.stages import Run

main = command(lambda recipe: Run(recipe).run("prompts"))

if __name__ == "__main__":
    main()
