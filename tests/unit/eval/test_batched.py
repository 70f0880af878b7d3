"""Batched decoding: ragged acceptance gives what each sequence gives alone; the guard; the threshold."""

import dataclasses

import pytest
import torch
from transformers import PreTrainedModel

from slipstream.data.target.model import load_model
from slipstream.drafters.config import DrafterConfig, Init, resolve_geometry
from slipstream.drafters.eagle3 import Eagle3Head
from slipstream.eval.batched import BatchedDecoder, BatchedHead, Served
from slipstream.eval.decoder import SpeculativeDecoder
from slipstream.eval.drafters.eagle import EagleDrafter
from slipstream.eval.guard import SpeculationGuard, guard_at
from slipstream.eval.load import ALWAYS, LoadPoint, engine_settings, measure_load, threshold
from slipstream.eval.lossless import compare_answers
from slipstream.eval.verify import Sampling
from tests.tiny import make_tiny_target

NUM_SAMPLES = 256
PROMPTS = [[1, 17, 5, 80, 44, 3, 100], [2, 9], [7, 7, 7, 40], [120, 4, 99, 3, 3, 8, 1, 1, 6], [33, 50, 61]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder = make_tiny_target(
        tmp_path_factory.mktemp("target") / "tiny", num_layers=4, tie=False, initializer_range=0.08
    )
    return load_model(folder, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="module", params=[False], ids=["eagle3"])
def head(model: PreTrainedModel, request: pytest.FixtureRequest) -> Eagle3Head:
    """Knows the target's last state and head, so that it accepts some drafts and not others.

    With parameter True it is an EAGLE-3.1 head.
    """
    config = DrafterConfig(aux_layers=[1, 2, 4], fc_norm=request.param, norm_output=request.param)
    head = Eagle3Head(resolve_geometry(config, model.config.to_dict())).eval().requires_grad_(False)
    lm_head = model.get_output_embeddings()
    weight = torch.eye(model.config.hidden_size)
    weight = lm_head(weight).T.contiguous()  # a packed layer has no weight of its own
    head.initialise(Init.target, lm_head_WD=weight, norm_D=torch.ones(64), seed=3)
    return head


def embedding(model: PreTrainedModel) -> torch.Tensor:
    weight: torch.Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    return weight


def alone(model: PreTrainedModel, head: Eagle3Head, prompt: list[int], num: int, stop: list[int]):  # type: ignore[no-untyped-def]
    drafter = EagleDrafter(head, embedding(model), torch.arange(model.config.vocab_size))
    decoder = SpeculativeDecoder(model, drafter, num_draft_tokens=3, sampling=Sampling(), stop_ids=stop)
    return decoder.generate(prompt, num)


@pytest.mark.parametrize(("head", "max_batch"), [(False, 1), (False, 5), (True, 2)], indirect=["head"])
@pytest.mark.parametrize("stop", [[], [11, 40, 77, 130, 201, 250]])
def test_ragged_batches_equal_single_sequences(
    model: PreTrainedModel, head: Eagle3Head, max_batch: int, stop: list[int]
) -> None:
    results = [alone(model, head, prompt, 20, stop) for prompt in PROMPTS]
    drafter = BatchedHead(head, embedding(model), torch.arange(model.config.vocab_size))
    for guard in (ALWAYS, SpeculationGuard(off_above=2, on_at=1), SpeculationGuard(off_above=0, on_at=0)):
        decoder = BatchedDecoder(
            model,
            drafter,
            num_draft_tokens=3,
            max_batch=max_batch,
            max_new_tokens=20,
            guard=guard,
            stop_ids=stop,
        )
        served = decoder.serve(PROMPTS)
        assert served.answers == [list(result.token_ids) for result in results]
        if guard is ALWAYS and not stop:
            # Drafts are the same too: the single decoder limits only the last round of an answer.
            alone_accepted = sum(r.accepted for result in results for r in result.rounds)
            assert alone_accepted <= served.accepted <= alone_accepted + 3 * len(PROMPTS)
            assert 0 < alone_accepted < sum(r.drafted for result in results for r in result.rounds)
        if guard.off_above == 0:
            assert served.speculative_rounds == 0
        if guard.off_above == 2:
            assert 0 < served.speculative_rounds < served.rounds or max_batch > 2


@pytest.mark.parametrize("head", [True], indirect=True)
def test_sampled_batches_have_the_target_distribution(model: PreTrainedModel, head: Eagle3Head) -> None:
    """A ragged batch with drafts against one without; a colder one must be told apart."""
    sampling = Sampling(temperature=0.7, top_k=4)
    drafter = BatchedHead(head, embedding(model), torch.arange(model.config.vocab_size))

    def sample(num_drafts: int, seed: int, temperature: float = 0.7) -> Served:
        decoder = BatchedDecoder(
            model,
            drafter,
            num_draft_tokens=num_drafts,
            max_batch=32,
            max_new_tokens=4,
            guard=ALWAYS,
            sampling=dataclasses.replace(sampling, temperature=temperature),
        )
        return decoder.serve([PROMPTS[1]] * NUM_SAMPLES, torch.Generator().manual_seed(seed))

    plain, drafted, other = sample(0, 1), sample(2, 2), sample(2, 3, 0.05)
    assert 0.1 < (drafted.acceptance_length - 1) < 1.9

    def looks(served: Served) -> list[bool]:
        answers = [[tuple(answer) for answer in found.answers] for found in (plain, served)]
        return [look.accepted for look in compare_answers("p", *answers, 0.001)]

    assert all(looks(drafted))
    assert not all(looks(other))


def test_guard_has_hysteresis() -> None:
    guard = guard_at(8)
    assert (guard.off_above, guard.on_at) == (8, 6)
    assert [guard.update(depth) for depth in (8, 9, 8, 7, 6, 7, 9)] == [
        True,
        False,
        False,
        False,
        True,
        True,
        False,
    ]
    with pytest.raises(ValueError, match="on_at=9"):
        SpeculationGuard(off_above=8, on_at=9)


def point(size: int, gain: float) -> LoadPoint:
    return LoadPoint(
        batch_size=size,
        acceptance_length=gain,
        tokens_per_second=gain,
        plain_tokens_per_second=1.0,
        step_seconds=1.0,
        draft_seconds=0.2,
        verify_seconds=0.8,
    )


def test_threshold_and_engine_settings() -> None:
    assert threshold([point(8, 0.8), point(1, 1.6), point(4, 1.2)]) == 6
    assert threshold([point(1, 0.7)]) == 0
    assert threshold([point(1, 1.5), point(32, 1.1)]) is None
    vllm = engine_settings(6, num_draft_tokens=3, largest=32)["vllm"]
    assert "[[1, 6, 3], [7, 32, 0]]" in vllm
    assert "[[1, 32, 3]]" in engine_settings(None, num_draft_tokens=3, largest=32)["vllm"]
    assert "[[1, 32, 0]]" in engine_settings(0, num_draft_tokens=3, largest=32)["vllm"]


def test_load_curve(model: PreTrainedModel, head: Eagle3Head) -> None:
    drafter = BatchedHead(head, embedding(model), torch.arange(model.config.vocab_size))
    points = measure_load(model, drafter, PROMPTS, batch_sizes=[1, 3], num_draft_tokens=2, max_new_tokens=8)
    assert [p.batch_size for p in points] == [1, 3]
    assert all(p.speedup > 0 and p.expected_speedup > 0 and p.acceptance_length >= 1 for p in points)
