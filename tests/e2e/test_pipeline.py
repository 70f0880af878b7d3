"""The `tiny` recipe end to end, as a user runs it."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.commands import hashes, run, start

pytestmark = pytest.mark.slow

STAGES = ("prompts", "regenerated", "tokens", "vocab_map", "hidden_states", "train", "export", "evaluation")
SAME = (
    "prompts/prompts.jsonl",
    "regenerated/answers.jsonl",
    "tokens/tokens.parquet",
    "vocab_map/vocab_map.safetensors",
    "hidden_states/index.json",
    "export/config.json",
    "export/model.safetensors",
)
SUMMARY_KEYS = {
    "target",
    "drafter",
    "num_draft_tokens",
    "acceptance_length",
    "acceptance_rate_per_position",
    "speedup",
    "lossless",
    "train_tokens",
    "seconds_per_stage",
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def pipeline(folder: Path) -> list[str]:
    return ["scripts/pipeline.py", "recipe=tiny", f"run_dir={folder}"]


@pytest.fixture(scope="module")
def finished(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A complete run and what it printed."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    done = run(pipeline(folder), cache)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_summary(finished: tuple[Path, str]) -> None:
    summary = json.loads(finished[1].splitlines()[-1])
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["lossless"] is True
    assert summary["acceptance_length"] > 1.5
    assert summary["seconds_per_stage"].keys() == set(STAGES)


def test_second_run_recomputes_nothing(finished: tuple[Path, str], cache: Path) -> None:
    folder, printed = finished

    def written() -> dict[str, int]:
        return {str(p): p.stat().st_mtime_ns for s in STAGES for p in (folder / s).rglob("*") if p.is_file()}

    before = written()
    again = run(pipeline(folder), cache)
    assert again.returncode == 0, again.stderr
    assert written() == before
    assert json.loads(again.stdout.splitlines()[-1]) == json.loads(printed.splitlines()[-1])
    assert [line for line in again.stderr.splitlines() if line.endswith(": running")] == []


def test_kill_in_every_stage(finished: tuple[Path, str], cache: Path, tmp_path: Path) -> None:
    """One run, killed as soon as each stage has begun and started again."""
    folder = tmp_path / "killed"
    for stage in STAGES:
        process = start(pipeline(folder), cache)
        while not (folder / stage).exists() and process.poll() is None:
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert (folder / stage).exists()
    done = run(pipeline(folder), cache)
    assert done.returncode == 0, done.stderr
    assert hashes(folder, SAME) == hashes(finished[0], SAME)
    assert json.loads(done.stdout.splitlines()[-1])["lossless"] is True


def test_torchrun_from_the_clone(finished: tuple[Path, str], cache: Path, tmp_path: Path) -> None:
    """Two ranks, from nothing: rank 0 makes the data; the same head as one rank."""
    done = run(
        [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node=2",
            "train.py",
            "recipe=tiny",
            f"run_dir={tmp_path}",
        ],
        cache,
    )
    assert done.returncode == 0, done.stderr
    first, second = (
        load_file(sorted(folder.glob("train/step-*/head.safetensors"))[-1])
        for folder in (finished[0], tmp_path)
    )
    assert max((first[name] - second[name]).abs().max().item() for name in first) < 1e-5


def test_train_by_itself(finished: tuple[Path, str], cache: Path) -> None:
    done = run(["train.py", "recipe=tiny", f"run_dir={finished[0]}"], cache)
    assert done.returncode == 0, done.stderr


def test_random_weights_accept_nothing(finished: tuple[Path, str], cache: Path, tmp_path: Path) -> None:
    """The measurement tells a trained head from the same head with random weights."""
    folder = tmp_path / "random"
    shutil.copytree(finished[0] / "export", folder / "export")
    weights = folder / "export" / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: 0.02 * torch.randn(tensor.shape, generator=generator) if tensor.dim() > 1 else tensor
        for name, tensor in load_file(weights).items()
    }
    save_file(tensors, weights, metadata={"format": "pt"})  # the same size, so the stage stays complete
    done = run(["scripts/evaluate.py", "recipe=tiny", f"run_dir={folder}"], cache)
    assert done.returncode == 0, done.stderr
    (report,) = folder.glob("evaluation/*/acceptance.json")
    measured = json.loads(report.read_text())
    assert measured["acceptance_length"] < 1.1
    assert measured["lossless"] is True


def test_show_mask(finished: tuple[Path, str], cache: Path) -> None:
    done = run(["scripts/show_mask.py", "recipe=tiny", f"run_dir={finished[0]}", "row=3"], cache)
    assert done.returncode == 0, done.stderr
    assert "<|im_end|>" in done.stdout
    assert "supervised" in done.stdout


BAD = {
    "unknown key": (["train.learning_rat=1"], "did you mean train.learning_rate"),
    "unknown recipe": (["recipe=nope"], "demo"),
    "wrong type": (["train.learning_rate=fast"], "train.learning_rate"),
    "several at once": (["train.epochs=0", "eval.num_draft_tokens=0"], "eval.num_draft_tokens"),
    "missing file": (["data.prompts.paths=[gone.jsonl]"], "gone.jsonl"),
    "target missing": (["target.name=./gone"], "target.name"),
    "aux out of range": (["drafter.aux_layers=[2,4,99]"], "drafter.aux_layers"),
    "aux not increasing": (["drafter.aux_layers=[4,2,5]"], "drafter.aux_layers"),
    "W above V": (["drafter.draft_vocab_size=100000"], "drafter.draft_vocab_size"),
    "other target settings": (["data.regenerate.max_new_tokens=5"], "max_new_tokens"),
    "other cache settings": (["data.capture.dtype=bfloat16"], "dtype"),
    "other training settings": (["train.learning_rate=1"], "train"),
    "cache too large": (["data.capture.max_gigabytes=0.00001", "data.capture.dtype=bfloat16"], "dtype"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(finished: tuple[Path, str], cache: Path, name: str) -> None:
    """One line that names the key, exit code 2, and every stage as it was."""
    overrides, named = BAD[name]
    before = hashes(finished[0], SAME)
    done = run([*pipeline(finished[0]), *overrides], cache)
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if not line.startswith("-- ")]
    assert len(errors) == 1, done.stderr
    assert errors[0].startswith("error: ")
    assert named in errors[0]
    assert hashes(finished[0], SAME) == before
