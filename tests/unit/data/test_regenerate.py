"""Regeneration: the same bytes after any interruption, rows that do not see their neighbours."""

import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.data import regenerate
from slipstream.data.answers import ANSWERS_FILE
from slipstream.data.backends.hf import HFGenerator, choose
from slipstream.data.config import RegenerateConfig, SampleConfig, TargetConfig
from slipstream.data.conversations import read_answers
from slipstream.data.dialog import Answer
from slipstream.data.files import Stage, read_json
from slipstream.data.target.resolve import Target, resolve_target
from tests.tiny import make_tiny_target

GREEDY, HOT = SampleConfig(), SampleConfig(temperature=1.0, top_p=0.9)
MAX_NEW = 12
CONFIG = RegenerateConfig(
    samples=[GREEDY, HOT], max_new_tokens=MAX_NEW, batch_size=4, workers=1, max_prompt_tokens=100
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    path = make_tiny_target(tmp_path_factory.mktemp("target") / "tiny", initializer_range=0.3)
    return resolve_target(TargetConfig(name=str(path), device="cpu"))


@pytest.fixture(autouse=True)
def many_stop_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model hardly ever says its one stop token: rows shall end at different steps."""
    monkeypatch.setattr(regenerate, "stop_token_ids", lambda target: tuple(range(2, 300, 9)))


@pytest.fixture(scope="module")
def prompts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts")
    rows = []
    for i in range(10):
        messages = [{"role": "user", "content": f"Count from {i} to 9" + " again" * i}]
        if i % 3 == 0:
            messages.append({"role": "user", "content": "Where does the red fox live?"})
        rows.append({"id": f"p{i}", "category": "count", "messages": messages})
    rows.append({"id": "long", "category": "", "messages": [{"role": "user", "content": "owl " * 200}]})
    folder.joinpath("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Stage(folder, "prompts", {}).complete(["prompts.jsonl"])
    return folder


@pytest.fixture(scope="module")
def undisturbed(target: Target, prompts_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "regenerated"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regenerate, "stop_token_ids", lambda target: tuple(range(2, 300, 9)))
        regenerate.run(CONFIG, target, prompts_folder, folder, seed=1)
    return folder


def test_answers(undisturbed: Path, target: Target) -> None:
    answers = read_answers(undisturbed / ANSWERS_FILE)
    assert {answer.id for answer in answers} == {f"p{i}-{sample}" for i in range(10) for sample in (0, 1)}
    assert {turn.finish_reason for answer in answers for turn in answer.turns} == {"stop", "length"}
    for answer in answers:
        num_turns = 2 if answer.prompt_id in ("p0", "p3", "p6", "p9") else 1
        assert [message.role for message in answer.messages] == ["user", "assistant"] * num_turns
        assert [turn.text for turn in answer.turns] == [m.content for m in answer.messages[1::2]]
        for turn in answer.turns:
            ids = list(turn.token_ids)
            assert len(ids) == MAX_NEW if turn.finish_reason == "length" else len(ids) <= MAX_NEW
            kept = ids[:-1] if turn.finish_reason == "stop" else ids
            assert turn.text == target.tokenizer().decode(kept)
    facts = read_json(undisturbed / "manifest.json")["facts"]
    assert facts["answers"] == 20 and facts["left_out"] == {"prompt_too_long": 1}
    assert sum(facts["finish_reasons"].values()) == 28


@pytest.mark.parametrize("batches_done", [0, 1, 3])
@pytest.mark.parametrize("torn_bytes", [0, 30, 700])
def test_resume_gives_the_same_bytes(
    target: Target,
    prompts_folder: Path,
    undisturbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    batches_done: int,
    torn_bytes: int,
) -> None:
    generate, calls = HFGenerator.generate, []

    def interrupted(self: HFGenerator, prompts: Sequence[list[int]], *args: Any) -> list[Answer]:
        calls.append(len(prompts))
        if len(calls) > batches_done + 1:
            raise KeyboardInterrupt
        return generate(self, prompts, *args)

    folder = tmp_path / "regenerated"
    with monkeypatch.context() as patch:
        patch.setattr(HFGenerator, "generate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            regenerate.run(CONFIG, target, prompts_folder, folder, seed=1)
    log = folder / ANSWERS_FILE
    log.touch()
    log.write_bytes(log.read_bytes()[: -torn_bytes or None])
    assert not Stage(folder, "regenerated", read_json(folder / "manifest.json")["settings"]).is_complete
    regenerate.run(CONFIG, target, prompts_folder, folder, seed=1)
    assert log.read_bytes() == (undisturbed / ANSWERS_FILE).read_bytes()


def test_complete_stage_loads_nothing(
    target: Target, prompts_folder: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "model", None)
    regenerate.run(CONFIG, target, prompts_folder, undisturbed, seed=1)
    with pytest.raises(ValueError, match="seed: 1 there, 2 now"):
        regenerate.run(CONFIG, target, prompts_folder, undisturbed, seed=2)


def test_two_processes_refuse_each_other(target: Target, prompts_folder: Path, tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match="being written by another process"):
        regenerate.run(CONFIG, target, prompts_folder, tmp_path, seed=1)
    os.close(folder)


def test_no_prompt_fits(target: Target, prompts_folder: Path, tmp_path: Path) -> None:
    config = RegenerateConfig(max_prompt_tokens=1)
    with pytest.raises(ValueError, match=r"data\.regenerate.*max_prompt_tokens"):
        regenerate.run(config, target, prompts_folder, tmp_path, seed=1)


# The generator


PROMPTS = [[5, 6, 7], [5, 6, 7, 8, 9, 10, 11], [5, 6], [5, 6, 40, 41, 42], [5, 6, 7, 8]]


@pytest.fixture(scope="module")
def generator(target: Target) -> HFGenerator:
    return HFGenerator(target.model(), stop_ids=range(2, 300, 9), vocab_size=290, max_new_tokens=MAX_NEW)


@pytest.mark.parametrize("sampling", [GREEDY, HOT, SampleConfig(temperature=0.7, top_k=20)])
@pytest.mark.parametrize("prompts", [PROMPTS, [[3], [4, 5]]], ids=["common prefix", "none"])
def test_batch_equals_one_by_one(
    generator: HFGenerator, sampling: SampleConfig, prompts: list[list[int]]
) -> None:
    seeds = list(range(len(prompts)))
    together = generator.generate(prompts, sampling, seeds)
    alone = [
        generator.generate([prompt], sampling, [seed])[0] for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    assert together == alone


def test_greedy_equals_transformers(target: Target) -> None:
    model, size = target.model(), target.config.vocab_size
    ours = HFGenerator(model, stop_ids=range(2, 300, 9), vocab_size=size, max_new_tokens=MAX_NEW)
    for prompt, answer in zip(PROMPTS, ours.generate(PROMPTS, GREEDY, [0] * 5), strict=True):
        expected = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=MAX_NEW,
            do_sample=False,
            eos_token_id=list(range(2, 300, 9)),
            pad_token_id=0,
        )
        assert list(answer.token_ids) == expected[0, len(prompt) :].tolist()


def test_steps_are_reported(generator: HFGenerator) -> None:
    steps: list[tuple[int, int]] = []
    answers = generator.generate(PROMPTS, HOT, range(5), lambda made, ended: steps.append((made, ended)))
    assert sum(made for made, _ in steps) == sum(len(answer.token_ids) for answer in answers)
    assert sum(ended for _, ended in steps) == len(PROMPTS)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (SampleConfig(temperature=1.0), [0.4, 0.3, 0.2, 0.1]),
        (SampleConfig(temperature=1.0, top_p=0.65), [4 / 7, 3 / 7, 0, 0]),
        (SampleConfig(temperature=1.0, top_p=0.7), [4 / 7, 3 / 7, 0, 0]),
        (SampleConfig(temperature=1.0, top_p=0.05), [1, 0, 0, 0]),
        (SampleConfig(temperature=1.0, top_k=3), [4 / 9, 3 / 9, 2 / 9, 0]),
        (SampleConfig(temperature=1.0, top_k=2, top_p=0.5), [1, 0, 0, 0]),
        (SampleConfig(temperature=0.5), [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
    ],
)
def test_choose_draws_from_the_filtered_distribution(sampling: SampleConfig, expected: list[float]) -> None:
    num = 4000
    logits_BV = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(num, 4)
    drawn_B = choose(logits_BV, sampling, (torch.arange(num) + 0.5) / num)
    found = torch.bincount(drawn_B, minlength=4) / num
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32), rtol=0, atol=2e-3)


def test_top_p_of_a_flat_distribution_looks_further() -> None:
    uniform_B = (torch.arange(1000) + 0.5) / 1000
    drawn_B = choose(torch.zeros(1000, 2000), SampleConfig(temperature=1.0, top_p=0.5), uniform_B)
    assert len(set(drawn_B.tolist())) == 1000
