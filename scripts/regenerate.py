"""The dataset-generation command: the target answers the prompts, `scripts/regenerate.py recipe=NAME`."""

from slipstream.scripts.cli import command
from slipstream.scripts.stages import Run

main = command(lambda recipe: Run(recipe).run("regenerated"))

if __name__ == "__main__":
    main()
