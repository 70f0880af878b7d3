"""The examples in docstrings hold. (`pytest --doctest-modules` would import bare names.)"""

import doctest
import importlib

import pytest

from tests.tree import ROOT, module_name, source_files

WITH_EXAMPLES = [path for path in source_files() if ">>> " in (ROOT / path).read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=str)
def test_examples(path):
    result = doctest.testmod(importlib.import_module(module_name(path)))
    assert result.attempted > 0
    assert result.failed == 0


def test_there_are_examples():
    assert WITH_EXAMPLES
