"""Settings and targets shared by all tests."""

import os
from pathlib import Path

# Before torch is imported, here and in every command a test starts.
os.environ |= {
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "offline",
    "CUDA_VISIBLE_DEVICES": "",
}
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator

import pytest

from tests.tiny import make_tiny_target, train_tiny_target


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small Llama with random weights; not to be written to."""
    return make_tiny_target(tmp_path_factory.mktemp("random") / "tiny")


@pytest.fixture(scope="session")
def trained_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small Llama that answers and stops; not to be written to."""
    return train_tiny_target(tmp_path_factory.mktemp("trained") / "tiny")


@pytest.fixture(autouse=True)
def no_ranks_are_left() -> Iterator[None]:
    """A test that trains in this process leaves no rank to the commands of the next.

    The process group stays: DeepSpeed keeps what it made of it for as long as the process lives.
    """
    before = dict(os.environ)
    yield
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        if name not in before:
            os.environ.pop(name, None)
