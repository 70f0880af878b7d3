"""EAGLE-1 and Medusa: what they are trained on is what they decode with; the losses by hand."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from slipstream.data.batches import align, pack
from slipstream.data.files import read_json, write_json
from slipstream.data.target.weights import TargetHeadWeights
from slipstream.data.types import DraftBatch
from slipstream.drafters.checkpoint_format import CONFIG, WEIGHTS, write_weights
from slipstream.drafters.config import Init
from slipstream.drafters.eagle1 import Eagle1Head, eagle1_config, read_eagle1
from slipstream.drafters.medusa import MedusaHeads, medusa_config, medusa_tensors, read_medusa
from slipstream.eval.drafters.eagle1 import FeatureModel
from slipstream.eval.drafters.medusa import MedusaDraftModel
from slipstream.train.config import UnrollConfig
from slipstream.train.rivals import Eagle1Unroller, MedusaUnroller, _document_mask
from slipstream.train.ttt import FrozenTarget, plan_unroll
from tests.heads import DRAFT_VOCAB, make_frozen, make_geometry, make_sample

MASKS = [[0] * 4 + [1] * 9, [0] * 2 + [1] * 6 + [0] * 3 + [1] * 5, [0] * 6]
GEOMETRY = make_geometry(aux_layers=(5,))
MEDUSA = make_geometry(aux_layers=(5,), num_heads=3, num_layers=2)


def batch() -> DraftBatch:
    samples = [make_sample(str(i), mask, geometry=GEOMETRY, seed=i) for i, mask in enumerate(MASKS)]
    return pack([align(sample, seed=0, epoch=0) for sample in samples])


PLAN = plan_unroll(  # not read: these heads choose their rows themselves
    batch(), draft_ids_V=make_frozen(GEOMETRY).draft_ids_V, config=UnrollConfig(num_steps=1), chunk_rows=8
)


def filled(head: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(0.2 * torch.empty(parameter.shape).normal_(generator=generator))
    return head


def feature(states: torch.Tensor, frozen: FrozenTarget) -> torch.Tensor:
    return F.rms_norm(states, (states.shape[-1],), frozen.norm_D, frozen.norm_eps)


def served(frozen: FrozenTarget) -> TargetHeadWeights:
    return TargetHeadWeights(
        embedding_VD=frozen.embedding_VD,
        norm_D=frozen.norm_D,
        lm_head_VD=frozen.embedding_VD,
        norm_eps=frozen.norm_eps,
    )


def test_eagle1_trains_what_it_decodes() -> None:
    """The first drafted logits over a cache equal those of the same row in a packed pass."""
    head, frozen, rows = filled(Eagle1Head(GEOMETRY)), make_frozen(GEOMETRY), batch()
    assert isinstance(head, Eagle1Head)
    mask = _document_mask(rows)

    def attend(query, key, value):  # type: ignore[no-untyped-def]
        states = (x.transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(*states, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)

    embed = F.embedding(rows.token_T, frozen.embedding_VD)
    features = feature(rows.aux_TLD[:, -1], frozen)
    with torch.no_grad():
        packed = head(embed[None], features[None], rows.position_T[None], attend)[0]
        for document in (0, 1):
            first, end = rows.document_starts[document], rows.document_starts[document + 1]
            model = FeatureModel(head, served(frozen))
            model.start([0], 64)
            for start, stop in ((first, first + 3), (first + 3, end)):
                logits = model.commit(rows.token_T[start:stop], [rows.aux_TLD[start:stop, -1]])
                expected = F.linear(packed[stop - 1], frozen.embedding_VD)
                torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)
                # Two children of one token: each is as if it were alone.
                own, nothing = torch.eye(2, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)
                both = model.extend(torch.tensor([3, 8]), torch.tensor([0, 0]), own, 1)
                alone = FeatureModel(head, served(frozen))
                alone.start([0], 64)
                alone.commit(rows.token_T[first:stop], [rows.aux_TLD[first:stop, -1]])
                second = alone.extend(torch.tensor([8]), nothing, own[:1, :1], 1)
                torch.testing.assert_close(both[1], second[0], atol=1e-4, rtol=1e-4)


def test_eagle1_loss_by_hand() -> None:
    head, frozen, rows = filled(Eagle1Head(GEOMETRY)), make_frozen(GEOMETRY), batch()
    assert isinstance(head, Eagle1Head)
    unroller = Eagle1Unroller(head, frozen).eval()
    output = unroller(rows, PLAN, torch.tensor([0.5, 0.25]))
    again = unroller(rows, PLAN, torch.tensor([0.5, 0.25]))
    assert torch.equal(output.loss, again.loss)
    assert output.num_rows_K.tolist() == [float((rows.num_live_T > 0).sum()), 0.0]
    torch.testing.assert_close(output.loss, output.loss_sum_K[0] * 0.5)
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in head.parameters())
    noisy = Eagle1Unroller(head, frozen).train()
    assert not torch.equal(noisy(rows, PLAN, torch.ones(1)).loss, output.loss_sum_K[0])
    assert torch.equal(noisy(rows, PLAN, torch.ones(1)).loss, noisy(rows, PLAN, torch.ones(1)).loss), (
        "the noise follows from the documents"
    )


def test_medusa_loss_and_decoding_by_hand() -> None:
    heads, frozen, rows = filled(MedusaHeads(MEDUSA)), make_frozen(MEDUSA), batch()
    assert isinstance(heads, MedusaHeads)
    output = MedusaUnroller(heads, frozen, survival=1.0)(rows, PLAN, torch.tensor([1.0, 0.8, 0.64]))
    wanted = torch.zeros(3)
    for k in range(3):
        for t in (rows.num_live_T > k).nonzero()[:, 0].tolist():
            teacher = rows.teacher_T[t + k]
            if frozen.draft_ids_V[rows.argmax_P[teacher]] < 0:
                continue
            target = F.linear(feature(rows.last_hidden_PD[teacher], frozen), frozen.lm_head_WD).softmax(-1)
            state = feature(rows.aux_TLD[t, -1], frozen)
            for layer in heads.blocks[k].layers:  # type: ignore[union-attr]
                state = state + F.silu(F.linear(state, layer.weight))  # type: ignore[union-attr, arg-type]
            wanted[k] -= (target * F.linear(state, heads.lm_head.weight).log_softmax(-1)).sum()
    torch.testing.assert_close(output.loss_sum_K, wanted.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(output.loss, (wanted * torch.tensor([1.0, 0.8, 0.64])).sum())
    model = MedusaDraftModel(heads, torch.arange(DRAFT_VOCAB), served(frozen))
    with torch.no_grad():
        first = model.commit(rows.token_T[:3], [rows.aux_TLD[:3, -1]])
        torch.testing.assert_close(first[0], heads(0, feature(rows.aux_TLD[2, -1], frozen)))
        second = model.extend(torch.tensor([1, 2]), torch.tensor([0, 0]), torch.eye(2).bool(), 1)
        torch.testing.assert_close(second[1], heads(1, feature(rows.aux_TLD[2, -1], frozen)))


def test_survival_keeps_fewer_rows() -> None:
    heads, frozen, rows = MedusaHeads(MEDUSA), make_frozen(MEDUSA), batch()
    heads.initialise(Init.target, lm_head_WD=frozen.lm_head_WD, norm_D=frozen.norm_D, seed=0)
    output = MedusaUnroller(heads, frozen, survival=0.5)(rows, PLAN, torch.ones(3))
    kept = (rows.num_live_T > 1) & (rows.survival_T < 0.5)
    assert output.num_rows_K[1] == kept.sum()


def test_bundles_are_read_back_and_broken_ones_refused(tmp_path: Path) -> None:
    head, heads = filled(Eagle1Head(GEOMETRY)), filled(MedusaHeads(MEDUSA))
    one, two = tmp_path / "one", tmp_path / "two"
    write_json(one / CONFIG, eagle1_config(GEOMETRY, bos=0, eos=1, dtype=torch.float32))
    write_weights(one / WEIGHTS, dict(head.state_dict()))
    write_json(two / CONFIG, medusa_config(MEDUSA, dtype=torch.float32))
    ids = torch.arange(DRAFT_VOCAB) + 3
    write_weights(two / WEIGHTS, medusa_tensors(dict(heads.state_dict()), ids, MEDUSA.vocab_size))
    for name, tensor in read_eagle1(one).state_dict().items():
        assert torch.equal(tensor, head.state_dict()[name])
    back = read_medusa(two)
    assert torch.equal(back.target_ids_W, ids)
    for name, tensor in back.heads.state_dict().items():
        assert torch.equal(tensor, heads.state_dict()[name])
    tensors = medusa_tensors(dict(heads.state_dict()), ids, MEDUSA.vocab_size)
    assert {"blocks.0.layers.0.weight", "blocks.2.layers.1.weight", "token_map"} <= set(tensors)
    # vLLM does not get as far as the map: a row for every token, and none outside the map ever wins.
    states = torch.randn(500, MEDUSA.hidden_size, generator=torch.Generator().manual_seed(1))
    drafted = F.linear(states, tensors["lm_heads.0.weight"]).argmax(-1)
    assert torch.equal(drafted, ids[back.heads.lm_head(states).argmax(-1)])
    assert read_json(two / CONFIG)["truncated_vocab_size"] == MEDUSA.vocab_size
    broken = dict(head.state_dict())
    del broken["fc.weight"]
    write_weights(one / WEIGHTS, broken | {"lm_head.weight": torch.zeros(2, 2)})
    with pytest.raises(ValueError, match="fc.weight.*missing.*lm_head.weight"):
        read_eagle1(one)
