"""Runs the same work in several processes of this machine, each with its own model.

On a CPU two processes of one thread generate 1.5 times as fast as one process of two threads; on
a machine with several GPUs each process takes one.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any, Protocol

import torch

from slipstream.data.target.model import set_threads
from slipstream.data.target.resolve import Target

POLL_SECONDS = 0.5
COPIES = 3
"""Memory that loading and packing a float32 model takes at most, in times its size."""

OnStep = Callable[[int, int], None]
"""Called with the tokens made and the rows finished since the last call."""


class Work(Protocol):
    """Computes one task; made once in each process."""

    def __call__(self, task: Any, on_step: OnStep, /) -> Any:
        """The result of a task."""


def num_workers(asked: int, target: Target, num_tasks: int) -> int:
    """Processes to start: as many as asked, or (0) what the machine carries."""
    if not asked and target.device.type == "cuda":
        asked = 1 if target.device.index is not None else torch.cuda.device_count()
    elif not asked:
        set_threads()
        weights = sum(file.stat().st_size for file in target.path.glob("*.safetensors"))
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        asked = min(torch.get_num_threads(), memory // 2 // max(COPIES * weights, 1))
    return max(1, min(asked, num_tasks))


def ordered(
    make: Callable[[Target], Work],
    target: Target,
    tasks: Sequence[Any],
    *,
    workers: int,
    on_step: OnStep,
    stage: str = "regenerate",
) -> Iterator[Any]:
    """Results of the tasks, in their order.

    Args:
        make: gives the work to a process, from its target; a picklable object.
        target: of the first process; others take the next devices.
        tasks: picklable.
        workers: processes; 1 works in this one.
        on_step: progress of all of them.
        stage: section of the recipe that `workers` comes from.

    Raises:
        ValueError: a process died.
    """
    if workers == 1:
        work = make(target)
        yield from (work(task, on_step) for task in tasks)
        return
    context = multiprocessing.get_context("spawn")
    counts = [context.Value("q", 0) for _ in range(2)]
    index = context.Value("i", 0)
    setup = (make, target, workers, index, counts)
    with ProcessPoolExecutor(workers, context, _start, setup) as pool, _stopped_on_error():
        futures = deque(pool.submit(_run, task) for task in tasks)
        seen = [0, 0]
        while futures:
            future = futures.popleft()  # a result that was taken is not kept
            for _ in _until_done(future):
                now = [count.value for count in counts]
                on_step(now[0] - seen[0], now[1] - seen[1])
                seen = now
            try:
                yield future.result()
            except BrokenProcessPool:
                raise ValueError(
                    f"a process of {stage} died, most likely for want of memory: lower "
                    f"data.{stage}.workers ({workers} now) and start again"
                ) from None


def _until_done(future: "Future[Any]") -> Iterable[None]:
    """Yields now and then until the future is done, and once more then."""
    while not wait([future], POLL_SECONDS, FIRST_COMPLETED).done:
        yield
    yield


@contextlib.contextmanager
def _stopped_on_error() -> Iterator[None]:
    """Ends the processes at once when the block is left early, instead of waiting for their tasks."""
    try:
        yield
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()
        raise


_work: Work
_counts: Sequence[Any]


def _start(
    make: Callable[[Target], Work], target: Target, workers: int, index: Any, counts: Sequence[Any]
) -> None:
    """Makes a process ready: its share of the machine, its model."""
    global _work, _counts
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the processes
    threading.Thread(target=_die_with_parent, daemon=True).start()
    with index.get_lock():
        mine = index.value
        index.value += 1
    if target.device.type == "cuda":
        target = replace(target, device=torch.device("cuda", mine % torch.cuda.device_count()))
    _counts, _work = counts, make(target)
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))


def _die_with_parent() -> None:
    """A parent killed by -9 cannot end its children."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(task: Any) -> Any:
    def on_step(tokens: int, finished: int) -> None:
        for count, more in zip(_counts, (tokens, finished), strict=True):
            with count.get_lock():
                count.value += more

    return _work(task, on_step)
