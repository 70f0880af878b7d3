"""Kills, full disks, lost ranks and numbers that are none: what a run does, and how soon.

All runs are forks of one process (`tests/fault_scenarios.py`), which writes what happened.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
Results = dict[str, Any]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    out = tmp_path_factory.mktemp("faults")
    done = subprocess.run(
        [sys.executable, "-m", "tests.fault_scenarios", str(out)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    found: Results = json.loads((out / "results.json").read_text())
    return found


def test_ten_kills_change_no_bit(results: Results) -> None:
    """Both ranks die by SIGKILL at random moments; at most one interval (here one step) is lost."""
    torture = results["torture"]
    assert torture["codes"] == [[0, 0], [0, 0]]
    assert [codes for codes, _ in torture["kills"]] == [[-9, -9]] * 10
    steps = [step for _, step in torture["kills"]]
    assert steps == sorted(set(steps))  # every start came further
    assert torture["distance"] == 0.0


def test_two_one_two_ranks_under_other_stages(results: Results) -> None:
    elastic = results["elastic"]
    assert elastic["codes"] == [[0, 0], [0, 0]]
    assert elastic["log"].count("resumes after step") == 2
    assert elastic["distance"] < 1e-6


def test_float32_masters_of_bfloat16_weights_survive(results: Results) -> None:
    assert results["bfloat16"]["distance"] == {"0": 0.0, "2": 0.0}


def test_sigterm_of_one_rank_saves_and_ends_all(results: Results) -> None:
    terminated = results["terminated"]
    assert terminated["codes"] == [143, 143]
    assert terminated["step"] > 0
    assert f"SIGTERM: saved after step {terminated['step']}; run the same command" in terminated["log"]
    assert terminated["last"] == [0, 0]
    assert terminated["distance"] == 0.0


@pytest.mark.parametrize("kind", ["0-float32", "2-float32", "1-bfloat16"])
def test_a_step_with_a_nan_gradient_on_one_rank_never_was(results: Results, kind: str) -> None:
    """Bit-equal to a run whose plan lacks the step: moments, counts and rate stand still."""
    found = results["nan_gradient"][kind]
    assert found["codes"] == [0, 0]
    assert (found["state"]["step"], found["state"]["skipped"]) == (2, 1)
    assert "the step after step 1 is skipped on every rank" in found["log"]
    assert found["distance"] == 0.0


def test_ten_skipped_steps_in_a_row_end_a_run(results: Results) -> None:
    assert results["nan_forever"]["codes"] == [2, 2]
    assert results["nan_forever"]["log"].count("is skipped on every rank") == 10
    assert "10 steps in a row" in results["nan_forever"]["log"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nan_row", "document doc7 has a state that is not finite (aux_TLD, row 1)"),
        ("dead_reader", "Input/output error: 'shard-00000.safetensors'"),
    ],
)
def test_a_rank_that_cannot_read_says_why_and_ends_the_others(
    results: Results, name: str, message: str
) -> None:
    found = results[name]
    assert sorted(found["codes"]) in ([2, 2], [2, 3])
    assert message in found["log"]
    assert found["seconds"] < 30


@pytest.mark.parametrize(
    ("name", "rank"),
    [("killed-1", "rank 1 (process "), ("killed-0", "rank 0"), ("stopped-1", "rank 1 (process ")],
)
def test_a_lost_rank_is_named_within_its_timeout(results: Results, name: str, rank: str) -> None:
    found = results["lost_rank"][name]
    assert found["code"] == 3
    assert f"error: {rank}" in found["log"]
    assert found["seconds"] < 30


def test_a_full_disk_leaves_the_checkpoints_before(results: Results) -> None:
    found = results["full_disk"]
    if not found["mounted"]:
        pytest.skip("no tmpfs can be mounted here")
    assert found["codes"] == [2, 2]
    assert "step-0000003 cannot be written" in found["log"]
    assert "free some space; a new start goes on from the checkpoint before" in found["log"]
    assert found["left"] == ["step-0000001", "step-0000002"]
    assert found["last"] == [0, 0]
    assert found["distance"] == 0.0


def test_a_truncated_checkpoint_is_left_out_with_a_warning(results: Results) -> None:
    found = results["truncated"]
    assert f"warning: {found['file']} is damaged: the checkpoint is left out" in found["log"]
    assert found["codes"] == [0, 0]
    assert found["distance"] == 0.0


def test_a_step_without_a_generated_token_is_harmless(results: Results) -> None:
    assert results["masked"]["codes"] == [0, 0]
    assert results["masked"]["is_finite"]


def test_a_node_whose_copy_differs_is_named(results: Results) -> None:
    found = results["copies"]
    assert found["equal"]["codes"] == [0, 0]
    assert found["stamps"] == [1, 1]
    assert found["byte"]["codes"] == found["seed"]["codes"] == [2, 2]
    assert "(node 1): " in found["byte"]["log"]
    assert "node-1/stage/shard-1 is not the file that the manifest names" in found["byte"]["log"]
    assert "(node 1): seed not as on rank 0: copy the run's folder" in found["seed"]["log"]
