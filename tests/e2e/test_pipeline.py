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

from slipstream.data.files import MANIFEST, read_json, read_manifest, write_json
from slipstream.scripts.stages import Run
from slipstream.train import trainer
from tests.e2e.commands import hashes, run, start
from tests.test_recipes import load

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
    num_bytes = weights.stat().st_size
    save_file(tensors, weights, metadata={"format": "pt"})
    assert weights.stat().st_size == num_bytes, "else the export counts as damaged"
    done = run(["scripts/evaluate.py", "recipe=tiny", f"run_dir={folder}"], cache)
    assert done.returncode == 0, done.stderr
    (report,) = folder.glob("evaluation/*/acceptance.json")
    measured = json.loads(report.read_text())
    assert measured["acceptance_length"] < 1.1
    assert measured["lossless"] is True


def test_show_mask(finished: tuple[Path, str], cache: Path, tmp_path: Path) -> None:
    page = tmp_path / "row.html"
    options = ["row=3", "stage=hidden_states", f"html={page}"]
    done = run(["scripts/show_mask.py", "recipe=tiny", f"run_dir={finished[0]}", *options], cache)
    assert "supervised" in page.read_text()
    assert done.returncode == 0, done.stderr
    assert "<|im_end|>" in done.stdout
    assert "supervised" in done.stdout


def test_doctor(finished: tuple[Path, str], cache: Path, tmp_path: Path) -> None:
    """A good export passes; a damaged one is named, for a recipe and for a recorded run alike."""
    done = run(["scripts/doctor.py", "recipe=tiny", f"run_dir={finished[0]}"], cache)
    assert done.returncode == 0, done.stderr
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert {state for state, _ in lines} == {"ok"}, done.stdout
    assert [text.split()[0] for _, text in lines[-2:]] == ["vllm", "sglang"]
    shutil.copytree(finished[0] / "export", tmp_path / "export")
    shutil.copy(finished[0] / "recipe.yaml", tmp_path)
    config = tmp_path / "export" / "config.json"
    config.write_text(config.read_text().replace('"fc_norm": false', '"fc_norm": true'))
    for words in ([f"run_dir={tmp_path}", "recipe=tiny"], ["--replay", str(tmp_path)]):
        done = run(["scripts/doctor.py", *words], cache)
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith("error: bundle: as vllm loads it: ")
        assert "fc_norm.0.weight is missing although fc_norm is set" in done.stderr
    done = run(["scripts/doctor.py", "--replay", str(tmp_path / "gone")], cache)
    assert done.returncode == 2
    assert "recipe.yaml does not exist" in done.stderr


def test_speculators_form(finished: tuple[Path, str], cache: Path, tmp_path: Path) -> None:
    """The same head in the form that names its target; our own reader takes it too."""
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    for stage in ("export", "evaluation"):
        shutil.rmtree(folder / stage)
    words = ["recipe=tiny", f"run_dir={folder}", "export.format=speculators", "export.engines=[vllm]"]
    for script in ("export", "doctor", "evaluate"):
        done = run([f"scripts/{script}.py", *words], cache)
        assert done.returncode == 0, done.stderr
    config = json.loads((folder / "export" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "toy"
    card = (folder / "export" / "README.md").read_text()
    assert "vllm serve PATH_OR_ID" in card
    assert "SGLang" not in card
    reports = [next(f.glob("evaluation/*/acceptance.json")).read_text() for f in (folder, finished[0])]
    assert len({json.loads(report)["acceptance_length"] for report in reports}) == 1
    check_pull(folder / "export", finished[0] / "export", cache, tmp_path / "pulled")
    check_init_from(folder / "export", finished[0], cache, tmp_path / "on")


def check_pull(source: Path, plain: Path, cache: Path, folder: Path) -> None:
    """A speculators head comes back in the plain form, as it was exported at first."""
    done = run(["scripts/export.py", "recipe=tiny", f"run_dir={folder}", f"pull={source}"], cache)
    assert done.returncode == 0, done.stderr
    for name in ("config.json", "model.safetensors"):
        assert (folder / "export" / name).read_bytes() == (plain / name).read_bytes()
    assert "as fetched" in done.stderr
    assert "written anew, in the form of this recipe" in done.stderr


def check_init_from(source: Path, first: Path, cache: Path, folder: Path) -> None:
    """It trains on, with its own vocabulary map, whatever the tokens of the new run would give."""
    for stage in ("prompts", "regenerated", "tokens", "hidden_states"):
        shutil.copytree(first / stage, folder / stage)
    words = [*pipeline(folder), f"train.init_from={source}", "train.max_steps=3", "train.learning_rate=1e-6"]
    done = run(words, cache)
    assert done.returncode == 0, done.stderr
    (before, after) = (load_file(path / "export" / "model.safetensors") for path in (first, folder))
    assert torch.equal(before["d2t"], after["d2t"])
    assert 0 < max((before[name].float() - after[name].float()).abs().max().item() for name in before) < 1e-4
    assert json.loads(done.stdout.splitlines()[-1])["acceptance_length"] > 1.5
    other = run([*words, "drafter.draft_vocab_size=100"], cache)
    assert other.returncode == 2
    assert "draft_vocab_size is 200 there and 100 here: add drafter.draft_vocab_size=200" in other.stderr


def test_the_best_head_is_exported_and_not_the_last(
    finished: tuple[Path, str],
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Half-way the learning rate destroys what was learnt."""
    for stage in ("prompts", "regenerated", "tokens", "vocab_map", "hidden_states"):
        shutil.copytree(finished[0] / stage, tmp_path / stage)
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(cache))
    monkeypatch.setattr(
        trainer, "learning_rate", lambda step, total_steps, config: 5e-3 if 2 * step <= total_steps else 1.0
    )
    settings = ("train.epochs=4", "train.selection.every=7", "train.selection.max_new_tokens=24")
    chosen = Run(load("tiny", f"run_dir={tmp_path}", *settings))
    chosen.run("train")
    chosen.run("export")
    printed = capsys.readouterr().err
    lines = [line for line in printed.splitlines() if line.startswith("selection ")]
    assert all("loss" in line and "acceptance length" in line for line in lines)
    measured = read_json(tmp_path / "train" / "selection.json")
    taus = [1 + sum(row["accepted"]) / sum(row["rounds"]) for row in measured]
    assert len(lines) == len(taus) > 2
    assert max(taus) > 1.3 > 1.15 > taus[-1]
    best, last = (read_manifest(tmp_path / "train")["facts"][which] for which in ("best", "last"))
    assert best != last
    assert f"the best head: {tmp_path / 'train' / best}" in printed
    exported, kept, thrown = (
        load_file(tmp_path / file)["fc.weight"]
        for file in ("export/model.safetensors", f"train/{best}", f"train/{last}")
    )
    assert torch.equal(exported, kept) and not torch.equal(exported, thrown)
    page = run(["scripts/plot_run.py", str(tmp_path)], cache)
    assert "Acceptance length" in Path(page.stdout.strip()).read_text()


BAD = {
    "unknown key": (["train.learning_rat=1"], "did you mean train.learning_rate"),
    "unknown recipe": (["recipe=nope"], "demo"),
    "wrong type": (["train.learning_rate=fast"], "train.learning_rate"),
    "several at once": (["train.epochs=0", "eval.num_draft_tokens=0"], "eval.num_draft_tokens"),
    "missing file": (["data.prompts.paths=[gone.jsonl]"], "gone.jsonl"),
    "target missing": (["target.name=./gone"], "target.name"),
    "aux out of range": (["drafter.aux_layers=[2,4,99]"], "drafter.aux_layers"),
    "aux not increasing": (["drafter.aux_layers=[4,2,5]"], "drafter.aux_layers"),
    "no SGLang layer": (["drafter.qk_norm=true"], "export.engines=[vllm]"),
    "no SGLang capture": (["drafter.aux_layers=[2,4,8]"], "captures no state behind"),
    "W above V": (["drafter.draft_vocab_size=100000"], "drafter.draft_vocab_size"),
    "other target settings": (["data.regenerate.max_new_tokens=5"], "max_new_tokens"),
    "other cache settings": (["data.capture.dtype=bfloat16"], "dtype"),
    "added key": (["+train.epoch=2"], "did you mean train.epochs"),
    "no evaluation prompts": (["eval.prompts=[gone.jsonl]"], "eval.prompts"),
    "other training settings": (["train.learning_rate=1"], "train"),
    "cache too large": (["data.capture.max_gib=0.00001", "data.capture.dtype=bfloat16"], "dtype"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(finished: tuple[Path, str], cache: Path, name: str) -> None:
    """One line that names the key, exit code 2, and every stage as it was."""
    overrides, named = BAD[name]
    files = (*SAME, "recipe.yaml", "seconds.json")
    before = hashes(finished[0], files)
    done = run([*pipeline(finished[0]), *overrides], cache)
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if not line.startswith("-- ")]
    assert len(errors) == 1, done.stderr
    assert errors[0].startswith("error: ")
    assert named in errors[0]
    assert hashes(finished[0], files) == before


@pytest.mark.parametrize(
    ("stage", "override", "named"),
    [
        ("tokens", "seed=5", "seed: 0 there, 5 now"),
        ("vocab_map", "data.tokenize.max_length=64", "max_length: 128 there, 64 now"),
        ("export", "data.regenerate.max_new_tokens=5", "max_new_tokens: 48 there, 5 now"),
        ("export", "train.unroll.survival=0.5", "survival: 1.0 there, 0.5 now"),
        ("evaluation", "drafter.fc_norm=true", "fc_norm: False there, True now"),
        ("evaluation", "train.learning_rate=1", "learning_rate: 0.002 there, 1.0 now"),
    ],
)
def test_a_single_stage_refuses_what_other_settings_made(
    finished: tuple[Path, str],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    override: str,
    named: str,
) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(cache))
    with pytest.raises(ValueError, match=named):
        Run(load("tiny", f"run_dir={finished[0]}", override)).run(stage)


def test_runs_share_data(
    finished: tuple[Path, str], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(cache))
    words = (f"data_dir={finished[0]}", f"run_dir={tmp_path}", "train.seed=7", "drafter.draft_vocab_size=100")
    run = Run(load("tiny", *words))
    run.run("vocab_map")
    run.require("hidden_states")
    assert run.path("vocab_map").parent == tmp_path
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.yaml", "seconds.json", "vocab_map"]
    assert run.seconds().keys() >= {"prompts", "hidden_states", "vocab_map"}
    assert run._train_settings()["seed"] == 7


def test_an_export_by_itself_knows_its_target(
    finished: tuple[Path, str], tiny_target: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished[0] / "export", tmp_path / "export")
    recipe = load("tiny", f"run_dir={tmp_path}", f"target.name={tiny_target}")
    with pytest.raises(ValueError, match="name the target the head was trained for"):
        Run(recipe).run("evaluation")


def test_train_settings_are_fixed_by_a_checkpoint(
    finished: tuple[Path, str], cache: Path, tmp_path: Path
) -> None:
    """A folder that was only begun takes other settings; one with a checkpoint refuses them."""
    for stage in ("prompts", "regenerated", "tokens", "vocab_map", "hidden_states"):
        shutil.copytree(finished[0] / stage, tmp_path / stage)
    manifest = tmp_path / "train" / MANIFEST
    write_json(manifest, {"stage": "train", "settings": {"seed": 9}, "files": None})
    words = ["train.py", "recipe=tiny", f"run_dir={tmp_path}", "train.max_steps=1"]
    done = run(words, cache)
    assert done.returncode == 0, done.stderr
    write_json(manifest, read_json(manifest) | {"files": None})
    done = run([*words, "train.learning_rate=1"], cache)
    assert done.returncode == 2, done.stderr
    assert "learning_rate: 0.002 there, 1.0 now" in done.stderr
