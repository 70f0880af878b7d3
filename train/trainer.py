"""The training loop, top to bottom in `fit`."""

import itertools
import time
from collections.abc import Sequence
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
from slipstream.train.metrics import Log, StepSums, rates
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
    unroll, is_main = config.unroll, distributed.rank() == 0
    sums = StepSums(unroll.num_steps, device)
    log = Log(folder, config.wandb, name=folder.parent.name, step=state.step) if is_main else None
    feeder = CachedFeeder(
        source,
        steps[state.step :],
        packs_per_step=config.packs_per_step,
        rank=distributed.rank(),
        world_size=distributed.world_size(),
        seed=seed,
        pin_memory=device.type == "cuda",
    )
    ratio = unroll.step_decay / unroll.survival
    scale_K = torch.tensor([ratio**k for k in range(unroll.num_steps)], dtype=torch.float64)
    seconds_before, start, waited, logged = state.seconds, time.monotonic(), 0.0, time.monotonic()
    with Meter("train", len(steps), unit="steps") as meter:
        meter.skip(state.step)
        while state.step < len(steps):
            # Data: this rank's packs, and which of their rows each unroll step computes.
            asked = time.monotonic()
            packs = feeder.step_packs()
            waited += time.monotonic() - asked
            plans = [
                plan_unroll(p, draft_ids_V=frozen.draft_ids_V, config=unroll, survival=unroll.survival)
                for p in packs
            ]
            # Loss: a sum over rows divided by the global count, whatever rank holds them.
            count_K = distributed.sum_over_ranks(sum(plan.count_K for plan in plans).to(device, torch.float32))
            weight_K = (scale_K / count_K.cpu().clamp_min(1)).to(device, torch.float32)
            rate = learning_rate(
                state.step + 1,
                total_steps=len(steps),
                peak=config.learning_rate,
                warmup_share=config.warmup_share,
                schedule=config.schedule,
                final_share=config.final_lr_share,
            )
            # Step: forward and backward for each pack; the last one updates the weights.
            for batch, plan in zip(packs, plans, strict=True):
                output = engine(batch.to(device, dtype), plan.to(device), weight_K)
                engine.backward(output.loss)
                engine.step(rate)
                sums.add(output)
            state.step += 1
            state.train_tokens += int(count_K[0])
            state.seconds = seconds_before + time.monotonic() - start
            is_last = state.step == len(steps)
            # Report.
            if state.step % config.log_every == 0 or is_last:
                figures = rates(distributed.sum_over_ranks(sums.take()), "train")
                _stop_if_broken(figures, state.step)
                now = time.monotonic()
                if log is not None:
                    extra = {"lr": rate, "grad_norm": engine.grad_norm(), "train_tokens": state.train_tokens}
                    waiting = waited / max(now - logged, 1e-9)
                    log.write(state.step, figures | extra | {"waiting_share": round(waiting, 4)})
                meter.advance(0, f"loss {figures['train/loss'][0]:.3f} accept {figures['train/accept_rate'][0]:.3f}")
                waited, logged = 0.0, now
            meter.advance(1)
            if state.step % config.validate_every == 0 or is_last:
                figures = validate(engine, source, config, frozen=frozen, device=device, dtype=dtype, seed=seed)
                if log is not None and figures:
                    log.write(state.step, figures)
                    say(f"validation   step {state.step}: accept rate {figures['validation/accept_rate']}")
            if state.step % config.save_every == 0 or is_last:
                save_checkpoint(folder, engine, unroller.head, state, settings, config.keep_checkpoints)
    feeder.close()
    if log is not None:
        log.close()
    return state


@torch.no_grad()
def validate(
    engine: Engine,
    source: HiddenStateSource,
    config: TrainConfig,
    *,
    frozen: FrozenTarget,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
) -> dict[str, Any]:
    """Loss and accept rate of every unroll step on the validation split, all rows, all ranks."""
    rows = source.rows("validation")
    reached = list(itertools.accumulate(row.num_tokens for row in rows))
    rows = [row for row, tokens in zip(rows, reached, strict=True) if tokens <= config.validate_tokens]
    if not rows:
        return {}
    steps = plan_epoch(rows, tokens_per_pack=config.tokens_per_pack, packs_per_step=1, seed=seed, epoch=0)
    sums = StepSums(config.unroll.num_steps, device)
    weight_K = torch.zeros(config.unroll.num_steps, device=device)
    for packs in steps[distributed.rank() :: distributed.world_size()]:
        batch = pack([align(source.load(i), seed=seed, epoch=0) for i in packs[0]])
        plan = plan_unroll(batch, draft_ids_V=frozen.draft_ids_V, config=config.unroll, survival=1.0)
        sums.add(engine(batch.to(device, dtype), plan.to(device), weight_K))
    return rates(distributed.sum_over_ranks(sums.take()), "validation")


def _stop_if_broken(figures: dict[str, Any], step: int) -> None:
    loss: Tensor = torch.tensor(figures["train/loss"])
    if not torch.isfinite(loss).all():
        raise ValueError(
            f"the loss is not finite at step {step}: lower train.learning_rate; "
            "the last checkpoint is kept and a new start resumes there"
        )
