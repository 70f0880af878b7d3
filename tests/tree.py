"""The project's files, as the tests of its layout see them."""

import ast
import subprocess
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("data", "drafters", "eval", "recipes", "scripts", "train")


def project_files() -> list[Path]:
    """Every file git tracks or would track, relative to the root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sorted(Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file())


def source_files() -> list[Path]:
    """Every Python file of the packages, relative to the root."""
    return [path for path in project_files() if path.suffix == ".py" and path.parts[0] in PACKAGES]


def module_name(path: Path) -> str:
    """`data/types.py` -> `slipstream.data.types`."""
    parts = path.with_suffix("").parts
    return ".".join(("slipstream", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def imported_names(path: Path) -> set[str]:
    """Dotted names a file imports, at the top or inside a function, also for types only."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def num_code_lines(path: Path) -> int:
    """Lines of a file that are neither blank nor comment nor docstring."""
    text = (ROOT / path).read_text(encoding="utf-8")
    documentation = set()
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            documentation |= set(range(node.lineno, node.end_lineno + 1))
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return sum(bool(line) and line[0] != "#" and i not in documentation for i, line in lines)


def pyproject() -> dict[str, Any]:
    """The parsed pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
