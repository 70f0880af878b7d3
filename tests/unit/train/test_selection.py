"""Which head is the best one, which are kept, and what a resumed run knows of it."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from slipstream.train import selection
from slipstream.train.config import SelectionConfig
from slipstream.train.selection import DecodePrompt, Measured, Selection, validation_prompts
from tests.heads import MemorySource, make_geometry, make_sample

PROMPTS = [[1], [2], [3], [4]]


class OneProcess:
    """In the place of torch.distributed."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self._rank, self._world = rank, world
        self.summed: list[Tensor] = []

    def rank(self) -> int:
        return self._rank

    def world_size(self) -> int:
        return self._world

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        self.summed.append(values.clone())
        return values

    def from_rank_0(self, value: list[Measured]) -> list[Measured]:
        return value


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "distributed", OneProcess())


def measured(step: int, *accepted: int) -> Measured:
    return Measured(step=step, rounds=(10,) * len(accepted), accepted=accepted, losses={}, seconds=0.0)


def head(accepted: float) -> nn.Module:
    """A head that accepts so many drafts of every 10 rounds."""
    made = nn.Linear(1, 1, bias=False)
    nn.init.constant_(made.weight, accepted)
    return made


def decode(made: nn.Module) -> DecodePrompt:
    accepted = int(next(made.parameters()).item())
    return lambda prompt_ids: (10, accepted + prompt_ids[0] % 2)


def make(folder: Path, **settings: float) -> Selection:
    return Selection(SelectionConfig(**({"every": 2} | settings)), folder, PROMPTS, decode)  # type: ignore[arg-type]


def run(chosen: Selection, taus: Sequence[int], first: int = 1) -> None:
    for number, accepted in enumerate(taus, first):
        chosen.measure(2 * number, head(accepted), {"loss": 1.0})


def kept(folder: Path) -> list[str]:
    return sorted(file.name for file in (folder / "best").glob("*"))


def test_lead_by_hand() -> None:
    """Differences 4, 2, 2, 0 accepted of 10 rounds: gain 0.2, deviations +-0.05 and 0, standard error
    sqrt(4/3 * 2 * 0.05^2)."""
    better, worse = measured(1, 9, 7, 7, 5), measured(2, 5, 5, 5, 5)
    assert better.acceptance_length == pytest.approx(1.7)
    assert better.lead(worse) == pytest.approx(0.2 / (8 / 3 * 0.05**2) ** 0.5)
    assert worse.lead(better) == 0.0
    assert measured(1, 6, 6).lead(measured(2, 5, 5)) > 1e6, "each prompt says the same"


def test_a_later_head_wins_unless_an_earlier_one_is_clearly_better(tmp_path: Path) -> None:
    chosen = make(tmp_path)
    chosen._measured = [measured(1, 3, 3, 3, 3), measured(2, 9, 1, 9, 1), measured(3, 1, 9, 1, 8)]
    assert [m.step for m in chosen.ranking()] == [3, 2, 1], "0.025 less, of prompts that disagree"
    chosen._measured.append(measured(4, 8, 0, 8, 0))
    assert [m.step for m in chosen.ranking()] == [3, 2, 4, 1], "each prompt got worse"


def test_the_best_are_kept(tmp_path: Path) -> None:
    chosen = make(tmp_path, keep=2)
    assert chosen.best_file is None
    run(chosen, [2, 6, 4, 3, 1])
    assert chosen.best_file == "best/step-0000004.safetensors"
    chosen.prune()
    assert kept(tmp_path) == ["step-0000004.safetensors", "step-0000006.safetensors"]
    assert chosen.is_due(12, False) and not chosen.is_due(13, False) and chosen.is_due(13, True)
    assert not Selection(SelectionConfig(), tmp_path).is_due(13, True)


def test_a_resumed_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Killed after step 10, resumed from a checkpoint at step 6: heads behind it count no more, and
    the one that was best then is still there."""
    run(chosen := make(tmp_path, keep=1), [2, 6, 4])
    chosen.prune()
    run(chosen, [7, 8], first=4)
    again = make(tmp_path, keep=1)
    again.resume(6)
    assert again.best_file == "best/step-0000004.safetensors"
    run(again, [3], first=4)
    assert [row["step"] for row in json.loads((tmp_path / "selection.json").read_text())] == [2, 4, 6, 8]
    again.prune()
    assert kept(tmp_path) == ["step-0000004.safetensors"]


def test_patience(tmp_path: Path) -> None:
    chosen = make(tmp_path, patience=2)
    run(chosen, [5, 6, 4])
    assert not chosen.is_over
    run(chosen, [3], first=4)
    assert chosen.is_over
    resumed = make(tmp_path, patience=2)
    assert not resumed.is_over
    resumed.resume(8)
    assert resumed.is_over
    run(never := make(tmp_path), [5, 6, 4, 3, 2])
    assert not never.is_over


def test_a_limit_of_time_chooses_the_prompts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))  # a second between two looks
    monkeypatch.setattr(selection, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    first = make(tmp_path, seconds=1.5).measure(2, head(3), {})
    assert len(first.rounds) == 2
    again = make(tmp_path, seconds=1.5)
    again.resume(2)
    assert again.measure(4, head(3), {}).rounds == first.rounds
    assert len(make(tmp_path, seconds=0.0).measure(2, head(3), {}).rounds) == 4


def test_ranks_share_the_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each of three ranks adds makes the same counts as one rank."""
    whole = make(tmp_path / "one").measure(2, head(4), {})
    parts = []
    for rank in range(3):
        process = OneProcess(rank, 3)
        monkeypatch.setattr(selection, "distributed", process)
        make(tmp_path / str(rank)).measure(2, head(4), {})
        parts += process.summed
    assert torch.stack(parts).sum(0).tolist() == [[1] * 4, list(whole.rounds), list(whole.accepted)]


def test_prompts_come_from_the_validation_split() -> None:
    geometry = make_geometry()
    samples = [
        make_sample("a", [0, 0, 1, 1, 0, 1], geometry=geometry),
        make_sample("b", [0, 0, 0, 0, 1], geometry=geometry, seed=1),
        make_sample("c", [0, 0, 1, 1, 0, 1], geometry=geometry),
    ]
    source = MemorySource(samples, samples)
    prompts = validation_prompts(source, 5, longest=3)
    assert prompts == [samples[0].input_ids_T[:2].tolist()], "no prompt twice, none too long"
    with pytest.raises(ValueError, match="raise data.validation_share, or set train.selection.every=0"):
        validation_prompts(MemorySource(samples, []), 5, longest=3)
