"""Training under real DeepSpeed: the number of ranks, ZeRO and a kill change nothing."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slipstream.data.files import read_json

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def fit(out: Path, *overrides: str, ranks: int = 1, code: int = 0) -> dict[str, torch.Tensor]:
    """Runs tests/fit_worker.py in its own processes and returns the final head."""
    out.mkdir(exist_ok=True)
    command = [sys.executable]
    if ranks > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command += ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", f"--master_port={port}"]
    command += ["-m", "tests.fit_worker", str(out), *overrides]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode == 0) == (code == 0), done.stdout + done.stderr
    return load_file(out / "final.safetensors") if code == 0 else {}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return fit(tmp_path_factory.mktemp("one"))


def test_training_moves_the_weights(undisturbed: dict[str, torch.Tensor], tmp_path: Path) -> None:
    assert distance(undisturbed, fit(tmp_path / "short", "max_steps=1")) > 1e-3


@pytest.mark.parametrize("stage", [0, 2])
def test_two_ranks_equal_one(undisturbed: dict[str, torch.Tensor], tmp_path: Path, stage: int) -> None:
    """Same global batches, rows spread unevenly, and a last step with fewer packs than ranks hold."""
    two = fit(tmp_path / "two", f"deepspeed.zero_stage={stage}", ranks=2)
    assert distance(undisturbed, two) < 1e-5


def test_survival_draws_do_not_depend_on_ranks(tmp_path: Path) -> None:
    one = fit(tmp_path / "one", "unroll.survival=0.7")
    two = fit(tmp_path / "two", "unroll.survival=0.7", "deepspeed.zero_stage=1", ranks=2)
    assert distance(one, two) < 1e-5


@pytest.mark.parametrize("stop_after", [2, 4])
def test_resume_is_bit_equal(undisturbed: dict[str, torch.Tensor], tmp_path: Path, stop_after: int) -> None:
    """Killed before and after the first checkpoint (step 3)."""
    fit(tmp_path / "run", f"stop_after={stop_after}", code=9)
    resumed = fit(tmp_path / "run")
    assert distance(undisturbed, resumed) == 0.0


def test_half_written_checkpoint_is_ignored(undisturbed: dict[str, torch.Tensor], tmp_path: Path) -> None:
    fit(tmp_path / "run", "stop_after=4", code=9)
    torn = tmp_path / "run" / "step-0000005"
    torn.mkdir()
    (torn / "mp_rank_00_model_states.pt").write_bytes(b"half")
    assert distance(undisturbed, fit(tmp_path / "run")) == 0.0


def test_packs_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    fit(tmp_path / "run", "packs_per_step=3", ranks=2, code=1)


def test_all_that_is_new_resumes_bit_equal(tmp_path: Path) -> None:
    """Muon, averaged weights and a selection, killed between two measurements."""
    words = ("optimizer=muon", "ema=0.9", "loss.mean=sequence", "selection.every=2")
    whole = fit(tmp_path / "whole", *words)
    fit(tmp_path / "run", *words, "stop_after=5", code=9)
    assert distance(whole, fit(tmp_path / "run", *words)) == 0.0
    measured = [read_json(tmp_path / name / "selection.json") for name in ("whole", "run")]
    for row in [*measured[0], *measured[1]]:
        del row["seconds"], row["losses"]  # the log of losses begins anew
    assert measured[0] == measured[1]
    assert [row["step"] for row in measured[0]] == [2, 4, 6]


def test_mean_over_sequences_does_not_depend_on_ranks(tmp_path: Path) -> None:
    """Prompts of the selection are shared too, under a ZeRO stage that splits the optimizer."""
    words = ("loss.mean=sequence", "unroll.survival=0.7", "selection.every=3", "ema=0.5")
    one = fit(tmp_path / "one", *words)
    two = fit(tmp_path / "two", *words, "deepspeed.zero_stage=2", ranks=2)
    assert distance(one, two) < 1e-5
    steps = [[row["step"] for row in read_json(tmp_path / n / "selection.json")] for n in ("one", "two")]
    assert steps == [[3, 6], [3, 6]]
