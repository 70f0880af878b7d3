"""The same greedy answers from transformers, from vLLM offline and from a real vLLM server."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.data import regenerate
from slipstream.data.answers import ANSWERS_FILE
from slipstream.data.config import OpenAIConfig, RegenerateConfig, TargetConfig, VllmConfig
from slipstream.data.conversations import read_answers
from slipstream.data.files import Stage
from slipstream.data.target.resolve import Target, resolve_target
from slipstream.data.template import render_prompt
from slipstream.data.types import Conversation, GeneratedConversation, Message
from slipstream.eval.engines.environment import engine_python
from slipstream.eval.engines.replay import NEAR_TIE
from tests.tiny import make_prompts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BACKENDS = ("hf", "vllm", "openai")
START_SECONDS = 300


@contextlib.contextmanager
def vllm_server(target: Target, log: Path) -> Iterator[str]:
    """A real vLLM server on loopback; gives the base URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(engine_python("vllm")),  # what `vllm serve` runs; its CPU build has no such command
        *("-m", "vllm.entrypoints.openai.api_server", "--model", str(target.path)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--enforce-eager", "--max-model-len", "1024", "--kv-cache-memory-bytes", str(1 << 28)),
    ]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("w") as stream:
        server = subprocess.Popen(
            command, env=environment, stdout=stream, stderr=stream, start_new_session=True
        )
    try:
        _wait(f"http://127.0.0.1:{port}/health", server, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _wait(url: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(1)
    raise AssertionError(log.read_text()[-3000:])


def config_of(backend: str, base_url: str, max_new_tokens: int) -> RegenerateConfig:
    """Settings that differ in the engine only."""
    return RegenerateConfig(
        backend=backend,
        openai=OpenAIConfig(base_url=base_url, concurrency=32),
        vllm=VllmConfig(concurrency=32, settings={"enforce_eager": True, "max_model_len": 1024}),
        max_new_tokens=max_new_tokens,
        max_prompt_tokens=512,
        workers=1,
    )


def answers_of(
    target: Target, prompts: Path, root: Path, *, max_new_tokens: int
) -> dict[str, dict[str, GeneratedConversation]]:
    """Answers by id, of every backend; one server for all that need one."""
    found = {}
    for backend in BACKENDS:
        server = (
            vllm_server(target, root / "serve.log") if backend == "openai" else contextlib.nullcontext("")
        )
        with server as base_url:
            start = time.monotonic()
            config = config_of(backend, base_url, max_new_tokens)
            python = lambda: engine_python("vllm")  # noqa: E731
            regenerate.run(config, target, prompts, root / backend, 0, python)
        rows = read_answers(root / backend / ANSWERS_FILE)
        found[backend] = {row.id: row for row in rows}
        tokens = sum(len(turn.token_ids) for row in rows for turn in row.turns)
        print(f"{backend}: {len(rows)} rows, {tokens} tokens, {time.monotonic() - start:.0f} s")
    return found


@torch.no_grad()
def gap_where_they_part(
    target: Target, model: Any, one: GeneratedConversation, other: GeneratedConversation
) -> float:
    """How far the target's two best tokens are apart at the first difference; 0 for equal rows."""
    places = [i for i, message in enumerate(one.messages) if message.role == "assistant"]
    for place, first, second in zip(places, one.turns, other.turns, strict=True):
        if first.token_ids != second.token_ids:
            both = zip(first.token_ids, second.token_ids, strict=False)
            at = next((i for i, (a, b) in enumerate(both) if a != b), 0)
            ids = [*render_prompt(target.tokenizer(), one.messages[:place]), *first.token_ids[:at]]
            best = model(input_ids=torch.tensor([ids]), logits_to_keep=1).logits[0, -1].topk(2).values
            return float(best[0] - best[1])
    return 0.0


def write_prompts(folder: Path, chats: list[list[dict[str, str]]]) -> Path:
    folder.mkdir()
    prompts = [
        Conversation(id=f"p{i:03d}", messages=tuple(Message(**turn) for turn in chat))
        for i, chat in enumerate(chats)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt.row()) + "\n" for prompt in prompts))
    Stage(folder, "prompts", {}).complete(["prompts.jsonl"])
    return folder


def test_engines_give_the_same_greedy_answers(trained_target: Path, tmp_path: Path) -> None:
    target = resolve_target(TargetConfig(name=str(trained_target)))
    prompts = write_prompts(tmp_path / "prompts", [row["messages"] for row in make_prompts(20)])
    found = answers_of(target, prompts, tmp_path, max_new_tokens=48)
    model = target.model()
    ours = found["hf"]
    assert len(ours) == 20 and any(len(row.turns) == 2 for row in ours.values())
    for backend in BACKENDS[1:]:
        assert found[backend].keys() == ours.keys()
        parted = [i for i in ours if found[backend][i].turns != ours[i].turns]
        gaps = [gap_where_they_part(target, model, ours[i], found[backend][i]) for i in parted]
        assert all(gap < NEAR_TIE for gap in gaps), (backend, parted, gaps)
        assert len(parted) <= 2, (backend, parted)
