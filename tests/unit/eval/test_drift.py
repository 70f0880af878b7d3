"""Drift: masses and sizes against a computation without caches; variants of suites."""

import pytest
import torch
from transformers import PreTrainedModel

from slipstream.data.states import recorded_states
from slipstream.data.target.model import load_model
from slipstream.data.target.toy import toy_tokenizer
from slipstream.data.template import render_prompt
from slipstream.data.types import Conversation, Message
from slipstream.drafters.config import DrafterConfig, Init, resolve_geometry
from slipstream.drafters.eagle3 import Eagle3Head
from slipstream.drafters.layers import DraftCache
from slipstream.eval.drafters.eagle import EagleModel
from slipstream.eval.drift import MAX_DEPTH, Drift, WatchedCache, drift_section, measure_drift
from slipstream.eval.robustness import PADDING, SYSTEM, TEMPLATE, tokenizer_of, with_variants
from tests.tiny import make_tiny_target

PROMPT, ANSWER = [1, 17, 5, 80], [44, 3, 100, 9, 60, 2, 8, 31, 77]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder = make_tiny_target(tmp_path_factory.mktemp("target") / "tiny", num_layers=4, tie=False)
    return load_model(folder, dtype=torch.float32, device=torch.device("cpu"))


def drafter(model: PreTrainedModel, **flags: bool) -> EagleModel:
    config = DrafterConfig(aux_layers=[1, 2, 3], **flags)  # type: ignore[arg-type]
    head = Eagle3Head(resolve_geometry(config, model.config.to_dict())).eval().requires_grad_(False)
    head.initialise(Init.random, lm_head_WD=torch.empty(0), norm_D=torch.empty(0), seed=3)
    for weight in head.parameters():
        weight.mul_(6)
    embedding: torch.Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    return EagleModel(head, embedding, torch.arange(model.config.vocab_size))


def test_masses_are_shares_and_norm_output_keeps_the_size(model: PreTrainedModel) -> None:
    texts = [(PROMPT, ANSWER), (PROMPT[:2], ANSWER)]
    plain = measure_drift(model, drafter(model), texts)
    normed = measure_drift(model, drafter(model, fc_norm=True, norm_output=True), texts)
    for drift in (plain, normed):
        for masses in zip(drift.first_K, drift.prompt_K, drift.answer_K, drift.own_K, strict=True):
            assert sum(masses) == pytest.approx(1.0, abs=1e-5)
        assert len(drift.rms_K) == MAX_DEPTH + 1
    # The norm's weights are all 6 here, so that is the size of the normed state.
    assert all(rms == pytest.approx(6.0, rel=1e-2) for rms in normed.rms_K)
    assert plain.rms_K[0] != pytest.approx(6.0, rel=1e-2)


def test_watching_changes_nothing_and_sees_what_attention_saw(model: PreTrainedModel) -> None:
    """The noted weights, applied to the values, give what the attention gave."""
    eagle = drafter(model)
    ids = torch.tensor([*PROMPT, *ANSWER])
    with torch.inference_mode(), recorded_states(model.get_decoder(), eagle.aux_layers) as states:
        model(input_ids=ids[None], use_cache=False)
        aux = [states[boundary][0, :-1] for boundary in eagle.aux_layers]
        logits = []
        for cache_type in (DraftCache, WatchedCache):
            eagle.cache_type = cache_type
            eagle.start(PROMPT, 32)
            logits.append(eagle.commit(ids[1:], aux))
        assert torch.equal(*logits)
        cache = eagle.cache
        assert isinstance(cache, WatchedCache)
        assert cache.weights_S.sum() == pytest.approx(1.0)
        geometry = eagle._head.geometry
        one = torch.ones(1, 1, geometry.num_key_value_heads, geometry.head_dim)
        query = torch.randn(1, 1, geometry.num_attention_heads, geometry.head_dim)
        seen = cache.attend(0, query, one, one, None)[0, 0].unflatten(0, (-1, geometry.head_dim)).mean(0)
        _, value_BMSH = cache.held(0, 1)
        assert geometry.num_key_value_heads == 1
        torch.testing.assert_close(cache.weights_S @ value_BMSH[0, 0], seen, atol=1e-5, rtol=1e-4)


def test_section_names_every_row() -> None:
    values = tuple(float(k) for k in range(MAX_DEPTH + 1))
    drift = Drift(rms_K=values, first_K=values, prompt_K=values, answer_K=values, own_K=values)
    text = drift_section({"head": drift})
    assert text.count("<svg") == 2
    assert "mass on prompt" in text


def test_variants_of_a_suite() -> None:
    prompt = Conversation(
        id="a", messages=(Message(role="user", content="Hi"), Message(role="user", content="And?"))
    )
    suites = with_variants({"own": [prompt]}, 8192)
    assert list(suites) == ["own", "own" + SYSTEM, "own" + TEMPLATE, "own" + PADDING]
    assert [m.role for m in suites["own" + SYSTEM][0].messages] == ["system", "user", "user"]
    padded = suites["own" + PADDING][0].messages
    assert padded[0].content.endswith("Hi")
    assert len(padded[0].content) > 1500
    assert padded[1].content == "And?"
    tokenizer = toy_tokenizer(300)
    messages = [Message(role="user", content="Hi")]
    other = render_prompt(tokenizer_of("own" + TEMPLATE, tokenizer), messages)
    assert tokenizer.decode(other) == "### User:\nHi\n\n### Assistant:\n"
    assert "im_start" in tokenizer.decode(render_prompt(tokenizer_of("own", tokenizer), messages))
