"""Runs an engine's own server on the loopback for as long as a block lasts."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from slipstream.data.progress import say

START_SECONDS = 1800.0
"""Loading a large model from a slow disk takes its time."""
POLL_SECONDS = 0.5
CPU_KV_CACHE_BYTES = 2 << 30
"""By itself vLLM would take nearly all memory of a machine without GPU."""


@contextlib.contextmanager
def vllm_server(
    python: Path, model: Path, name: str, *, dtype: str, num_gpus: int, args: Sequence[str], log: Path
) -> Iterator[str]:
    """Serves a model; yields the base URL.

    Args:
        python: interpreter that has vLLM.
        model: folder of the target.
        name: under which it is served.
        dtype: it runs in.
        num_gpus: 0 on a CPU.
        args: more words of its command line; without any, one copy of the model runs on each GPU.
        log: file that takes what the server says.

    Raises:
        ValueError: the server ends before it answers; names the log.
    """
    port = _free_port()
    command = [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", name, "--dtype", dtype),
        *("--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"),
    ]
    if num_gpus == 0:
        command += ["--enforce-eager", "--kv-cache-memory-bytes", str(CPU_KV_CACHE_BYTES)]
    elif not args:
        command += ["--data-parallel-size", str(num_gpus)]
    command += args
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    say(f"vllm         starts on port {port}, its log is {log}")
    with tempfile.TemporaryDirectory() as scratch, log.open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(
            command,
            cwd=scratch,
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait(process, f"http://127.0.0.1:{port}/health", log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            _end(process)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5.0).status_code == 200:
                return
        time.sleep(POLL_SECONDS)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    causes = [line for line in lines if re.search(r"(ERROR .*|^)\w*Error: ", line)]
    said = (causes or lines[-1:] or ["it said nothing"])[0]
    raise ValueError(f"the vllm server did not start: {said.strip()}; see {log}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the server and what it has started."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
