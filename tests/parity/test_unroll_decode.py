"""The module that trains is the module that decodes: unrolled logits equal step-by-step logits."""

from dataclasses import replace

import pytest
import torch

from slipstream.data.batches import align, pack
from slipstream.drafters.layers import DraftCache
from slipstream.train.config import OutsideVocab, UnrollConfig
from slipstream.train.ttt import plan_unroll, unroll
from tests.heads import make_frozen, make_geometry, make_head, make_sample

NUM_STEPS = 7
MASKS = [
    [0] * 5 + [1] * 20 + [0] * 3,
    [0] * 2 + [1] * 9,
    [0] * 3 + [1] * 6 + [0] * 4 + [1] * 12,
    [0] * 6,
]
FLAGS = [
    {},
    {"fc_norm": True, "norm_output": True},
    {"norm_before_fc": True},
    {"norm_before_residual": True},
    {"qk_norm": True},
    {"num_layers": 2},
    {"num_layers": 3, "qk_norm": True, "norm_output": True, "norm_before_residual": True},
    {"aux_layers": (2, 5)},
    {"aux_layers": (1, 2, 4, 5, 7), "fc_norm": True},
    {"aux_layers": (1, 2, 4, 5, 7), "norm_before_fc": True, "draft_vocab_size": 60},
    {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
]


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("survival", [1.0, 0.7])
def test_unrolled_logits_equal_cached_decoding(flags: dict[str, object], survival: float) -> None:
    geometry = make_geometry(**flags)
    head, frozen = make_head(geometry), make_frozen(geometry)
    samples = [make_sample(str(i), m, geometry=geometry, seed=i) for i, m in enumerate(MASKS)]
    batch = pack([align(sample, seed=0, epoch=0) for sample in samples])
    config = UnrollConfig(num_steps=NUM_STEPS, outside_vocab=OutsideVocab.renormalise)
    plan = plan_unroll(
        batch, draft_ids_V=frozen.draft_ids_V, config=replace(config, survival=survival), chunk_rows=8
    )
    compared = 0
    with torch.no_grad():
        outs = unroll(head, batch, plan, frozen.embedding_VD)
        for k, (step, out_RD) in enumerate(zip(plan.steps, outs, strict=True)):
            for i, row in enumerate(step.rows.row_R.tolist()):
                document = sum(row >= start for start in batch.document_starts) - 1
                t = row - batch.document_starts[document]
                expected = _decode(head, samples[document], frozen.embedding_VD, t, k)
                torch.testing.assert_close(head.logits(head.norm(out_RD[i])), expected, atol=1e-5, rtol=0)
                compared += 1
    assert len(plan.steps) == NUM_STEPS
    assert compared > 100 * survival


def _decode(head, sample, embedding_VD, t: int, k: int) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """Logits of draft step k when a server holds states up to t, fed with the data tokens."""
    cache = DraftCache(1, 64, head.geometry, torch.device("cpu"), torch.float32)
    ids = sample.input_ids_T
    carried, final = head(
        embedding_VD[ids[1 : t + 2]][None],
        head.fuse(sample.aux_TLD[: t + 1])[None],
        torch.arange(t + 1)[None],
        cache,
    )
    carried, final = carried[:, -1:], final[:, -1:]
    for j in range(1, k + 1):
        embed = embedding_VD[ids[t + 1 + j]][None, None]
        carried, final = head(embed, carried, torch.tensor([[t + j]]), cache)
    return head.logits(final[0, 0])
