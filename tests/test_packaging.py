"""The wheel holds `slipstream/`, all of it, and nothing else."""

import importlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.tree import PACKAGES, ROOT, module_name, project_files, pyproject, source_files

SHIPPED_SUFFIXES = {".py", ".yaml", ".jsonl", ".txt"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a clean copy of the tree; built offline."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    for path in project_files():
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, copy / path)
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "-w", str(out)], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("slipstream-*.whl")
    return built


def test_package_list_equals_the_disk():
    on_disk = {module_name(path) for path in source_files() if path.name == "__init__.py"}
    assert set(pyproject()["tool"]["setuptools"]["packages"]) == on_disk
    assert {path.parts[0] for path in source_files()} == set(PACKAGES)


def test_folders_with_code_are_packages():
    for path in source_files():
        assert (ROOT / path.parent / "__init__.py").is_file(), f"{path.parent} lacks __init__.py"


def test_root_is_no_package():
    assert not (ROOT / "__init__.py").exists()


def test_console_scripts_exist():
    for command, target in pyproject()["project"]["scripts"].items():
        module, name = target.split(":")
        assert callable(vars(importlib.import_module(module))[name]), command


def test_commands_have_console_scripts():
    targets = {target.split(":")[0] for target in pyproject()["project"]["scripts"].values()}
    commands = {
        module_name(path)
        for path in source_files()
        if path.parts[0] == "scripts" and "__main__" in (ROOT / path).read_text()
    }
    assert commands == targets


def test_pinned_torch_is_the_only_exact_version():
    assert "==" not in " ".join(pyproject()["project"]["dependencies"])
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert [pin for pin in pins if pin.startswith("torch==")] == ["torch==2.13.0"]


def test_wheel_holds_only_slipstream(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"slipstream", "slipstream-0.1.0.dist-info"}


def test_wheel_holds_all_of_it(wheel: Path):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("slipstream/")}
    expected = {
        f"slipstream/{path.as_posix()}"
        for path in project_files()
        if path.parts[0] in PACKAGES and path.suffix in SHIPPED_SUFFIXES
    }
    assert names == expected


@pytest.mark.slow
def test_wheel_works_away_from_the_tree(wheel: Path, tmp_path: Path):
    """Installed into a folder of its own: commands compose recipes from the wheel's YAML."""
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r}); sys.meta_path = [finder for finder in sys.meta_path"
        " if 'editable' not in str(finder).lower()]; sys.argv = ['x', 'recipe=tiny', '--cfg', 'job'];"
        "import slipstream.scripts.pipeline as p; print(p.__file__, file=sys.stderr); p.main()"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert str(site) in done.stderr
    assert "target:" in done.stdout
