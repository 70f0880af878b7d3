"""The cost model on paper: its counts against a real head, and docs/scale.md against its output."""

import dataclasses

import pytest

from slipstream.drafters.eagle3 import Eagle3Head
from slipstream.scripts import scale
from tests.heads import make_geometry
from tests.tree import ROOT

SMALL = scale.Case(
    name="x", active=1e3, layers=3, hidden=32, vocab=60, ffn=48, kv=16, min_gpus=1
)  # fmt: skip


def test_weights_are_those_of_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "DRAFT_VOCAB", 40)
    head = Eagle3Head(make_geometry(num_attention_heads=2, num_key_value_heads=1))
    matrices = sum(p.numel() for p in head.parameters() if p.dim() > 1)
    assert SMALL.head == matrices


def test_flops_and_bytes_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NUM_UNROLL": 2, "SURVIVAL": 0.5, "SUPERVISED": 0.5, "PACK": 10}.items():
        monkeypatch.setattr(scale, name, value)
    monkeypatch.setattr(scale, "DRAFT_VOCAB", 40)
    # r_0 + r_1 = 0.5 + 0.25; fc 3 * 32^2 = 3072, layer 2*32*64 + 1024 + 3*32*48 = 9728, head 1280.
    step = 3 * (2 * (3072 + 0.75 * (9728 + 1280)) + 2 * 0.75 * 32 * 10) + 0.5 * 2 * 1280
    assert SMALL.step_flops() == pytest.approx(step)
    assert SMALL.target_flops() == pytest.approx(2e3 + 2 * 3 * 32 * 10 + 0.5 * 2 * 32 * 60)
    assert SMALL.feature_bytes() == 2 * 32 * 3.5


def test_states_of_the_worked_case() -> None:
    """FIELD_FAULTS: D=4096, 3+1 states, bfloat16, 1000 rows of 2048 tokens take 67.1 GB."""
    case = dataclasses.replace(SMALL, hidden=4096)
    all_supervised = case.feature_bytes() + 2 * 4096 * (1 - scale.SUPERVISED)
    assert all_supervised * 1000 * 2048 / 1e9 == pytest.approx(67.1, abs=0.05)


def test_a_slow_disk_becomes_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    case = scale.CASES[0]
    assert scale.limits(scale.step_seconds(case, 8)) == ("target", "step")
    monkeypatch.setattr(scale, "DISK", 1e9)
    assert scale.limits(scale.step_seconds(case, 8))[1] == "disk"
    monkeypatch.setattr(scale, "NETWORK", 1e6)
    assert scale.limits(scale.step_seconds(case, 8))[0] == "wire"


def test_one_gpu_reduces_nothing_and_two_nodes_cost_more_than_one() -> None:
    one, node, two = (scale.step_seconds(scale.CASES[0], n)["all-reduce"] for n in (1, 8, 16))
    assert one == 0 < node < two


def test_the_page_shows_what_is_computed(capsys: pytest.CaptureFixture[str]) -> None:
    scale.main()
    assert capsys.readouterr().out in (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
