"""Finds the rank that is gone, since a collective only fails or waits, and names it.

Every rank shows a sign of life in the store of the process group and looks at one neighbour's, so that
the cost does not grow with the number of ranks. Who finds a neighbour silent for too long says so in
the store, and every rank that reads it ends.
"""

import datetime
import os
import socket
import sys
import threading
import time
from types import TracebackType

import torch.distributed as dist

from slipstream.train import engine as distributed

BEAT_SECONDS = 1.0
SUSPECT_BEATS = 4
"""Missed signs of life that are enough once a collective has failed."""
LOST = 3
"""Exit code of the ranks that are left."""


class Watch:
    """A context manager around everything in which ranks wait for each other; called on every rank."""

    def __init__(self, timeout: float) -> None:
        """A rank without a sign of life for `timeout` seconds is lost."""
        self._timeout, self._rank = timeout, distributed.rank()
        self._peer = (self._rank + 1) % distributed.world_size()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Watch":
        if distributed.world_size() > 1:
            # A connection of its own: the process group's may be held by a collective that waits.
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=False,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=self._timeout),
            )
            self._prefix = f"slipstream/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
            self._store.set(
                self._key("name", self._rank),
                f"rank {self._rank} (process {os.getpid()} on {socket.gethostname()})",
            )
            self._store.set(self._key("beat", self._rank), "0")
            distributed.barrier()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._thread.is_alive():
            return
        if isinstance(error, RuntimeError):
            # Perhaps a collective failed because a rank is gone: then the thread ends this process.
            self._timeout = SUSPECT_BEATS * BEAT_SECONDS
            self._thread.join(2 * self._timeout)
        self._is_over.set()
        self._thread.join()  # a thread in the store must not outlive the interpreter

    def _key(self, what: str, rank: int) -> str:
        return f"{self._prefix}/{what}/{rank}"

    def _run(self) -> None:
        beat, seen, since = 0, b"", time.monotonic()
        name = self._store.get(self._key("name", self._peer)).decode()
        while not self._is_over.wait(BEAT_SECONDS):
            beat += 1
            try:
                self._store.set(self._key("beat", self._rank), str(beat))
                found = self._store.get(self._key("beat", self._peer))
                if found != seen:
                    seen, since = found, time.monotonic()
                elif time.monotonic() - since > self._timeout:
                    self._store.set(self._key("lost", 0), f"{self._peer}:{name}")
                if self._store.check([self._key("lost", 0)]):
                    lost, _, name = self._store.get(self._key("lost", 0)).decode().partition(":")
                    self._end(name, is_speaker=self._rank == int(lost == "0"))
            except RuntimeError:
                if not self._is_over.is_set():
                    self._end(f"rank 0 or its node ({os.environ['MASTER_ADDR']})", is_speaker=True)

    def _end(self, name: str, *, is_speaker: bool) -> None:
        if is_speaker:
            print(
                f"error: {name} is gone or shows no sign of life: see to it and run the same command "
                f"again, it goes on from the last checkpoint",
                file=sys.stderr,
                flush=True,
            )
        os._exit(LOST)
