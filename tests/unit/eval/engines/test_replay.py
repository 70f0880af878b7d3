"""An engine's answers against ours: equal when equal, else the first stage that differs."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slipstream.data.config import TargetConfig
from slipstream.data.target.resolve import resolve_target
from slipstream.data.template import stop_token_ids
from slipstream.data.types import Conversation, Message
from slipstream.drafters.config import DrafterConfig, resolve_geometry
from slipstream.eval.config import EvalConfig
from slipstream.eval.drafters.eagle import load_eagle
from slipstream.eval.engines.environment import engine_python, run_jobs
from slipstream.eval.engines.job import EngineAnswer, EngineResult, read_jobs, read_result, write_jobs
from slipstream.eval.engines.replay import Replay, _differing_drafts, compare, decode
from tests.heads import make_head, write_export

CONFIG = EvalConfig(num_draft_tokens=3, max_new_tokens=12)


@pytest.fixture(scope="module")
def replay(trained_target: Path, tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    target = resolve_target(TargetConfig(name=str(trained_target)))
    geometry = resolve_geometry(DrafterConfig(), target.config.to_dict())
    folder = tmp_path_factory.mktemp("head") / "export"
    export = write_export(folder, make_head(geometry), torch.arange(geometry.vocab_size))
    texts = ("Count from 1 to 5.", "Where does the red fox live?")
    chats = [
        Conversation(id=text, messages=(Message(role="user", content=text),) * (1 + (text[0] == "W")))
        for text in texts
    ]
    model = target.model()
    return decode(target, model, load_eagle(target, export), CONFIG, chats), model, target


def answered(ours: Replay) -> EngineResult:
    """What an engine that does the same would say."""
    answers = [
        dataclasses.replace(answer, rendered=prompt)
        for answer, prompt in zip(ours.result.answers, ours.prompts, strict=True)
    ]
    return dataclasses.replace(ours.result, answers=answers)


def test_every_turn_is_a_prompt(replay) -> None:  # type: ignore[no-untyped-def]
    ours, _, target = replay
    assert len(ours.prompts) == 3
    assert ours.prompts[2][: len(ours.prompts[1])] == ours.prompts[1]
    stops = stop_token_ids(target)
    for answer in ours.result.answers:
        assert len(answer.token_ids) <= CONFIG.max_new_tokens
        assert not set(answer.token_ids[:-1]) & set(stops)
        assert all(len(draft) == CONFIG.num_draft_tokens for draft in answer.drafts)
    assert ours.result.num_rounds == sum(len(answer.drafts) for answer in ours.result.answers)


def change_first(answers: list, **changes: object) -> list:  # type: ignore[type-arg]
    return [dataclasses.replace(answers[0], **changes), *answers[1:]]


def other_draft(depth: int) -> Callable[[EngineResult], EngineResult]:
    def changed(result: EngineResult) -> EngineResult:
        drafts = [list(draft) for draft in result.answers[0].drafts]
        drafts[0][depth] += 1
        return dataclasses.replace(result, answers=change_first(list(result.answers), drafts=drafts))

    return changed


CHANGES: dict[str, Callable[[EngineResult], EngineResult]] = {
    "prompt ids": lambda r: dataclasses.replace(r, answers=change_first(list(r.answers), rendered=[1, 2])),
    "first drafts": other_draft(0),
    "later drafts": other_draft(2),
    "token ids": lambda r: dataclasses.replace(
        r, answers=change_first(list(r.answers), token_ids=[1, *r.answers[0].token_ids[1:]])
    ),
    "acceptance": lambda r: dataclasses.replace(r, accepted_K=[n + 1 for n in r.accepted_K]),
}


@pytest.mark.parametrize("stage", [None, "captured states", "fc output", *CHANGES])
def test_the_first_difference_is_found(stage: str | None, replay, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    ours, model, _ = replay
    theirs = CHANGES.get(stage or "", lambda r: r)(answered(ours))
    factor = {"captured states": {"aux": 1.01}, "fc output": {"fc": 1.01}}.get(stage or "", {})
    states = {name: tensor * factor.get(name[-3:].lstrip("."), 1.0) for name, tensor in ours.states.items()}
    save_file({name: tensor.contiguous() for name, tensor in states.items()}, tmp_path / "s")
    found = compare(ours, theirs, tmp_path / "s", model)
    assert len(found) == 7
    assert [f.stage for f in found if not f.equal] == ([] if stage is None else [stage])


def test_answers_may_part_at_a_near_tie(replay, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    ours, model, _ = replay
    theirs = CHANGES["token ids"](answered(ours))
    monkeypatch.setattr("slipstream.eval.engines.replay.NEAR_TIE", 1e9)
    found = {f.stage: f for f in compare(ours, theirs, tmp_path / "none", model)}
    assert found["token ids"].equal
    assert "1 part at a near-tie" in found["token ids"].text


def test_rounds_are_compared_where_both_begin() -> None:
    """A later draft that differs moves the engine's next rounds, whose first drafts are still the same."""
    tokens = [5, 6, 7, 8, 9]
    ours = EngineAnswer(token_ids=tokens, drafts=[[6, 7], [9, 1]])
    theirs = EngineAnswer(token_ids=tokens, drafts=[[6, 3], [8, 9]])
    assert _differing_drafts([(ours, theirs)]) == ([], [0])
    assert _differing_drafts([(ours, ours)]) == ([], [])
    assert _differing_drafts([(theirs, ours)]) == ([], [0])


def test_jobs_and_results_survive_the_way(replay, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    ours, _, _ = replay
    job = ours.job(tmp_path, target="t", draft="d", config=CONFIG, stop_ids=(2,))
    write_jobs(tmp_path / "jobs", [job])
    assert read_jobs(tmp_path / "jobs") == [dataclasses.replace(job)]
    answered(ours).write(job)
    assert read_result(job) == answered(ours)


def test_an_engine_that_fails_says_why(replay, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """This environment has no vLLM."""
    job = replay[0].job(tmp_path, target="t", draft="d", config=CONFIG, stop_ids=(2,))
    with pytest.raises(ValueError, match=r"vllm stopped \(exit code 1\): .*No module named 'vllm'"):
        run_jobs("vllm", Path(sys.executable), [job], timeout=60)
    with pytest.raises(ValueError, match="engines.vllm_python=gone"):
        engine_python("vllm", "gone")
