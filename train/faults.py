"""What a run does when it is told to stop, and when a gradient is not finite."""

import signal
import sys
from types import FrameType, TracebackType
from typing import Any

import torch

from slipstream.data.progress import say
from slipstream.train import engine as distributed
from slipstream.train.checkpoint import TrainState

TERMINATED = 128 + signal.SIGTERM
"""Exit code of a run that SIGTERM ended; its checkpoint is saved."""

MOST_SKIPS = 10
"""So many steps in a row without a finite gradient end a run."""


class Termination:
    """SIGTERM as a question between two steps; a context manager of the main thread."""

    def __init__(self) -> None:
        self._is_asked = False
        self._before: Any = None

    def __enter__(self) -> "Termination":
        self._before = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = True

    def was_asked(self, device: torch.device) -> bool:
        """Whether any rank was told to end; the same answer on every rank, all of which call this."""
        self._is_asked = distributed.any_rank(self._is_asked, device)
        return self._is_asked

    def leave(self, state: TrainState, num_steps: int) -> None:
        """Ends the program where it was told to and steps are left."""
        if self._is_asked and state.position < num_steps:
            say(
                f"train        SIGTERM: saved after step {state.step}; run the same command again to go on "
                f"with the {num_steps - state.position} steps that are left"
            )
            sys.exit(TERMINATED)


class Skips:
    """Counts steps that every rank left out, since the gradient of one was not finite."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def count(self, is_done: bool, state: TrainState) -> bool:
        """Notes, and returns, whether the planned step behind `state` changed the weights.

        Raises:
            ValueError: too many in a row did not.
        """
        self._in_a_row = 0 if is_done else self._in_a_row + 1
        if is_done:
            return True
        state.skipped += 1
        say(f"warning: a gradient is not finite: the step after step {state.step} is skipped on every rank")
        if self._in_a_row == MOST_SKIPS:
            raise ValueError(
                f"{MOST_SKIPS} steps in a row had a gradient that is not finite, the last after step "
                f"{state.step}: lower train.learning_rate, or set run_dir to another folder"
            )
        return False
