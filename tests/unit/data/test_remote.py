"""A server that fails in every way loses nothing and duplicates nothing; stop and go on anywhere."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from slipstream.data import regenerate
from slipstream.data.answers import ANSWERS_FILE, FAILED_FILE
from slipstream.data.backends import remote
from slipstream.data.backends.offline import VllmCompleter
from slipstream.data.config import OpenAIConfig, RegenerateConfig, SampleConfig
from slipstream.data.conversations import read_answers
from slipstream.data.files import Stage, read_json, read_jsonl
from slipstream.data.target.resolve import Target
from slipstream.data.types import GeneratedConversation
from tests.unit.data.test_tokenize import ids_of, make_target, text_of

NUM_PROMPTS = 24
LIMIT = 40
SHORT = 1.0
"""Seconds that a client waits for slow answers."""
WAYS = ("500", "slow", "cut body", "broken json", "no choice", "dropped", "429")


class FaultyServer(ThreadingHTTPServer):
    """Answers `echo:` and the length of the prompt; the first request for each prompt goes wrong."""

    daemon_threads = True

    def __init__(self, *, ways: tuple[str, ...], gives_ids: bool, always: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.ways, self.gives_ids, self.always = ways, gives_ids, always
        self.seen: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, *_: Any) -> None:
        """Silent: a client that waits no longer."""

    def fault(self, prompt: str) -> str:
        with self.lock:
            self.seen[prompt] += 1
            if not self.ways or (self.seen[prompt] > 1 and not self.always):
                return ""
            return self.ways[len(self.seen) % len(self.ways)]


class Handler(BaseHTTPRequestHandler):
    server: FaultyServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Silent."""

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.bodies.append(body)
            server.in_flight += 1
            server.most_in_flight = max(server.most_in_flight, server.in_flight)
        try:
            self.answer(body)
        finally:
            with server.lock:
                server.in_flight -= 1

    def answer(self, body: dict[str, Any]) -> None:
        prompt = text_of(body["prompt"])
        fault = self.server.fault(prompt)
        if fault == "slow":
            time.sleep(2 * SHORT)  # longer than the client waits
        if fault in ("500", "429", "400"):
            self.reply(int(fault), {"error": "not now"})
        elif fault == "dropped":
            self.close_connection = True
        elif fault == "no choice":
            self.reply(200, {"choices": []})
        else:
            ended = "zzz" not in prompt
            text = f"echo: {len(prompt)}" + ("" if ended else "x" * 30)
            ids = [*ids_of(text), 0] if ended else ids_of(text)[:LIMIT]
            choice = {"text": text, "finish_reason": "stop" if ended else "length"}
            if self.server.gives_ids and body.get("return_token_ids"):
                choice["token_ids"] = ids
            self.reply(200, {"choices": [choice]}, fault)

    def reply(self, status: int, value: Any, fault: str = "") -> None:
        content = json.dumps(value).encode()
        if fault == "broken json":
            content = content[: len(content) // 2]
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if fault == "cut body" else content)
        self.close_connection |= fault == "cut body"


@pytest.fixture
def serve() -> Iterator[Any]:
    servers = []

    def start(*ways: str, gives_ids: bool = True, always: bool = False) -> FaultyServer:
        server = FaultyServer(ways=ways, gives_ids=gives_ids, always=always)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def prompts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts")
    rows = []
    for i in range(NUM_PROMPTS):
        texts = [f"Question {i}?", f"And {i}?"] if i % 3 == 0 else [f"Question {i}?" + " zzz" * (i % 12 == 1)]
        messages = [{"role": "user", "content": text} for text in texts]
        rows.append({"id": f"p{i:02d}", "category": "", "messages": messages})
    folder.joinpath("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Stage(folder, "prompts", {}).complete(["prompts.jsonl"])
    return folder


def settings(server: FaultyServer, timeout: float = 60.0, **others: Any) -> RegenerateConfig:
    openai = OpenAIConfig(
        base_url=server.base_url, concurrency=6, timeout_seconds=timeout, retries=6, backoff_seconds=0.01
    )
    return RegenerateConfig(backend="openai", openai=openai, max_new_tokens=LIMIT, **others)


def check_whole(answers: list[GeneratedConversation]) -> None:
    """Every prompt once, every turn answered with what its own history asks for."""
    assert sorted(answer.id for answer in answers) == [f"p{i:02d}-0" for i in range(NUM_PROMPTS)]
    for answer in answers:
        history = ""
        for user, assistant, turn in zip(
            answer.messages[::2], answer.messages[1::2], answer.turns, strict=True
        ):
            history += f"<|user|>{user.content}<|e|>\n<|assistant|>"
            assert turn.text == assistant.content
            assert turn.text.startswith(f"echo: {len(history)}")
            assert list(turn.token_ids) == ids_of(turn.text) + [0] * (turn.finish_reason == "stop")
            assert (turn.finish_reason == "length") == ("zzz" in user.content)
            history += f"{assistant.content}<|e|>\n"


@pytest.mark.parametrize("gives_ids", [True, False])
def test_a_faulty_server_loses_and_duplicates_nothing(
    serve: Any, target: Target, prompts_folder: Path, tmp_path: Path, gives_ids: bool
) -> None:
    server = serve(*WAYS, gives_ids=gives_ids)
    regenerate.run(settings(server, SHORT), target, prompts_folder, tmp_path, seed=1)
    check_whole(read_answers(tmp_path / ANSWERS_FILE))
    assert not (tmp_path / FAILED_FILE).exists()
    assert 1 < server.most_in_flight <= 6 + len(WAYS)  # what the client gave up still sleeps there
    asked = Counter((tuple(body["prompt"]), body["seed"]) for body in server.bodies)
    assert max(asked.values()) >= 2 and len({seed for _, seed in asked}) == len(asked)
    assert all((body["top_k"], body["repetition_penalty"]) == (-1, 1.0) for body in server.bodies)
    facts = read_json(tmp_path / "manifest.json")["facts"]
    assert facts["finish_reasons"] == {"stop": 30, "length": 2}
    num_requests = len(server.bodies)
    regenerate.run(settings(server), target, prompts_folder, tmp_path, seed=1)
    assert len(server.bodies) == num_requests


@pytest.mark.parametrize("num_written", [1, 13])
def test_stopped_and_started_again(
    serve: Any,
    target: Target,
    prompts_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_written: int,
) -> None:
    server = serve("500")
    append = regenerate.AnswerLog.write

    def interrupted(log: regenerate.AnswerLog, outcomes: list[remote.Outcome]) -> None:
        append(log, outcomes)
        if len(log.done) >= num_written:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(regenerate.AnswerLog, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            regenerate.run(settings(server), target, prompts_folder, tmp_path, seed=1)
    log = tmp_path / ANSWERS_FILE
    log.write_bytes(log.read_bytes()[:-20])  # the kill came within a line
    kept = {answer.id for answer in read_answers(log)}
    assert len(kept) >= num_written - 1
    server.bodies.clear()
    regenerate.run(settings(server), target, prompts_folder, tmp_path, seed=1)
    answers = read_answers(log)
    check_whole(answers)
    again = {text_of(body["prompt"]).partition("?")[0].rpartition(" ")[2] for body in server.bodies}
    assert not again & {str(int(name[1:3])) for name in kept}


def test_failures_are_recorded_and_left_out(
    serve: Any, target: Target, prompts_folder: Path, tmp_path: Path
) -> None:
    server = serve("400", always=True)
    with pytest.raises(ValueError, match=r"fails to answer \(\{'http_400: .*max_failed_share.*run the same"):
        regenerate.run(settings(server), target, prompts_folder, tmp_path, seed=1)
    some = serve("400", "", "", always=True)
    regenerate.run(settings(some, max_failed_share=1.0), target, prompts_folder, tmp_path / "some", seed=1)
    answers = {answer.id for answer in read_answers(tmp_path / "some" / ANSWERS_FILE)}
    failed = {row["id"] for row in read_jsonl(tmp_path / "some" / FAILED_FILE)}
    assert failed and answers and not failed & answers
    assert len(failed | answers) == NUM_PROMPTS
    server.ways = ()
    regenerate.run(settings(server), target, prompts_folder, tmp_path, seed=1)  # the first run goes on
    check_whole(read_answers(tmp_path / ANSWERS_FILE))
    assert not (tmp_path / FAILED_FILE).exists()


def test_truncated_answers_can_be_left_out(
    serve: Any, target: Target, prompts_folder: Path, tmp_path: Path
) -> None:
    config = settings(serve(), keep_truncated=False)
    regenerate.run(config, target, prompts_folder, tmp_path, seed=1)
    assert [row["reason"] for row in read_jsonl(tmp_path / FAILED_FILE)] == ["truncated"] * 2
    assert len(read_answers(tmp_path / ANSWERS_FILE)) == NUM_PROMPTS - 2


def test_bad_servers_are_named_before_anything_is_asked(
    serve: Any, target: Target, prompts_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(serve())
    for key, value, message in (
        ("model", "other", r"openai\.model=other: the server has m: choose one"),
        ("base_url", "http://127.0.0.1:9/v1", r"base_url=.*no OpenAI-compatible server answers there"),
        ("api_key_env", "NO_SUCH_KEY", "api_key_env=NO_SUCH_KEY: this variable is not set"),
    ):
        with monkeypatch.context() as patch, pytest.raises(ValueError, match=message):
            patch.setattr(config.openai, key, value)
            regenerate.run(config, target, prompts_folder, tmp_path, seed=1)


def test_samples_are_mixed_by_weight(target: Target) -> None:
    cold, hot = SampleConfig(weight=1.0), SampleConfig(temperature=1.0, weight=3.0)
    config = RegenerateConfig(samples=[cold, hot], answers_per_prompt=2)
    drawn = Counter(i for number in range(1000) for i in regenerate._samples_of(f"p{number}", config))
    assert drawn.total() == 2000
    assert 400 < drawn[0] < 600


def test_shards_are_joined_by_the_last_one(
    serve: Any, target: Target, prompts_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve("dropped")
    for rank in (2, 0, 1):
        assert not (tmp_path / ANSWERS_FILE).exists()
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "3")
        regenerate.run(settings(server, shard="rank"), target, prompts_folder, tmp_path, seed=1)
    check_whole(read_answers(tmp_path / ANSWERS_FILE))
    facts = read_json(tmp_path / "manifest.json")["facts"]
    assert (facts["answers"], facts["parts"]) == (NUM_PROMPTS, 3)
    assert facts["finish_reasons"] == {"stop": 30, "length": 2}
    regenerate.run(settings(server), target, prompts_folder, tmp_path, seed=1)  # complete, by whomever


ENGINE = """
import json, sys
print("settings", sys.stdin.readline().strip(), file=sys.stderr)
print('{"id": -1}', flush=True)
for line in sys.stdin:
    task = json.loads(line)
    if task["prompt"] == [9]:
        sys.exit("RuntimeError: the engine broke")
    found = {"error": "too long"} if task["prompt"] == [8] else {
        "token_ids": task["prompt"] + [task["max_tokens"]], "finish_reason": "stop"}
    print(json.dumps({"id": task["id"], **found}), flush=True)
"""


def test_the_engine_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio
    import sys

    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    monkeypatch.setattr("slipstream.data.backends.offline_vllm.__file__", str(script))
    log = tmp_path / "log"

    def completer() -> VllmCompleter:
        return VllmCompleter(
            Path(sys.executable), {"model": "m"}, log, concurrency=4, stop_ids=[0], max_new_tokens=7
        )

    async def ask(*prompts: list[int]) -> list[Any]:
        async with completer() as engine:
            asked = [engine.complete(prompt, SampleConfig(), 1) for prompt in prompts]
            return await asyncio.gather(*asked, return_exceptions=True)

    first, refused = asyncio.run(ask([1, 2], [8]))
    assert (first.token_ids, first.finish_reason) == ((1, 2, 7), "stop")
    assert isinstance(refused, remote.FailedError)
    assert 'settings {"model": "m"}' in log.read_text()
    (broken,) = asyncio.run(ask([9]))
    assert isinstance(broken, ValueError) and "vllm stopped: RuntimeError: the engine broke" in str(broken)
    script.write_text("raise SystemExit('ImportError: no vllm')")
    with pytest.raises(ValueError, match="vllm stopped: ImportError: no vllm"):
        asyncio.run(ask([1]))
