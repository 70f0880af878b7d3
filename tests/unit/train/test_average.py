"""The average of the weights, by hand."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from slipstream.train import average
from slipstream.train.average import Average
from slipstream.train.checkpoint import HEAD


def make(value: float, dtype: torch.dtype = torch.float32) -> nn.Linear:
    head = nn.Linear(1, 1, bias=False, dtype=dtype)
    nn.init.constant_(head.weight, value)
    return head


def test_a_short_average_becomes_a_long_one() -> None:
    """Decay 1/11 after step 1, then 1/6, at most the one asked for; kept in float32."""
    head = make(0.0, torch.bfloat16)
    mean = Average(head, 0.12)
    nn.init.constant_(head.weight, 1.0)
    mean.update(1)
    assert mean.head.weight.item() == pytest.approx(10 / 11)
    mean.update(2)
    assert mean.head.weight.item() == pytest.approx(1 - 0.12 / 11)
    assert mean.head.weight.dtype is torch.float32


def test_in_place_and_back() -> None:
    head = make(0.3)
    mean = Average(head, 0.5)
    nn.init.constant_(head.weight, 0.7)
    before = head.weight.detach().clone()
    with pytest.raises(RuntimeError, match="inside"), mean.in_place():
        assert head.weight.item() == pytest.approx(0.3)
        raise RuntimeError("inside")
    assert torch.equal(head.weight, before)


def test_it_goes_on_from_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(average.distributed, "rank", lambda: 0)
    monkeypatch.setattr(average.distributed, "from_rank_0", lambda value: value)
    save_file({"weight": torch.full((1, 1), 0.25)}, tmp_path / HEAD)
    assert Average(make(1.0), 0.9, tmp_path).head.weight.item() == 0.25


def test_without_a_decay_the_head_is_shown_itself(tmp_path: Path) -> None:
    head = make(1.0)
    mean = Average(head, 0.0, tmp_path)
    mean.update(1)
    with mean.in_place():
        assert mean.head is head
        assert head.weight.item() == 1.0
