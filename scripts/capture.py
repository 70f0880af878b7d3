"""Hidden states of the target: `scripts/capture.py recipe=NAME`."""

from slipstream.scripts.cli import command
from slipstream.scripts.stages import Run

main = command(lambda recipe: Run(recipe).run("hidden_states"))

if __name__ == "__main__":
    main()
