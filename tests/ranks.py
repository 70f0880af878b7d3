"""Ranks of a run as forks of one process that has imported everything, so that a start costs little.

The process itself never trains: a fork of one that has would hang. `tests/e2e/test_faults.py` starts it.
"""

import dataclasses
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import deepspeed.runtime.zero.muon.original_muon  # noqa: F401 - slow, and ZeRO imports it
import torch
from safetensors.torch import load_file, save_file

from slipstream.data.files import Stage
from slipstream.train import checkpoint, engine, trainer
from slipstream.train.config import DeepSpeedConfig, TrainConfig, WandbConfig, WandbMode
from slipstream.train.selection import Selection
from slipstream.train.ttt import Unroller
from tests.heads import MemorySource, make_frozen, make_geometry, make_head, make_sample

BASE = TrainConfig(
    epochs=2,
    tokens_per_pack=60,
    packs_per_step=4,
    learning_rate=1e-3,
    warmup_share=0.1,
    log_every=1,
    validate_every=4,
    save_every=1,
    wandb=WandbConfig(mode=WandbMode.disabled),
)
Prepare = Callable[[MemorySource], None]
"""Breaks something in a rank before it trains."""


def settings(*, stage: int = 0, **values: object) -> TrainConfig:
    """The settings of a run."""
    return dataclasses.replace(BASE, deepspeed=DeepSpeedConfig(zero_stage=stage), **values)  # type: ignore[arg-type]


def _fit(folder: Path, config: TrainConfig, prepare: Prepare) -> None:
    torch.manual_seed(0)
    geometry, rng = make_geometry(), random.Random(0)
    masks = [[0] * rng.randint(2, 9) + [1] * rng.randint(3, 30) + [0] * rng.randint(0, 4) for _ in range(23)]
    samples = [make_sample(f"doc{i}", mask, geometry=geometry, seed=i) for i, mask in enumerate(masks)]
    frozen, source = make_frozen(geometry), MemorySource(samples[:20], samples[20:])
    device = engine.init_distributed()
    prepare(source)
    dtype = getattr(torch, config.deepspeed.dtype.value)
    state = trainer.fit(
        Unroller(make_head(geometry), frozen.to(device, dtype), config.loss),
        source,
        config,
        frozen=frozen,
        stage=Stage(folder, "train", {}),
        seed=5,
        device=device,
        selection=Selection(config.selection, folder),
    )
    if engine.rank() == 0:
        tensors = checkpoint.read_head(folder / f"step-{state.step:07d}" / checkpoint.HEAD)
        save_file(tensors, folder / "final.safetensors")
    engine.shutdown()


class Ranks:
    """The processes of one start of a run."""

    def __init__(
        self, folder: Path, num: int, config: TrainConfig = BASE, prepare: Prepare = lambda source: None
    ) -> None:
        folder.mkdir(exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.log, self.start = folder / "log", time.monotonic()
        self.pids = [self._fork(rank, num, port, folder, config, prepare) for rank in range(num)]

    def _fork(
        self, rank: int, num: int, port: int, folder: Path, config: TrainConfig, prepare: Prepare
    ) -> int:
        if pid := os.fork():
            return pid
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.dup2(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        code = 1
        try:
            _fit(folder, config, prepare)
            code = 0
        except SystemExit as error:
            code = int(error.code or 0)
        except (ValueError, OSError) as error:  # as scripts/cli.py does
            print(f"error on rank {rank}: {error}", file=sys.stderr, flush=True)
            code = 2
        except RuntimeError:
            traceback.print_exc()
        finally:
            os._exit(code)

    def kill(self, *, number: int = signal.SIGKILL, ranks: slice = slice(None)) -> None:
        """Sends a signal to ranks that may have ended."""
        for pid in self.pids[ranks]:
            os.kill(pid, number)

    def wait(self) -> tuple[int, ...]:
        """Exit codes, a signal as a negative number."""
        return tuple(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.start


def final(folder: Path) -> dict[str, torch.Tensor]:
    """The head that a run ended with."""
    return load_file(folder / "final.safetensors")


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference of two heads."""
    return max((a[name] - b[name]).abs().max().item() for name in a)
