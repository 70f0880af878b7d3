"""Several processes: the same answers in the same order, and a process that dies is told of."""

import json
import os
from pathlib import Path

import pytest

from slipstream.data import regenerate
from slipstream.data.answers import ANSWERS_FILE
from slipstream.data.backends.workers import OnStep, num_workers, ordered
from slipstream.data.config import RegenerateConfig, SampleConfig, TargetConfig
from slipstream.data.files import Stage
from slipstream.data.target.resolve import Target, resolve_target
from tests.tiny import make_tiny_target


class Dies:
    """Work that ends its process at the task 3."""

    def __init__(self, target: Target) -> None:
        self._name = target.name

    def __call__(self, task: int, on_step: OnStep) -> str:
        if task == 3:
            os._exit(1)
        on_step(5, 1)
        return f"{self._name} {task}"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    path = make_tiny_target(tmp_path_factory.mktemp("target") / "tiny", initializer_range=0.3)
    return resolve_target(TargetConfig(name=str(path), device="cpu"))


def test_two_processes_answer_as_one(target: Target, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    rows = [
        {"id": f"p{i}", "category": "", "messages": [{"role": "user", "content": f"Count from {i} to 9"}]}
        for i in range(9)
    ]
    prompts.joinpath("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Stage(prompts, "prompts", {}).complete(["prompts.jsonl"])
    answers = []
    for workers in (1, 2):
        config = RegenerateConfig(
            samples=[SampleConfig(), SampleConfig(temperature=1.0)],
            max_new_tokens=6,
            batch_size=2,
            max_prompt_tokens=100,
            workers=workers,
        )
        folder = tmp_path / f"by-{workers}"
        regenerate.run(config, target, prompts, folder, seed=1)
        answers.append((folder / ANSWERS_FILE).read_bytes())
    assert answers[0] == answers[1] and answers[0].count(b"\n") == 18


def test_a_dead_process_is_an_error_that_says_so(target: Target) -> None:
    steps: list[tuple[int, int]] = []
    done = []
    with pytest.raises(
        ValueError, match=r"a process of regenerate died.*data\.regenerate\.workers \(2 now\)"
    ):
        for result in ordered(Dies, target, [1, 2, 3], workers=2, on_step=lambda *step: steps.append(step)):
            done.append(result)
    assert set(done) <= {f"{target.name} 1", f"{target.name} 2"}


def test_no_more_processes_than_tasks(target: Target) -> None:
    assert num_workers(5, target, 3) == 3
    assert num_workers(0, target, 1) == 1
    assert num_workers(0, target, 1000) >= 1
