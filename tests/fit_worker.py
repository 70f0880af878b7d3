"""Trains a small head on a fixed in-memory cache; started by torchrun or by itself.

Usage: fit_worker.py OUT key=value ... with keys of `TrainConfig` (dotted) and stop_after=N, which
kills the process after N optimizer steps as `kill -9` would.
"""

import os
import random
import sys
from pathlib import Path

import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torch import nn

from slipstream.data.files import Stage
from slipstream.train import checkpoint, engine, trainer
from slipstream.train.config import LossConfig, TrainConfig, WandbConfig, WandbMode
from slipstream.train.selection import DecodePrompt, Selection
from slipstream.train.ttt import Unroller
from tests.heads import MemorySource, make_frozen, make_geometry, make_head, make_sample


def main() -> None:
    """Fits and writes the final head."""
    out, overrides = Path(sys.argv[1]), sys.argv[2:]
    stop_after = next((int(o.split("=")[1]) for o in overrides if o.startswith("stop_after=")), 0)
    overrides = [o for o in overrides if not o.startswith("stop_after=")]
    base = TrainConfig(
        epochs=2,
        tokens_per_pack=60,
        packs_per_step=4,
        learning_rate=3e-3,
        warmup_share=0.1,
        log_every=1,
        validate_every=4,
        save_every=3,
        wandb=WandbConfig(mode=WandbMode.disabled),
    )
    merged = OmegaConf.merge(OmegaConf.structured(base), OmegaConf.from_dotlist(overrides))
    config: TrainConfig = OmegaConf.to_object(merged)  # type: ignore[assignment]
    torch.manual_seed(0)
    geometry = make_geometry()
    head, frozen = make_head(geometry), make_frozen(geometry)
    rng = random.Random(0)
    samples = [
        make_sample(
            f"doc{i}",
            [0] * rng.randint(2, 9) + [1] * rng.randint(3, 30) + [0] * rng.randint(0, 4),
            geometry=geometry,
            seed=i,
        )
        for i in range(23)
    ]
    device = engine.init_distributed()
    if stop_after:
        _kill_after(stop_after)
    dtype = getattr(torch, config.deepspeed.dtype.value)
    state = trainer.fit(
        Unroller(head, frozen.to(device, dtype), LossConfig()),
        MemorySource(samples[:20], samples[20:]),
        config,
        frozen=frozen,
        stage=Stage(out, "train", {}),
        seed=5,
        device=device,
        selection=Selection(config.selection, out, [[1], [2, 3], [4]], count_weights),
    )
    if engine.rank() == 0:
        newest, saved = checkpoint.latest_checkpoint(out) or (out, None)
        assert newest.name == f"step-{state.step:07d}"
        assert saved == state
        save_file(checkpoint.read_head(newest / checkpoint.HEAD), out / "final.safetensors")
    engine.shutdown()


def count_weights(head: nn.Module) -> DecodePrompt:
    """In the place of a decoder: a count that depends on the weights."""
    total = sum(parameter.detach().abs().sum() for parameter in head.parameters())
    return lambda prompt_ids: (100, int(total * len(prompt_ids)) % 97)


def _kill_after(num_steps: int) -> None:
    step = engine.Engine.step
    done = 0

    def counted(self: engine.Engine, learning_rate: float) -> bool:
        nonlocal done
        is_done = step(self, learning_rate)
        done += 1
        if done == num_steps * self.num_micro_batches:
            os._exit(9)
        return is_done

    engine.Engine.step = counted  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
