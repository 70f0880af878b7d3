"""Training under real DeepSpeed: the number of ranks, ZeRO and a kill change nothing."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

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
