"""Every module imports alone and cheaply; each heavy library is imported in one file only."""

import subprocess
import sys

import pytest

from tests.tree import imported_names, module_name, source_files

HEAVY = {"deepspeed": 1, "sglang": 1, "vllm": 3, "wandb": 1}
"""Each with the number of files that import it."""

# Imports each module in a forked child of one interpreter that has only the libraries loaded: as
# good as a fresh interpreter for our own modules, and forty times faster.
IMPORT_EACH_ALONE = f"""
import os, sys
for name in {list(HEAVY)}:
    sys.modules[name] = None  # an import raises ModuleNotFoundError, a look-up finds nothing
import datasets, gguf, hydra, pyarrow.parquet, rich.progress, safetensors.torch, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
assert not any(name.startswith("slipstream.") for name in sys.modules)
failed = []
for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            __import__(name)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        failed.append(name)
sys.exit(f"do not import alone: {{failed}}" if failed else 0)
"""


def top_names(path):
    return {name.split(".")[0] for name in imported_names(path)}


def test_each_module_imports_alone_without_heavy_libraries():
    names = [module_name(path) for path in source_files()]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EACH_ALONE, *names], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("library", HEAVY)
def test_heavy_library_is_imported_in_one_file(library):
    users = [str(path) for path in source_files() if library in top_names(path)]
    assert len(users) == HEAVY[library], users


def test_schema_needs_no_torch():
    """`--help` and a mistyped key answer at once."""
    code = "import sys, slipstream.recipes.schema; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
