"""Answers dialogs side by side through an engine outside this process: a server, or vLLM offline."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from transformers import PreTrainedTokenizerFast

from slipstream.data.config import SampleConfig
from slipstream.data.dialog import Answer, Dialog, Job


class FailedError(Exception):
    """Why one answer could not be had; the row is left out."""


class Completer(Protocol):
    """Continues prompts; used inside `async with`."""

    concurrency: int
    """Dialogs in work at a time."""

    async def __aenter__(self) -> "Completer":
        """Makes the engine ready; ValueError when it cannot be."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Lets the engine go."""

    async def complete(self, prompt_ids: Sequence[int], sampling: SampleConfig, seed: int) -> Answer:
        """The answer; FailedError when this one cannot be had, ValueError when none can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A job that was given up."""

    job: Job
    reason: str
    is_final: bool = False
    """Whether a further try would end the same way."""


Outcome = dict[str, Any] | Failure
"""A row of the answers file, or why there is none."""


def outcome(dialog: Dialog) -> Outcome:
    """What a dialog that has ended leaves."""
    if not dialog.turns:
        return Failure(job=dialog.job, reason=dialog.cut, is_final=True)
    return dialog.row()


def answer_all(
    jobs: Sequence[Job],
    completer: Completer,
    tokenizer: PreTrainedTokenizerFast,
    *,
    keep_truncated: bool,
    seed: int,
    on_answer: Callable[[int], None],
    write: Callable[[Sequence[Outcome]], None],
) -> None:
    """Answers every job.

    Args:
        jobs: in the order in which they are begun.
        completer: the engine.
        tokenizer: the target's.
        keep_truncated: see `RegenerateConfig`.
        seed: of the run.
        on_answer: called with the number of tokens of each answer.
        write: called with what is done, in the order in which it is done.

    Raises:
        ValueError: the engine cannot be reached, or stopped.
    """

    async def work(job: Job) -> Outcome:
        dialog = Dialog(job, tokenizer, keep_truncated=keep_truncated)
        while (prompt_ids := dialog.next_prompt()) is not None:
            try:
                answer = await completer.complete(prompt_ids, job.sampling, dialog.seed(seed))
            except FailedError as failed:
                return Failure(job=job, reason=str(failed))
            dialog.add(answer)
            on_answer(len(answer.token_ids))
        return outcome(dialog)

    async def run() -> None:
        waiting = iter(jobs)
        async with completer:
            pending: set[asyncio.Task[Outcome]] = set()
            try:
                while True:
                    while len(pending) < completer.concurrency and (job := next(waiting, None)) is not None:
                        pending.add(asyncio.create_task(work(job)))
                    if not pending:
                        return
                    done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                    write([task.result() for task in done if task.exception() is None])
                    for task in done:
                        task.result()
            finally:
                for task in pending:
                    task.cancel()
                await asyncio.gather(*pending, return_exceptions=True)

    asyncio.run(run())
