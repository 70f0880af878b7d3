"""Real vLLM gives the states that our own forward pass gives, at the boundaries that were asked for."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from slipstream.data.backends.vllm_capture import VllmCapture
from slipstream.data.config import TargetConfig
from slipstream.data.states import capture_batch
from slipstream.data.target.resolve import resolve_target
from slipstream.data.types import TokenizedSample
from slipstream.eval.engines.environment import engine_python
from tests.tiny import make_tiny_target

pytestmark = [pytest.mark.engine, pytest.mark.timeout(170)]
NUM_LAYERS = 8
BOUNDARIES = tuple(range(1, NUM_LAYERS + 1))
LENGTHS = (40, 3, 17)


def make_samples(vocab: int) -> list[TokenizedSample]:
    generator = torch.Generator().manual_seed(0)
    return [
        TokenizedSample(
            id=str(length),
            input_ids_T=torch.randint(vocab, (length,), generator=generator),
            loss_mask_T=torch.arange(length) >= length // 2,
        )
        for length in LENGTHS
    ]


def mark(folder: Path) -> None:
    """Layer i adds 1 to a residual that starts at 0; only one norm before the head makes token 0 win."""
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for layer in model.model.layers:
            layer.mlp.down_proj.bias.fill_(1.0)
        model.model.norm.weight.fill_(1.0)
        model.model.norm.weight[0] = 0.5
        model.lm_head.weight[0, 0], model.lm_head.weight[1, 1] = 1.0, 0.4
    model.save_pretrained(folder)


@pytest.mark.parametrize("marked", [True, False])
def test_vllm_reads_the_same_boundaries(marked: bool, tmp_path: Path) -> None:
    folder = make_tiny_target(tmp_path / "target", num_layers=NUM_LAYERS, tie=False, mlp_bias=True)
    if marked:
        mark(folder)
    target = resolve_target(TargetConfig(name=str(folder)))
    samples = make_samples(target.config.vocab_size)
    with VllmCapture(
        target,
        engine_python("vllm"),
        BOUNDARIES,
        tokens_per_forward=128,
        max_tokens=max(LENGTHS),
        dtype=torch.float32,
        topk=0,
        log=tmp_path / "vllm.log",
    ) as capture:
        found = capture(samples)
    wanted = capture_batch(target.model(), samples, BOUNDARIES, torch.float32)
    for ours, theirs, sample in zip(wanted, found, samples, strict=True):
        assert torch.equal(theirs.loss_mask_T, sample.loss_mask_T)
        if marked:
            exact_L = torch.arange(1.0, NUM_LAYERS + 1)
            assert torch.equal(theirs.aux_TLD, exact_L[None, :, None].expand_as(theirs.aux_TLD))
            assert (theirs.argmax_P == 0).all()
        else:
            torch.testing.assert_close(theirs.aux_TLD, ours.aux_TLD, rtol=1e-4, atol=1e-4)
            assert torch.equal(theirs.argmax_P, ours.argmax_P)
        torch.testing.assert_close(theirs.last_hidden_PD, ours.last_hidden_PD, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(theirs.logsumexp_P, ours.logsumexp_P, rtol=1e-4, atol=1e-4)
