"""Regeneration by a server: nothing is lost or doubled whatever it does, and bad set-ups are named."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from slipstream.data import regenerate
from slipstream.data.backends import openai
from slipstream.data.config import Backend, RegenerateConfig, SampleConfig, ServerConfig, TargetConfig
from slipstream.data.files import Stage, read_json
from slipstream.data.regenerate import ANSWERS_FILE, REFUSED_FILE, read_answers
from slipstream.data.target.resolve import Target, resolve_target
from slipstream.data.template import render_prompt, stop_token_ids
from tests.tiny import make_tiny_target

NUM_PROMPTS = 12


class FakeServer(ThreadingHTTPServer):
    """Answers a prompt by its length; stumbles as its `faults` say, one for each request."""

    daemon_threads = True

    def __init__(self, stop_id: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults: list[str] = []
        self.stop_id, self.gives_ids = stop_id, True
        self.asked: Counter[tuple[int, ...]] = Counter()
        self.answered: Counter[tuple[int, ...]] = Counter()
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: FakeServer

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "toy"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = tuple(body["prompt"])
        with self.server.lock:
            self.server.asked[prompt] += 1
            fault = self.server.faults.pop() if self.server.faults else ""
        if fault == "dropped":
            self.close_connection = True
            return
        if fault == "slow":
            time.sleep(1.5)
        if fault.isdigit():
            self._send(int(fault), {"error": {"message": "no"}})
            return
        ids = [4 + len(prompt) % 5, 10, self.server.stop_id]
        choice: dict[str, Any] = {"text": "words", "finish_reason": "abort" if fault == "abort" else "stop"}
        if self.server.gives_ids:
            choice["token_ids"] = ids
        if not fault:
            with self.server.lock:
                self.server.answered[prompt] += 1
        self._send(200, {"choices": [choice]}, cut=fault == "cut")

    def _send(self, status: int, content: dict[str, Any], cut: bool = False) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data) - 9 if cut else len(data)))
        self.end_headers()
        self.wfile.write(data[:-9] if cut else data)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    path = make_tiny_target(tmp_path_factory.mktemp("target") / "tiny")
    return resolve_target(TargetConfig(name=str(path), device="cpu"))


@pytest.fixture(scope="module")
def prompts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts")
    rows = []
    for i in range(NUM_PROMPTS):
        turns = [{"role": "user", "content": f"Count from {i} to 9" + " again" * i}]
        turns += [{"role": "user", "content": "Where does the red fox live?"}] * (i % 2)
        rows.append({"id": f"p{i}", "category": "count", "messages": turns})
    folder.joinpath("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Stage(folder, "prompts", {}).complete(["prompts.jsonl"])
    return folder


@pytest.fixture
def server(target: Target, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setattr(openai, "FIRST_WAIT", 0.01)
    fake = FakeServer(stop_token_ids(target)[0])
    thread = threading.Thread(target=fake.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield fake
    fake.shutdown()
    fake.server_close()


def config_for(server: FakeServer, **changes: Any) -> RegenerateConfig:
    settings = ServerConfig(url=server.url, concurrency=4, timeout=1.0, max_tries=6)
    return RegenerateConfig(
        backend=Backend.openai, server=replace(settings, **changes), max_new_tokens=8, max_prompt_tokens=200
    )


def test_a_server_that_stumbles_loses_nothing(
    server: FakeServer, target: Target, prompts_folder: Path, tmp_path: Path
) -> None:
    server.faults = ["500", "dropped", "cut", "slow", "429", "abort", "503"] * 2
    regenerate.run(config_for(server), target, prompts_folder, tmp_path, seed=0)
    answers = read_answers(tmp_path / ANSWERS_FILE)
    assert sorted(answer.id for answer in answers) == sorted(f"p{i}-0" for i in range(NUM_PROMPTS))
    assert set(server.answered.values()) == {1}, "each prompt is answered once"
    assert sum(server.asked.values()) == sum(server.answered.values()) + 14
    for answer in answers:
        for turn, place in zip(answer.turns, range(1, len(answer.messages), 2), strict=True):
            prompt = render_prompt(target.tokenizer(), answer.messages[:place])
            assert turn.token_ids == (4 + len(prompt) % 5, 10, server.stop_id)
            assert turn.text == answer.messages[place].content


def test_an_interrupted_run_goes_on(
    server: FakeServer, target: Target, prompts_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, calls = regenerate.append_jsonl, []

    def interrupted(path: Path, rows: Any) -> None:
        calls.append(path)
        if len(calls) > 5:
            raise KeyboardInterrupt
        append(path, rows)

    with monkeypatch.context() as patch:
        patch.setattr(regenerate, "append_jsonl", interrupted)
        with pytest.raises(KeyboardInterrupt):
            regenerate.run(config_for(server), target, prompts_folder, tmp_path, seed=0)
    kept = (tmp_path / ANSWERS_FILE).read_bytes()
    assert kept.count(b"\n") == 5
    (tmp_path / ANSWERS_FILE).write_bytes(kept[:-20])  # the last append was torn
    regenerate.run(config_for(server), target, prompts_folder, tmp_path, seed=0)
    ids = [answer.id for answer in read_answers(tmp_path / ANSWERS_FILE)]
    assert len(ids) == len(set(ids)) == NUM_PROMPTS
    assert (tmp_path / ANSWERS_FILE).read_bytes().startswith(kept[: kept.rfind(b"\n", 0, -1) + 1])


def test_refused_prompts_are_recorded(
    server: FakeServer, target: Target, prompts_folder: Path, tmp_path: Path
) -> None:
    server.faults = ["400", "400"]
    regenerate.run(config_for(server), target, prompts_folder, tmp_path, seed=0)
    assert len(read_answers(tmp_path / ANSWERS_FILE)) == NUM_PROMPTS - 2
    assert "HTTP 400" in (tmp_path / REFUSED_FILE).read_text()
    assert read_json(tmp_path / "manifest.json")["facts"]["left_out"] == {"refused": 2}


def test_a_server_without_token_ids(
    server: FakeServer, target: Target, prompts_folder: Path, tmp_path: Path
) -> None:
    server.gives_ids = False
    regenerate.run(config_for(server), target, prompts_folder, tmp_path, seed=0)
    words = target.tokenizer()("words", add_special_tokens=False)["input_ids"]
    answers = read_answers(tmp_path / ANSWERS_FILE)
    assert {turn.token_ids for a in answers for turn in a.turns} == {(*words, server.stop_id)}


@pytest.mark.parametrize(
    ("faults", "changes", "message"),
    [
        (["500"] * 60, {}, r"failed 6 times \(last: HTTP 500.*run the same command again"),
        ([], {"model": "other"}, r"server.model=other is not served by .*\['toy'\]"),
        (["401"] * 60, {}, r"answers HTTP 401.*the key in \$OPENAI_API_KEY"),
        ([], {"url": "http://127.0.0.1:9/v1", "max_tries": 1}, r"url=http://127.0.0.1:9/v1 failed 1 times"),
    ],
)
def test_bad_servers_are_named(
    server: FakeServer,
    target: Target,
    prompts_folder: Path,
    tmp_path: Path,
    faults: list[str],
    changes: dict[str, Any],
    message: str,
) -> None:
    server.faults = faults
    with pytest.raises(ValueError, match=message):
        regenerate.run(config_for(server, **changes), target, prompts_folder, tmp_path, seed=0)


def test_greedy_and_sampled_settings_reach_the_server(target: Target) -> None:
    sent: list[dict[str, Any]] = []

    class Recorded(openai.CompletionServer):
        async def _asked(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
            sent.append(body or {})
            return {"choices": [{"text": "", "finish_reason": "length", "token_ids": [5]}]}

    import asyncio

    recorded = Recorded(
        ServerConfig(), model="m", tokenizer=target.tokenizer(), stop_ids=[2], max_new_tokens=3
    )
    asyncio.run(recorded.complete([7, 8], SampleConfig(temperature=0.5, top_p=0.9, top_k=4), 2**40 + 3))
    assert sent[0] == {
        "model": "m",
        "prompt": [7, 8],
        "max_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "seed": 3,
        "stop_token_ids": [2],
        "skip_special_tokens": False,
        "return_token_ids": True,
    }
