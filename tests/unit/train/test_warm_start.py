"""The closed-form start drafts what a linear target says."""

import pytest
import torch

from slipstream.data.batches import align, pack
from slipstream.data.types import HiddenStateSample
from slipstream.drafters.config import Init
from slipstream.drafters.eagle3 import Eagle3Head
from slipstream.train.config import LossConfig, UnrollConfig
from slipstream.train.ttt import Unroller, plan_unroll
from slipstream.train.warm_start import regression_start
from tests.heads import MemorySource, make_frozen, make_geometry


@pytest.mark.parametrize(
    "flags", [{}, {"fc_norm": True, "norm_output": True}, {"qk_norm": True}, {"num_layers": 2}]
)
def test_a_linear_target_is_drafted_at_once(flags: dict[str, object]) -> None:
    """The next state is a linear map of one captured state and of the next embedding."""
    geometry = make_geometry(draft_vocab_size=60, **flags)
    frozen = make_frozen(geometry)
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(2, 32, 32, generator=generator)
    embed = torch.nn.functional.rms_norm(frozen.embedding_VD, (32,))

    def document(name: str) -> HiddenStateSample:
        ids = torch.randint(60, (12,), generator=generator)
        aux = torch.randn(12, 3, 32, generator=generator) * torch.tensor([1.0, 5.0, 20.0])[:, None]
        state = aux[:, 2] / 20
        last = torch.zeros(12, 32)
        last[1:] = 0.5 * state[:-1] @ mix[0] + embed[ids[1:]] @ mix[1]
        mask = torch.tensor([0] * 3 + [1] * 9, dtype=torch.bool)
        normed = torch.nn.functional.rms_norm(last, (32,), frozen.norm_D)
        logits = normed @ frozen.lm_head_WD.T
        return HiddenStateSample(
            id=name,
            input_ids_T=ids,
            loss_mask_T=mask,
            aux_TLD=aux,
            last_hidden_PD=last[mask],
            argmax_P=logits.argmax(-1)[mask],
            logsumexp_P=logits.logsumexp(-1)[mask],
        )

    source = MemorySource([document(str(i)) for i in range(200)], [document(f"v{i}") for i in range(20)])
    head = Eagle3Head(geometry)
    head.initialise(Init.regression, lm_head_WD=frozen.lm_head_WD, norm_D=frozen.norm_D, seed=0)
    batch = pack([align(source.load(f"v{i}"), seed=0, epoch=0) for i in range(20)])
    plan = plan_unroll(batch, draft_ids_V=frozen.draft_ids_V, config=UnrollConfig(num_steps=1), chunk_rows=64)
    unroller = Unroller(head, frozen, LossConfig())

    def accept_rate() -> float:
        output = unroller(batch, plan, torch.ones(1))
        return float(output.correct_K[0] / output.num_rows_K[0])

    before = accept_rate()
    regression_start(head, source, frozen, num_documents=200)
    assert before < 0.2
    assert accept_rate() > 0.6
