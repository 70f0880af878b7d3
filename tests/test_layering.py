"""Imports point one way: data | drafters -> train | eval -> scripts; recipes see settings only."""

import pytest

from tests.tree import imported_names, module_name, source_files

MAY_IMPORT = {
    "data": {"data"},
    "drafters": {"drafters"},
    "train": {"train", "data", "drafters"},
    "eval": {"eval", "data", "drafters"},
    "recipes": {"recipes"},
    "scripts": {"scripts", "recipes", "train", "eval", "data", "drafters"},
}
SETTINGS = {f"slipstream.{name}.config" for name in ("data", "drafters", "eval", "train")}


def forbidden(package: str, imported: set[str]) -> set[str]:
    """The imports that point the wrong way."""
    found = set()
    for name in imported:
        parts = name.split(".")
        is_ours = parts[0] == "slipstream"
        is_setting = package == "recipes" and ".".join(parts[:3]) in SETTINGS
        if is_ours and parts[1] not in MAY_IMPORT[package] and not is_setting:
            found.add(name)
    return found


@pytest.mark.parametrize("path", source_files(), ids=str)
def test_imports_point_one_way(path):
    assert not forbidden(path.parts[0], imported_names(path)), module_name(path)


@pytest.mark.parametrize(
    ("package", "imported", "is_forbidden"),
    [
        ("data", {"slipstream.drafters.eagle3"}, True),
        ("drafters", {"slipstream.data.batches"}, True),
        ("train", {"slipstream.eval.decoder"}, True),
        ("train", {"slipstream.drafters.eagle3", "torch"}, False),
        ("recipes", {"slipstream.train.config.TrainConfig"}, False),
        ("recipes", {"slipstream.train.trainer"}, True),
        ("eval", {"slipstream.scripts.cli"}, True),
    ],
)
def test_the_rule_itself(package, imported, is_forbidden):
    assert bool(forbidden(package, imported)) is is_forbidden
