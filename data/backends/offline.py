"""vLLM without a server: a process in vLLM's own environment that continues prompts line by line."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from slipstream.data.backends import offline_vllm
from slipstream.data.backends.remote import FailedError
from slipstream.data.config import SampleConfig
from slipstream.data.dialog import Answer

LINE_BYTES = 1 << 26
"""Longest line: an answer as JSON."""


class VllmCompleter:
    """See `Completer`."""

    def __init__(
        self,
        python: Path,
        settings: Mapping[str, Any],
        log: Path,
        *,
        concurrency: int,
        stop_ids: Sequence[int],
        max_new_tokens: int,
        device: int | None = None,
    ) -> None:
        """Starts nothing.

        Args:
            python: of the environment that has vLLM.
            settings: arguments of vllm.LLM.
            log: takes what vLLM prints.
            concurrency: answers in work.
            stop_ids: end an answer.
            max_new_tokens: limit of an answer.
            device: the one CUDA device to see, counted among the visible ones; None: all.
        """
        self.concurrency = concurrency
        self._python, self._settings, self._log, self._device = python, settings, log, device
        self._common = {"stop_token_ids": list(stop_ids), "max_tokens": max_new_tokens}
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ended: ValueError | None = None

    async def __aenter__(self) -> "VllmCompleter":
        """Starts vLLM and waits until the model is loaded."""
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                str(self._python),
                "-P",  # else openai.py beside it would be found as the package of that name
                offline_vllm.__file__,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=self._environment(),
                start_new_session=True,
                limit=LINE_BYTES,
            )
        self._send(dict(self._settings))
        self._reader = asyncio.create_task(self._read())
        ready = asyncio.get_running_loop().create_future()
        self._waiting[-1] = ready
        try:
            await ready
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        await self._reader

    async def complete(self, prompt_ids: Sequence[int], sampling: SampleConfig, seed: int) -> Answer:
        """See `Completer`."""
        if self._ended:
            raise self._ended
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        self._send({"id": number, "prompt": list(prompt_ids), **self._common, **drawn, "seed": seed})
        found = await self._waiting[number]
        if "error" in found:
            raise FailedError(found["error"])
        if found["finish_reason"] not in ("stop", "length"):
            raise FailedError(f"finish_reason_{found['finish_reason']}")
        return Answer(token_ids=tuple(found["token_ids"]), finish_reason=found["finish_reason"])

    def _send(self, value: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value).encode() + b"\n")

    async def _read(self) -> None:
        """Hands the lines to those that wait for them; at the end of the process, an error."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            found = json.loads(line)
            future = self._waiting.pop(found["id"])
            if not future.done():
                future.set_result(found)
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in lines if "Error" in line] or lines[-1:] or ["it said nothing"]
        self._ended = ValueError(f"vllm stopped: {errors[-1].strip()}; see {self._log}")
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._ended)

    def _environment(self) -> dict[str, str]:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment |= {
            "HF_HUB_OFFLINE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONSAFEPATH": "1",
        }
        if self._device is not None:
            visible = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
            device = visible[self._device] if self._device < len(visible) else ""
            environment["CUDA_VISIBLE_DEVICES"] = device or str(self._device)
        return environment
