"""Stages write nothing before they begin; a log survives a kill in the middle of a line."""

from pathlib import Path

import pytest

from slipstream.data.files import Stage, append_jsonl, read_jsonl, stage_fingerprint


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
