"""What the trackers are given, and that a restarted run is the same run to them."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from slipstream.train import config as settings
from slipstream.train.config import TrainConfig, WandbConfig, WandbMode
from slipstream.train.trackers import trackers


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Calls of a stand-in for the library."""
    calls: list[dict[str, Any]] = []
    stand_in: Any = ModuleType("wandb")

    def init(**arguments: Any) -> SimpleNamespace:
        calls.append(arguments)
        return SimpleNamespace(
            log=lambda figures, step: calls.append({"step": step, **figures}), finish=lambda: None
        )

    stand_in.init, stand_in.Settings = init, lambda **arguments: arguments
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    return calls


@pytest.mark.parametrize(("mode", "resume"), [(WandbMode.offline, None), (WandbMode.online, "allow")])
def test_wandb_goes_on_after_a_restart(
    mode: WandbMode,
    resume: str | None,
    wandb: list[dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for step in (0, 7):
        (tracker,) = trackers(tmp_path, TrainConfig(wandb=WandbConfig(mode=mode)), step)
        tracker.log(step + 1, {"lr": 0.1})
        tracker.close()
    first, logged, second, _ = wandb
    assert logged == {"step": 1, "lr": 0.1}
    assert first["id"] == second["id"]
    assert (first["mode"], first["resume"]) == (mode.value, resume)
    assert ("wandb sync" in capsys.readouterr().err) == (mode is WandbMode.offline)


def test_tensorboard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Figures behind the step a run resumes from are replaced."""
    calls: list[Any] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            calls.append((Path(folder).name, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            calls.append((name, value, step))

        def close(self) -> None:
            calls.append("closed")

    stand_in: Any = ModuleType("torch.utils.tensorboard")
    stand_in.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    config = TrainConfig(tensorboard=True, wandb=WandbConfig(mode=WandbMode.disabled))
    (tracker,) = trackers(tmp_path, config, 4)
    tracker.log(5, {"lr": 0.1, "train/loss/0": 2.0})
    tracker.close()
    assert calls == [("tensorboard", 5), ("lr", 0.1, 5), ("train/loss/0", 2.0, 5), "closed"]


def test_tensorboard_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "find_spec", lambda name: None)
    (problem,) = TrainConfig(tensorboard=True).problems()
    assert "pip install 'slipstream[tensorboard]'" in problem
