"""What happens to small runs on one and two ranks under faults; `python -m tests.fault_scenarios OUT`.

Writes `OUT/results.json`, which `tests/e2e/test_faults.py` judges.
"""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from slipstream.data.config import Dtype
from slipstream.data.files import Stage, stage_fingerprint
from slipstream.data.types import HiddenStateSample
from slipstream.train import checkpoint, engine, trainer
from slipstream.train.config import DeepSpeedConfig, Schedule
from slipstream.train.nodes import check_copies
from tests.heads import MemorySource
from tests.ranks import Ranks, distance, final, settings

Result = dict[str, Any]


def _steps(folder: Path) -> int:
    """Optimizer steps of the newest complete checkpoint."""
    return max((int(p.parent.name[5:]) for p in folder.glob(f"step-*/{checkpoint.STATE}")), default=0)


def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def _ended(ranks: Ranks) -> Result:
    codes = ranks.wait()
    return {"codes": codes, "seconds": ranks.seconds, "log": ranks.log.read_text()}


def torture(root: Path) -> Result:
    """Ten kills of both ranks at random moments, most of them while a checkpoint is written."""
    config, rng, kills = settings(stage=2, epochs=8), random.Random(0), []
    whole = Ranks(root / "torture-whole", 2, config).wait()
    while len(kills) < 10:
        ranks = Ranks(root / "torture", 2, config)
        before = _steps(root / "torture")
        _until(lambda: _steps(root / "torture") > before or ranks.seconds > 20)  # noqa: B023
        time.sleep(rng.uniform(0, 0.3))
        ranks.kill()
        kills.append((ranks.wait(), _steps(root / "torture")))
    last = Ranks(root / "torture", 2, config).wait()
    apart = distance(final(root / "torture-whole"), final(root / "torture"))
    return {"codes": [whole, last], "kills": kills, "distance": apart}


def elastic(root: Path) -> Result:
    """2 -> 1 -> 2 ranks under ZeRO-2, 0 and 1."""
    whole = Ranks(root / "elastic-whole", 2, settings(stage=2, epochs=3)).wait()
    for num, stage, enough in ((2, 2, 3), (1, 0, 6)):
        ranks = Ranks(root / "elastic", num, settings(stage=stage, epochs=3))
        _until(lambda: _steps(root / "elastic") >= enough)  # noqa: B023
        ranks.kill()
        ranks.wait()
    last = Ranks(root / "elastic", 2, settings(stage=1, epochs=3)).wait()
    apart = distance(final(root / "elastic-whole"), final(root / "elastic"))
    return {"codes": [whole, last], "distance": apart, "log": (root / "elastic" / "log").read_text()}


def bfloat16(root: Path) -> Result:
    """float32 master weights survive a kill under every stage."""
    found = {}
    for stage in (0, 2):
        config = settings(epochs=1)
        config.deepspeed = DeepSpeedConfig(zero_stage=stage, dtype=Dtype.bfloat16)
        Ranks(root / f"bf16-whole-{stage}", 2, config).wait()
        ranks = Ranks(root / f"bf16-{stage}", 2, config)
        _until(lambda: _steps(root / f"bf16-{stage}") >= 1)  # noqa: B023
        ranks.kill()
        ranks.wait()
        Ranks(root / f"bf16-{stage}", 2, config).wait()
        found[stage] = distance(final(root / f"bf16-whole-{stage}"), final(root / f"bf16-{stage}"))
    return {"distance": found}


def terminated(root: Path) -> Result:
    """SIGTERM for one rank, long before the next checkpoint."""
    config = settings(save_every=1000, epochs=40)
    Ranks(root / "terminated-whole", 2, config).wait()
    ranks = Ranks(root / "terminated", 2, config)
    curves = root / "terminated" / "metrics.jsonl"
    _until(lambda: curves.exists() and curves.stat().st_size > 0)
    ranks.kill(number=signal.SIGTERM, ranks=slice(1, 2))
    result = _ended(ranks)
    result["step"] = _steps(root / "terminated")
    last = Ranks(root / "terminated", 2, config).wait()
    apart = distance(final(root / "terminated-whole"), final(root / "terminated"))
    return result | {"distance": apart, "last": last}


def _nan_gradient(first: int, num: int) -> Callable[[MemorySource], None]:
    """Rank 1's gradient is not a number in `num` steps from planned step `first` on."""

    def prepare(source: MemorySource) -> None:
        if engine.rank() == 1:
            backward, done = engine.Engine.backward, 0

            def broken(self: engine.Engine, local_sum: torch.Tensor) -> None:
                nonlocal done
                step, done = done // self.num_micro_batches, done + 1
                backward(self, local_sum * (math.nan if first <= step < first + num else 1.0))

            engine.Engine.backward = broken  # type: ignore[method-assign]

    return prepare


def _without_step(left_out: int) -> Callable[[MemorySource], None]:
    def prepare(source: MemorySource) -> None:
        plan = trainer.plan_steps
        trainer.plan_steps = lambda *args: [s for i, s in enumerate(plan(*args)) if i != left_out]

    return prepare


def nan_gradient(root: Path) -> Result:
    """The step is skipped on both ranks, as if it had not been planned."""
    found = {}
    for stage, dtype in ((0, Dtype.float32), (2, Dtype.float32), (1, Dtype.bfloat16)):
        name = f"{stage}-{dtype.value}"
        config = settings(epochs=1, schedule=Schedule.constant, warmup_share=0.0)
        config.deepspeed = DeepSpeedConfig(zero_stage=stage, dtype=dtype)
        Ranks(root / f"nan-without-{name}", 2, config, _without_step(1)).wait()
        ranks = Ranks(root / f"nan-{name}", 2, config, _nan_gradient(1, 1))
        result = _ended(ranks)
        states = sorted((root / f"nan-{name}").glob(f"step-*/{checkpoint.STATE}"))
        state = json.loads(states[-1].read_text())["state"]
        apart = distance(final(root / f"nan-without-{name}"), final(root / f"nan-{name}"))
        found[name] = result | {"state": state, "distance": apart}
    return found


def nan_forever(root: Path) -> Result:
    """Ten skipped steps in a row."""
    return _ended(Ranks(root / "forever", 2, settings(epochs=6), _nan_gradient(2, 100)))


def nan_row(root: Path) -> Result:
    """A document of the cache holds a state that is not a number."""

    def prepare(source: MemorySource) -> None:
        source.load("doc7").aux_TLD[1, 2, 3] = math.nan

    return _ended(Ranks(root / "row", 2, settings(), prepare))


def dead_reader(root: Path) -> Result:
    """The thread that reads ahead cannot read."""

    def prepare(source: MemorySource) -> None:
        load = source.load

        def broken(id: str) -> HiddenStateSample:
            if id == "doc3":
                raise OSError(5, "Input/output error", "shard-00000.safetensors")
            return load(id)

        source.load = broken  # type: ignore[method-assign]

    return _ended(Ranks(root / "reader", 2, settings(), prepare))


def lost_rank(root: Path) -> Result:
    """A rank is killed or stops answering; the other one ends and names it."""
    found = {}
    for name, victim, number in (
        ("killed-1", 1, signal.SIGKILL),
        ("killed-0", 0, signal.SIGKILL),
        ("stopped-1", 1, signal.SIGSTOP),
    ):
        ranks = Ranks(root / name, 2, settings(epochs=100, rank_timeout=8.0))
        _until(lambda: _steps(root / name) >= 2)  # noqa: B023
        ranks.kill(number=number, ranks=slice(victim, victim + 1))
        start, other = time.monotonic(), ranks.pids[1 - victim]
        code = os.waitstatus_to_exitcode(os.waitpid(other, 0)[1])
        seconds = time.monotonic() - start
        os.kill(ranks.pids[victim], signal.SIGKILL)
        os.waitpid(ranks.pids[victim], 0)
        log = ranks.log.read_text()
        found[name] = {"code": code, "seconds": seconds, "log": log, "process": ranks.pids[victim]}
    return found


def full_disk(root: Path) -> Result:
    """A small tmpfs takes two checkpoints and not the third; after it grows the run goes on."""
    folder = root / "full"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "none", folder], check=False)
    if mounted.returncode:
        return {"mounted": False}
    try:
        config = settings(keep_checkpoints=9)
        check = trainer.check_space
        trainer.check_space = lambda *args: None  # which would find it before the first step
        result = _ended(Ranks(folder, 2, config))
        result["left"] = sorted(path.name for path in folder.glob("step-*"))
        subprocess.run(["mount", "-o", "remount,size=16m", folder], check=True)
        result["last"] = Ranks(folder, 2, config).wait()
        trainer.check_space = check
        Ranks(root / "full-whole", 2, config).wait()
        return result | {"mounted": True, "distance": distance(final(root / "full-whole"), final(folder))}
    finally:
        subprocess.run(["umount", folder], check=True)


def truncated(root: Path) -> Result:
    """The newest checkpoint loses its last byte."""
    config = settings(keep_checkpoints=9)
    Ranks(root / "truncated-whole", 2, config).wait()
    ranks = Ranks(root / "truncated", 2, config)
    _until(lambda: _steps(root / "truncated") >= 2)
    ranks.kill()
    ranks.wait()
    file = root / "truncated" / f"step-{_steps(root / 'truncated'):07d}" / checkpoint.TRAINING
    os.truncate(file, file.stat().st_size - 1)
    result = _ended(Ranks(root / "truncated", 2, config))
    apart = distance(final(root / "truncated-whole"), final(root / "truncated"))
    return result | {"file": str(file), "distance": apart}


def masked(root: Path) -> Result:
    """No document of a whole step has a generated token."""

    def prepare(source: MemorySource) -> None:
        _, packs = trainer.plan_steps(source.rows("train"), settings(), 5)[1]
        for id in (id for pack in packs for id in pack):
            source.load(id).loss_mask_T.zero_()

    result = _ended(Ranks(root / "masked", 2, settings(epochs=1), prepare))
    return result | {"is_finite": all(bool(x.isfinite().all()) for x in final(root / "masked").values())}


def copies(root: Path) -> Result:
    """Two nodes with disks of their own: equal copies, then one changed byte, then other settings."""
    parts, found = [root / "node-0" / "stage", root / "node-1" / "stage"], {}
    for part in parts:
        stage = Stage(part, "hidden_states", {})
        stage.begin()
        for i in range(3):
            (part / f"shard-{i}").write_bytes(bytes(100))
        stage.complete([f"shard-{i}" for i in range(3)])

    def prepare(source: MemorySource) -> None:
        os.environ["GROUP_RANK"] = str(engine.rank())
        own = {"hidden_states": stage_fingerprint(parts[engine.rank()]), "seed": seeds[engine.rank()]}
        check_copies(lambda: own, [parts[engine.rank()]])
        sys.exit(0)

    seeds = [0, 0]
    found["equal"] = _ended(Ranks(root / "copies-equal", 2, prepare=prepare))
    found["stamps"] = [len(list(part.glob(".verified-*"))) for part in parts]
    (parts[1] / "shard-1").write_bytes(bytes(99) + b"1")
    found["byte"] = _ended(Ranks(root / "copies-byte", 2, prepare=prepare))
    seeds = [0, 1]
    found["seed"] = _ended(Ranks(root / "copies-seed", 2, prepare=prepare))
    return found


SCENARIOS = (
    copies,
    torture,
    elastic,
    bfloat16,
    terminated,
    nan_gradient,
    nan_forever,
    nan_row,
    dead_reader,
    lost_rank,
    full_disk,
    truncated,
    masked,
)


def main() -> None:
    """Plays the scenarios (or those named behind OUT) one after the other."""
    root, names = Path(sys.argv[1]), sys.argv[2:]
    results = {}
    for scenario in SCENARIOS:
        if not names or scenario.__name__ in names:
            start = time.monotonic()
            results[scenario.__name__] = scenario(root)
            print(f"{scenario.__name__} {time.monotonic() - start:.1f} s", flush=True)
    (root / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
