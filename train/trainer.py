"""The training loop, top to bottom in `fit`."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.data.batches import CachedFeeder, align, pack, plan_epoch
from slipstream.data.cache import HiddenStateSource, RowInfo
from slipstream.data.config import Dtype
from slipstream.data.progress import Meter, say
from slipstream.train import engine as distributed
from slipstream.train.checkpoint import TrainState, latest_checkpoint, read_state, save_checkpoint
from slipstream.train.config import TrainConfig
from slipstream.train.engine import Engine
from slipstream.train.metrics import Reporter, StepSums
from slipstream.train.schedule import learning_rate
from slipstream.train.ttt import FrozenTarget, Unroller, plan_unroll

PlannedStep = tuple[int, list[list[str]]]


def plan_steps(rows: Sequence[RowInfo], config: TrainConfig, seed: int) -> list[PlannedStep]:
    """(epoch, packs) of every optimizer step of the run."""
    steps = [
        (epoch, packs)
        for epoch in range(config.epochs)
        for packs in plan_epoch(
            rows,
            tokens_per_pack=config.tokens_per_pack,
            packs_per_step=config.packs_per_step,
            seed=seed,
            epoch=epoch,
        )
    ]
    return steps[: config.max_steps or None]


def fit(
    unroller: Unroller,
    source: HiddenStateSource,
    config: TrainConfig,
    *,
    frozen: FrozenTarget,
    folder: Path,
    seed: int,
    device: torch.device,
    settings: dict[str, Any],
) -> TrainState:
    """Trains until the planned steps are done, resuming from the newest complete checkpoint.

    Args:
        unroller: the module to train, equal on every rank.
        source: cached documents.
        config: the recipe's section.
        frozen: the target's tensors (on the CPU; only its vocabulary map is read here).
        folder: of checkpoints and logs.
        seed: of order and survival draws.
        device: of this rank.
        settings: identity of the run, kept in its checkpoints.

    Returns:
        The final state; its checkpoint is on disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    steps = plan_steps(source.rows("train"), config, seed)
    if not steps:
        raise ValueError("the hidden-state cache holds no training document: add prompts")
    engine = Engine(unroller, config, device)
    state = TrainState()
    if (newest := latest_checkpoint(folder)) is not None:
        state = read_state(newest)
        engine.load(folder, newest.name)
        say(f"train        resumes after step {state.step} of {len(steps)}")
    dtype = torch.bfloat16 if config.deepspeed.dtype is Dtype.bfloat16 else torch.float32
    reporter = Reporter(folder, config, device=device, step=state.step)
    feeder = CachedFeeder(
        source,
        steps[state.step :],
        packs_per_step=config.packs_per_step,
        rank=distributed.rank(),
        world_size=distributed.world_size(),
        seed=seed,
        pin_memory=device.type == "cuda",
    )
    chunk_rows = config.loss.chunk_rows(len(frozen.lm_head_WD))
    decay_K = torch.arange(config.unroll.num_steps)
    decay_K = (config.unroll.step_decay / config.unroll.survival) ** decay_K.double()
    seconds_before, start = state.seconds, time.monotonic()
    with Meter("train", len(steps), unit="steps") as meter:
        meter.skip(state.step)
        while state.step < len(steps):
            # Data: this rank's packs, and which of their rows each unroll step computes.
            with reporter.waiting():
                packs = feeder.step_packs()
            plans = [
                plan_unroll(p, draft_ids_V=frozen.draft_ids_V, config=config.unroll, chunk_rows=chunk_rows)
                for p in packs
            ]
            # Loss: a sum over rows divided by the global count, whatever rank holds them.
            count_K = torch.stack([plan.count_K for plan in plans]).sum(0)
            count_K = distributed.sum_over_ranks(count_K.to(device, torch.float32)).cpu()
            weight_K = (decay_K / count_K.clamp_min(1)).to(device, torch.float32)
            rate = learning_rate(state.step + 1, total_steps=len(steps), config=config)
            # Step: forward and backward for each pack; the last one updates the weights.
            for batch, plan in zip(packs, plans, strict=True):
                output = engine(batch.to(device, dtype), plan.to(device), weight_K)
                engine.backward(output.loss)
                engine.step(rate)
                reporter.add(output)
            state.step += 1
            state.train_tokens += int(count_K[0])
            state.seconds = seconds_before + time.monotonic() - start
            # Report, validate, save.
            is_last = state.step == len(steps)
            if state.step % config.log_every == 0 or is_last:
                reporter.report(state, lr=rate, grad_norm=engine.grad_norm())
            meter.advance(1, reporter.note)
            if state.step % config.validate_every == 0 or is_last:
                reporter.validation(
                    state, validate(engine, source, config, frozen=frozen, device=device, seed=seed)
                )
            if state.step % config.save_every == 0 or is_last:
                save_checkpoint(folder, engine, unroller.head, state, settings, config.keep_checkpoints)
    feeder.close()
    reporter.close()
    return state


@torch.no_grad()
def validate(
    engine: Engine,
    source: HiddenStateSource,
    config: TrainConfig,
    *,
    frozen: FrozenTarget,
    device: torch.device,
    seed: int,
) -> Tensor:
    """Sums over the validation split, every row, of this rank: see `StepSums.take`."""
    rows = source.rows("validation")
    reached = list(itertools.accumulate(row.num_tokens for row in rows))
    rows = [row for row, tokens in zip(rows, reached, strict=True) if tokens <= config.validate_tokens]
    steps = plan_epoch(rows, tokens_per_pack=config.tokens_per_pack, packs_per_step=1, seed=seed, epoch=0)
    dtype = torch.bfloat16 if config.deepspeed.dtype is Dtype.bfloat16 else torch.float32
    unroll, chunk_rows = replace(config.unroll, survival=1.0), config.loss.chunk_rows(len(frozen.lm_head_WD))
    sums = StepSums(unroll.num_steps, device)
    weight_K = torch.zeros(unroll.num_steps, device=device)
    for packs in steps[distributed.rank() :: distributed.world_size()]:
        batch = pack([align(source.load(i), seed=seed, epoch=0) for i in packs[0]])
        plan = plan_unroll(batch, draft_ids_V=frozen.draft_ids_V, config=unroll, chunk_rows=chunk_rows)
        sums.add(engine(batch.to(device, dtype), plan.to(device), weight_K))
    return sums.take()
