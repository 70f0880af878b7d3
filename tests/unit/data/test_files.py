"""Stages write nothing before they begin; a log survives a kill in the middle of a line."""

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from slipstream.data.files import (
    MANIFEST,
    Stage,
    append_jsonl,
    read_json,
    read_jsonl,
    stage_fingerprint,
    write_json,
    write_text,
)


def test_a_stage_begins_and_completes(tmp_path: Path) -> None:
    folder = tmp_path / "stage"
    stage = Stage(folder, "stage", {"seed": 1})
    assert not stage.is_complete
    assert not folder.exists()
    stage.begin()
    assert not stage.is_complete
    with pytest.raises(ValueError, match=r"seed: 1 there, 2 now"):
        Stage(folder, "stage", {"seed": 2})
    with pytest.raises(ValueError, match="is not complete: run the stage stage"):
        stage_fingerprint(folder)
    (folder / "out").write_text("abc")
    stage.complete(["out"])
    assert Stage(folder, "stage", {"seed": 1}).is_complete
    fingerprint = stage_fingerprint(folder)
    (folder / "out").write_text("ab")
    assert not stage.is_complete
    stage.begin()
    (folder / "out").write_text("abc")
    stage.complete(["out"])
    assert stage_fingerprint(folder) == fingerprint


def test_an_incomplete_line_of_a_log_is_cut_off(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    append_jsonl(log, [{"id": "\u00e9\u2028"}, {"id": 2}])
    with log.open("ab") as stream:
        stream.write(b'{"id": ')
    assert read_jsonl(log) == [{"id": "\u00e9\u2028"}, {"id": 2}]
    append_jsonl(log, [{"id": 3}])
    assert [row["id"] for row in read_jsonl(log)] == ["\u00e9\u2028", 2, 3]


def test_only_settings_that_differ_are_shown(tmp_path: Path) -> None:
    settings = {"train": {"unroll": {"num_steps": 4, "survival": 0.5}, "epochs": 1}, "seed": 0}
    Stage(tmp_path, "train", settings).begin()
    settings["train"] = {"unroll": {"num_steps": 4, "survival": 1.0}, "epochs": 1}
    with pytest.raises(ValueError, match=r"settings \(train\.unroll\.survival: 0\.5 there, 1\.0 now\): set"):
        Stage(tmp_path, "train", settings)


def test_one_process_writes_a_stage(tmp_path: Path) -> None:
    folder = tmp_path / "stage"
    folder.mkdir()
    leftover = folder / "step-1" / ".head.safetensors.77.tmp"
    write_text(leftover, "half")
    stage = Stage(folder, "stage", {"seed": 1})
    other = os.open(folder, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match=f"{folder} is being written by another process: wait for it"):
        stage.begin()
    assert leftover.exists() and not (folder / MANIFEST).exists()
    fcntl.flock(other, fcntl.LOCK_UN)
    stage.begin()
    stage.begin()  # after an error, the same process may
    assert not leftover.exists()
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    (folder / "out").touch()
    stage.complete(["out"])
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
    assert sorted(path.name for path in folder.iterdir()) == [MANIFEST, "out", "step-1"]


def test_a_stage_begun_elsewhere_since_is_refused(tmp_path: Path) -> None:
    late = Stage(tmp_path, "stage", {"seed": 2})
    Stage(tmp_path, "stage", {"seed": 1}).begin()
    with pytest.raises(ValueError, match="seed: 1 there, 2 now"):
        late.begin()
    assert read_json(tmp_path / MANIFEST)["settings"] == {"seed": 1}


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "stage", Path("/proc/stage")):
        with pytest.raises(ValueError, match=f"^{folder} cannot be written .*set run_dir"):
            Stage(folder, "stage", {}).begin()
        with pytest.raises(ValueError, match=f"^{folder} cannot be written "):
            write_text(folder / "name", "text")


@pytest.mark.parametrize("line", [b"garbage", b"3", b"\xff", b"", b"[" * 100_000, b'{"id": 1'])
def test_a_broken_line_is_named(tmp_path: Path, line: bytes) -> None:
    log = tmp_path / "log.jsonl"
    log.write_bytes(b'{"id": 1}\n' + line + b"\n")
    with pytest.raises(ValueError, match=f"^{log}:2 cannot be read .*: delete {tmp_path} to make it again"):
        read_jsonl(log)
    with pytest.raises(ValueError, match=f"^{tmp_path}/none cannot be read .*: delete {tmp_path} to make"):
        read_jsonl(tmp_path / "none")


@pytest.mark.parametrize(
    "changes", [{"settings": []}, {"files": []}, {"files": {"a": {}}}, {"files": {"a": 1}}, {"stage": None}]
)
def test_a_broken_manifest_is_named(tmp_path: Path, changes: dict[str, Any]) -> None:
    stage = Stage(tmp_path, "stage", {})
    (tmp_path / "a").touch()
    stage.complete(["a"])
    write_json(tmp_path / MANIFEST, {**read_json(tmp_path / MANIFEST), **changes})
    with pytest.raises(
        ValueError, match=rf"^{tmp_path}/manifest\.json .*: delete {tmp_path} to make it again"
    ):
        assert Stage(tmp_path, "stage", {}).is_complete
