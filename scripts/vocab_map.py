"""Draft vocabulary: `scripts/vocab_map.py recipe=NAME`."""

from slipstream.scripts.cli import command
from slipstream.scripts.stages import Run

main = command(lambda recipe: Run(recipe).run("vocab_map"))

if __name__ == "__main__":
    main()
