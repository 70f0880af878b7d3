"""The page of a training run holds every curve and loads nothing."""

import json
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from slipstream.scripts import plot_run

NUM_STEPS = 1000


def write(folder: Path) -> None:
    (folder / "train").mkdir()
    rows = []
    for step in range(1, NUM_STEPS + 1):
        figures = {"train/loss": [9 / step, 10 / step], "train/accept_rate": [0.5, 0.25], "lr": 1e-3}
        rows.append({"step": step, **figures, "tokens_per_second": 5.0, "waiting_share": 0.0})
        if step % 250 == 0:
            rows.append({"step": step, "validation/loss": [2.0, 3.0], "validation/accept_rate": [0.4, 0.2]})
            rows.append({"step": step, "selection/acceptance_length": 1.5})
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "train" / "metrics.jsonl").write_text(lines + '{"step": 1001, "tra')
    measured = [{"step": s, "rounds": [10, 10], "accepted": [s // 100, 4]} for s in (250, 500, 750)]
    (folder / "train" / "selection.json").write_text(json.dumps(measured))


def test_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    monkeypatch.setattr(sys, "argv", ["plot_run.py", str(tmp_path)])
    plot_run.main()
    assert capsys.readouterr().out.strip() == str(tmp_path / "training.html")
    text = (tmp_path / "training.html").read_text()
    assert "http" not in text and "<script" not in text
    headings = re.findall("<h2>(.*?)</h2>", text)
    assert headings == ["Loss", "Accept rate", "Acceptance length", "Learning rate", "Throughput", "Waiting"]
    charts = [ET.fromstring(svg) for svg in re.findall("<svg.*?</svg>", text)]
    assert len(charts) == len(headings)
    loss = [line.attrib["points"].split() for line in charts[0].iter("polyline")]
    assert [len(points) for points in loss] == [250, 250, 4], "two unroll steps, thinned, and validation"
    assert "1,000 optimizer steps" in text
    assert "longest acceptance length is 1.550, after step 750" in text


def test_a_run_that_has_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ([str(tmp_path)], []):
        monkeypatch.setattr(sys, "argv", ["plot_run.py", *words])
        with pytest.raises(SystemExit) as ended:
            plot_run.main()
        assert ended.value.code == 2
        assert capsys.readouterr().err.startswith("error: ")
