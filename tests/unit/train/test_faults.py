"""SIGTERM as a flag, and how many steps may be skipped; runs on ranks: tests/e2e/test_faults.py."""

import os
import signal

import pytest
import torch

from slipstream.train import faults
from slipstream.train.checkpoint import TrainState
from slipstream.train.faults import Skips, Termination

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults.distributed, "any_rank", lambda flag, device: flag)


def test_sigterm_waits_for_the_end_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Termination() as termination:
        assert not termination.was_asked(CPU)
        os.kill(os.getpid(), signal.SIGTERM)
        assert termination.was_asked(CPU)
    assert signal.getsignal(signal.SIGTERM) is before
    termination.leave(TrainState(step=5, skipped=1), 6)  # nothing is left: the run has ended
    with pytest.raises(SystemExit) as ended:
        termination.leave(TrainState(step=5, skipped=1), 9)
    assert ended.value.code == 143
    assert "saved after step 5" in capsys.readouterr().err


def test_only_skips_in_a_row_end_a_run() -> None:
    skips, state = Skips(), TrainState(step=3)
    for is_done in [*[False] * 9, True, *[False] * 9]:
        assert skips.count(is_done, state) is is_done
    assert (state.step, state.skipped, state.position) == (3, 18, 21)
    with pytest.raises(ValueError, match="10 steps in a row"):
        skips.count(False, state)
