"""Files stay small, portable and honest."""

import re

import pytest

from tests.tree import ROOT, num_code_lines, project_files, source_files

MAX_BYTES = 1 << 20
MAX_LINES = 400
MAX_CODE_LINES = 16000
MAX_TYPE_IGNORES = 12
MACHINE_PATH = re.compile(r"(?<![\w.}<~/])/(home|root|Users|work|opt|mnt)/[A-Za-z0-9_.-]+")


def test_no_file_is_large():
    large = [str(path) for path in project_files() if (ROOT / path).stat().st_size > MAX_BYTES]
    assert not large, "weights and data do not belong in git"


def test_no_machine_paths():
    found = []
    for path in project_files():
        for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), 1):
            if MACHINE_PATH.search(line):
                found.append(f"{path}:{number}: {line.strip()[:80]}")
    assert not found


@pytest.mark.parametrize("folder", ["home", "root", "work"])
def test_machine_paths_are_found(folder):
    assert MACHINE_PATH.search(f"open('/{folder}/project')")


def test_source_files_are_ascii_and_short():
    for path in source_files():
        text = (ROOT / path).read_text(encoding="utf-8")
        assert text.isascii(), f"{path}: ASCII only"
        assert text.count("\n") <= MAX_LINES, f"{path}: more than {MAX_LINES} lines, split it"


def test_source_is_small():
    total = sum(map(num_code_lines, source_files()))
    assert total <= MAX_CODE_LINES, f"{total} lines of code"


def test_type_checks_are_rarely_switched_off():
    ignores = [str(p) for p in source_files() for _ in re.findall("# type: ignore", (ROOT / p).read_text())]
    assert len(ignores) <= MAX_TYPE_IGNORES, ignores
