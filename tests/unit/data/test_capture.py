"""Capture: the right boundaries, no trace of batching or padding, resumable to the same bytes."""

import dataclasses
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.data import capture, states
from slipstream.data.cache import HiddenStateCache, shard_name
from slipstream.data.config import CaptureConfig, Dtype, Store, TeacherStore
from slipstream.data.files import Stage, file_hash, read_json
from slipstream.data.target.model import load_model
from slipstream.data.tokenize import TOKENS_FILE, as_table, write_tables
from slipstream.data.types import TokenizedSample

NUM_LAYERS = 4
AUX_LAYERS = (0, 2, 4)
LENGTHS = {"a": 3, "b": 17, "c": 9, "d": 16, "e": 9, "f": 30, "g": 5}
CONFIG = CaptureConfig(dtype=Dtype.float32, tokens_per_forward=40, tokens_per_shard=40)


def make_model(**overrides: object) -> LlamaForCausalLM:
    """A small Llama with random weights."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "tie_word_embeddings": False,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **overrides})).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.ndim > 1:
            parameter.normal_(std=0.3)
    return model


def make_sample(id: str, num_tokens: int, num_supervised: int) -> TokenizedSample:
    """Random tokens; the last ones are supervised."""
    generator = torch.Generator().manual_seed(ord(id))
    return TokenizedSample(
        id=id,
        input_ids_T=torch.randint(0, 50, (num_tokens,), generator=generator),
        loss_mask_T=torch.arange(num_tokens) >= num_tokens - num_supervised,
        split="validation" if id == "b" else "train",
    )


SAMPLES = [make_sample(id, length, length // 2) for id, length in LENGTHS.items()]


@dataclasses.dataclass
class TargetStub:
    """Stands for `Target`: a model that was not loaded from a file."""

    name: str = "stub"
    fingerprint: str = "1234"
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    loads: int = 0
    make: Callable[[], LlamaForCausalLM] = make_model

    @property
    def config(self) -> LlamaConfig:
        return self.make().config

    def model(self) -> LlamaForCausalLM:
        self.loads += 1
        return self.make()


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """A complete tokens stage; document b is the validation split."""
    return make_tokens(tmp_path / "tokens", SAMPLES)


def make_tokens(folder: Path, samples: Sequence[TokenizedSample]) -> Path:
    """A complete tokens stage."""
    stage = Stage(folder, "tokenize", {"max_length": 64})
    write_tables(folder / TOKENS_FILE, [as_table(samples)])
    stage.complete([TOKENS_FILE])
    return folder


def run(tokens: Path, folder: Path, config: CaptureConfig = CONFIG, target: TargetStub | None = None) -> None:
    capture.run(config, target or TargetStub(), AUX_LAYERS, tokens, folder)


def hashes(folder: Path) -> dict[str, str]:
    return {
        path.name: file_hash(path) for path in [*sorted(folder.glob("*.safetensors")), folder / "index.json"]
    }


def test_marked_layers() -> None:
    """Layer i adds 1 to a residual that starts at 0: boundary b must read b, the last one un-normed."""
    model = make_model(mlp_bias=True)
    for parameter in model.model.parameters():
        parameter.zero_()
    for layer in model.model.layers:
        layer.mlp.down_proj.bias.fill_(1.0)
    # Token 0 wins after one norm (0.5 against 0.4), token 1 if the norm is applied twice.
    model.model.norm.weight.fill_(1.0)
    model.model.norm.weight[0] = 0.5
    model.lm_head.weight.zero_()
    model.lm_head.weight[0, 0], model.lm_head.weight[1, 1] = 1.0, 0.4

    boundaries = tuple(range(NUM_LAYERS + 1))
    for sample in capture.capture_batch(model, SAMPLES, boundaries, torch.float32):
        expected_L = torch.arange(NUM_LAYERS + 1.0)
        assert torch.equal(sample.aux_TLD, expected_L[None, :, None].expand_as(sample.aux_TLD))
        assert torch.equal(sample.last_hidden_PD, torch.full_like(sample.last_hidden_PD, NUM_LAYERS))
        assert (sample.argmax_P == 0).all()
        normed_PD = model.model.norm(sample.last_hidden_PD)
        assert torch.equal(model.lm_head(normed_PD).argmax(-1), sample.argmax_P)
        assert (model.lm_head(model.model.norm(normed_PD)).argmax(-1) == 1).all()


def test_cache_equals_one_plain_forward_per_document(tokens: Path, tmp_path: Path) -> None:
    run(tokens, tmp_path / "states")
    cache = HiddenStateCache(tmp_path / "states")
    assert [row.id for row in cache.rows("train")] == ["a", "c", "d", "e", "f", "g"]
    assert [row.id for row in cache.rows("validation")] == ["b"]
    assert len(list((tmp_path / "states").glob("*.safetensors"))) > 1
    model = make_model()
    for sample in SAMPLES:
        loaded = cache.load(sample.id)
        plain = model(sample.input_ids_T[None], output_hidden_states=True)
        mask_T = sample.loss_mask_T
        assert torch.equal(loaded.input_ids_T, sample.input_ids_T)
        assert torch.equal(loaded.loss_mask_T, mask_T)
        for i, boundary in enumerate(AUX_LAYERS[:-1]):
            torch.testing.assert_close(
                loaded.aux_TLD[:, i], plain.hidden_states[boundary][0], rtol=1e-5, atol=1e-5
            )
        assert torch.equal(loaded.aux_TLD[mask_T, -1], loaded.last_hidden_PD)
        normed_PD = model.model.norm(loaded.last_hidden_PD)
        torch.testing.assert_close(normed_PD, plain.hidden_states[-1][0, mask_T], rtol=1e-5, atol=1e-5)
        logits_PV = plain.logits[0, mask_T]
        assert torch.equal(loaded.argmax_P, logits_PV.argmax(-1))
        torch.testing.assert_close(loaded.logsumexp_P, logits_PV.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_logits_in_chunks_equal_logits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    at_once = capture.capture_batch(model, SAMPLES, AUX_LAYERS, torch.float32)
    monkeypatch.setattr(states, "HEAD_ROWS", 4)
    for one, other in zip(
        at_once, capture.capture_batch(model, SAMPLES, AUX_LAYERS, torch.float32), strict=True
    ):
        assert torch.equal(one.argmax_P, other.argmax_P)
        torch.testing.assert_close(one.logsumexp_P, other.logsumexp_P)


def test_interrupted_run_ends_with_the_same_bytes(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tokens, tmp_path / "whole")
    batches = []
    real = capture.capture_batch

    def count(*args: object) -> object:
        batches.append(args)
        if len(batches) == stop_at:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(capture, "capture_batch", count)
    stop_at = 3
    folder = tmp_path / "interrupted"
    with pytest.raises(KeyboardInterrupt):
        run(tokens, folder)
    assert read_json(folder / "manifest.json")["files"] is None
    assert not (folder / "index.json").exists()
    # As if it was killed between a shard and its record, and in the middle of the next shard.
    (folder / "shard-00001.json").unlink()
    (folder / ".shard-00002.safetensors.1.tmp").touch()
    batches, stop_at = [], 0
    run(tokens, folder)
    num_batches = sum(map(len, capture.plan_shards(SAMPLES, 40, 40)))
    assert len(batches) == num_batches - 1
    assert hashes(folder) == hashes(tmp_path / "whole")
    assert not list(folder.glob(".*.tmp"))


def test_complete_stage_loads_no_model_and_a_lost_shard_is_made_again(tokens: Path, tmp_path: Path) -> None:
    folder, target = tmp_path / "states", TargetStub()
    run(tokens, folder, target=target)
    before = hashes(folder)
    run(tokens, folder, target=target)
    assert target.loads == 1
    (folder / shard_name(1)).unlink()
    run(tokens, folder, target=target)
    assert target.loads == 2
    assert hashes(folder) == before


@pytest.mark.parametrize(
    ("config", "target", "field"),
    [
        (dataclasses.replace(CONFIG, dtype=Dtype.bfloat16), TargetStub(), "dtype"),
        (CONFIG, TargetStub(fingerprint="5678"), "target_fingerprint"),
    ],
)
def test_other_settings_are_refused_by_name(
    tokens: Path, tmp_path: Path, config: CaptureConfig, target: TargetStub, field: str
) -> None:
    run(tokens, tmp_path / "states")
    with pytest.raises(ValueError, match=f"made with other settings .{field}: "):
        run(tokens, tmp_path / "states", config=config, target=target)


def test_too_large_a_cache_is_refused_before_the_model_is_loaded(
    tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = TargetStub()
    with pytest.raises(ValueError, match=r"data\.capture\.max_gib=1e-07"):
        run(tokens, tmp_path / "states", dataclasses.replace(CONFIG, max_gib=1e-7), target)
    assert target.loads == 0
    assert not (tmp_path / "states").exists()
    assert "7 documents, 89 tokens, 42 supervised: 0.00 GB" in capsys.readouterr().err


def test_estimate_is_the_size_on_disk(tokens: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, tokens_per_shard=10_000)
    run(tokens, tmp_path / "states", config)
    facts = read_json(tmp_path / "states" / "manifest.json")["facts"]
    on_disk = os.path.getsize(tmp_path / "states" / shard_name(0))
    assert 0 < on_disk - facts["bytes"] < 1000
    assert (facts["tokens"], facts["supervised_tokens"]) == (89, 42)


@pytest.mark.parametrize("value", [70000.0, float("nan")])
def test_value_that_does_not_fit_is_named(value: float) -> None:
    model = make_model()
    # Token 49 occurs in the middle document only; its state before layer 0 is its embedding.
    samples = [make_sample(id, 6, 3) for id in "xyz"]
    for sample in samples:
        sample.input_ids_T.clamp_(max=48)
    samples[1].input_ids_T[5] = 49
    model.model.embed_tokens.weight[49, 7] = value
    message = rf"sample y: the state at boundary 0 holds {value:g}, which torch\.float16 cannot store"
    with pytest.raises(ValueError, match=message):
        capture.capture_batch(model, samples, AUX_LAYERS, torch.float16)


def test_batch_without_supervised_tokens() -> None:
    sample = make_sample("a", 5, 0)
    (captured,) = capture.capture_batch(make_model(), [sample], AUX_LAYERS, torch.bfloat16)
    assert captured.aux_TLD.shape == (5, 3, 32)
    assert captured.last_hidden_PD.shape == (0, 32)
    assert captured.argmax_P.shape == captured.logsumexp_P.shape == (0,)


def test_no_supervised_token_is_refused(tmp_path: Path) -> None:
    tokens = make_tokens(tmp_path / "tokens", [make_sample("a", 5, 0)])
    with pytest.raises(ValueError, match="tokens holds no supervised token"):
        run(tokens, tmp_path / "states")


def test_plan_keeps_to_its_limits() -> None:
    for samples in (SAMPLES, SAMPLES[::-1]):
        shards = capture.plan_shards(samples, tokens_per_forward=20, tokens_per_shard=30)
        ids = [[[sample.id for sample in batch] for batch in shard] for shard in shards]
        assert ids == [[["f"]], [["b"]], [["d"]], [["c", "e"], ["g", "a"]]]


def test_top_tokens_are_those_of_the_logits(tokens: Path, tmp_path: Path) -> None:
    run(tokens, tmp_path / "whole")
    small = dataclasses.replace(CONFIG, teacher=TeacherStore.topk, topk=5)
    run(tokens, tmp_path / "small", small)
    whole, cache = HiddenStateCache(tmp_path / "whole"), HiddenStateCache(tmp_path / "small")
    model = make_model()
    for sample in SAMPLES:
        exact, found = whole.load(sample.id), cache.load(sample.id)
        log_probs_PV = model.lm_head(model.model.norm(exact.last_hidden_PD)).log_softmax(-1)
        assert torch.equal(found.argmax_P, exact.argmax_P)
        assert torch.equal(found.aux_TLD, exact.aux_TLD)
        wanted_PE = log_probs_PV.gather(1, found.top_ids_PE)
        torch.testing.assert_close(found.top_log_probs_PE, wanted_PE, rtol=0.02, atol=0.02)
        assert (log_probs_PV.topk(5).values[:, -1:] <= wanted_PE + 1e-4).all()


@pytest.mark.parametrize("store", [Store.int8, Store.fp8])
def test_estimate_of_a_small_cache_is_its_size(tokens: Path, tmp_path: Path, store: Store) -> None:
    config = dataclasses.replace(
        CONFIG, store=store, teacher=TeacherStore.topk, topk=4, tokens_per_shard=10_000
    )
    run(tokens, tmp_path / "states", config)
    facts = read_json(tmp_path / "states" / "manifest.json")["facts"]
    on_disk = os.path.getsize(tmp_path / "states" / shard_name(0))
    assert 0 < on_disk - facts["bytes"] < 1000
    with pytest.raises(ValueError, match=r"other settings .store: 'int8'|other settings .store: 'fp8'"):
        run(tokens, tmp_path / "states", dataclasses.replace(config, store=Store.bf16))


def test_ranks_make_the_cache_of_one_process(tokens: Path, tmp_path: Path) -> None:
    run(tokens, tmp_path / "one")
    meet, folder = threading.Barrier(3), tmp_path / "three"
    models = [make_model() for _ in range(3)]  # here, because threads share random numbers
    targets = [TargetStub(make=lambda model=model: model) for model in models]  # type: ignore[misc]

    def work(rank: int) -> None:
        ranks = capture.Ranks(rank=rank, world_size=3, barrier=lambda: meet.wait(20) and None)
        capture.run(CONFIG, targets[rank], AUX_LAYERS, tokens, folder, ranks=ranks)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    assert [target.loads for target in targets] == [1, 1, 1]
    assert hashes(folder) == hashes(tmp_path / "one")
    # A damaged shard of another rank is not taken for a whole one.
    content = bytearray((folder / shard_name(1)).read_bytes())
    content[-1] ^= 1
    (folder / shard_name(1)).write_bytes(content)
    (folder / shard_name(2)).unlink()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    assert hashes(folder) == hashes(tmp_path / "one")


def test_a_spread_model_gives_the_same_states(tiny_target: Path) -> None:
    """Its layers lie where accelerate puts them; hooks still see what enters them."""
    plain, spread = (
        load_model(tiny_target, dtype=torch.float32, device=torch.device("cpu"), spread=spread)
        for spread in (False, True)
    )
    for one, other in zip(
        *(states.capture_batch(model, SAMPLES, AUX_LAYERS, torch.float32) for model in (plain, spread)),
        strict=True,
    ):
        assert torch.equal(one.aux_TLD, other.aux_TLD)
        assert torch.equal(one.argmax_P, other.argmax_P)
