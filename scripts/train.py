"""Training: `torchrun train.py recipe=NAME key=value`."""

from slipstream.scripts.cli import command
from slipstream.scripts.stages import Run

main = command(lambda recipe: Run(recipe).run("train"))

if __name__ == "__main__":
    main()
