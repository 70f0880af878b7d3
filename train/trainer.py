"""The training loop, top to bottom in `fit`."""

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from slipstream.data.batches import CachedFeeder, align, pack, plan_epoch
from slipstream.data.cache import HiddenStateSource, RowInfo
from slipstream.data.config import Dtype
from slipstream.data.files import Stage
from slipstream.data.progress import Meter, say
from slipstream.data.types import DraftBatch
from slipstream.train import engine as distributed
from slipstream.train.average import Average
from slipstream.train.checkpoint import (
    TRAINING,
    TrainState,
    check_space,
    read_tensors,
    resume_point,
    save_checkpoint,
)
from slipstream.train.config import TrainConfig
from slipstream.train.engine import Engine
from slipstream.train.faults import Skips, Termination
from slipstream.train.metrics import Reporter, StepSums
from slipstream.train.schedule import learning_rate
from slipstream.train.selection import Selection
from slipstream.train.ttt import FrozenTarget, Unroller, UnrollPlan, plan_unroll
from slipstream.train.watch import Watch

PlannedStep = tuple[int, list[list[str]]]


def plan_steps(
    rows: Sequence[RowInfo], config: TrainConfig, seed: int, shuffle_shards: int = 0
) -> list[PlannedStep]:
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
            shuffle_shards=shuffle_shards,
        )
    ]
    return steps[: config.max_steps or None]


def without_empty_packs(config: TrainConfig, steps: Sequence[PlannedStep]) -> TrainConfig:
    """The settings, with no more packs in a step than the largest step has, or the ranks need.

    Raises:
        ValueError: there is no step.
    """
    if not steps:
        raise ValueError("there is no training document: add prompts")
    num_ranks, largest = distributed.world_size(), max(len(packs) for _, packs in steps)
    num_packs = math.ceil(largest / num_ranks) * num_ranks
    if config.packs_per_step <= num_packs:
        return config
    say(
        f"warning: train.packs_per_step={config.packs_per_step} is more than the {largest} packs of an "
        f"epoch: every step takes a whole epoch"
    )
    return replace(config, packs_per_step=num_packs)


def fit(  # noqa: PLR0915 - the loop is to be read from top to bottom
    unroller: Unroller,
    source: HiddenStateSource,
    config: TrainConfig,
    *,
    frozen: FrozenTarget,
    stage: Stage,
    seed: int,
    device: torch.device,
    selection: Selection,
    shuffle_shards: int = 0,
) -> TrainState:
    """Trains until the planned steps are done, resuming from the newest complete checkpoint.

    Args:
        unroller: the module to train, equal on every rank.
        source: documents with the target's states.
        config: the recipe's section.
        frozen: the target's tensors (on the CPU; only its vocabulary map is read here).
        stage: begun here, once everything is built; its folder takes checkpoints and logs.
        seed: of order and survival draws.
        device: of this rank.
        selection: measures heads while they are trained.
        shuffle_shards: see `plan_epoch`.

    Returns:
        The final state; its checkpoint is on disk.
    """
    folder = stage.folder
    steps = plan_steps(source.rows("train"), config, seed, shuffle_shards)
    config = without_empty_packs(config, steps)
    check_space(folder, sum(p.numel() for p in unroller.parameters()), config.keep_checkpoints)
    checkpoint, state = resume_point(folder)
    average = Average(unroller.head, config.ema, checkpoint).to(device)
    engine = Engine(unroller, config, device)
    if checkpoint is not None:
        engine.load(read_tensors(checkpoint / TRAINING) if distributed.rank() == 0 else {})
        say(f"train        resumes after step {state.step} of {len(steps)}")
    selection.resume(state.step)
    if distributed.rank() == 0:
        stage.begin()
    dtype = torch.bfloat16 if config.deepspeed.dtype is Dtype.bfloat16 else torch.float32
    reporter = Reporter(folder, config, device=device, state=state)
    feeder = CachedFeeder(
        source,
        steps[state.position :],
        packs_per_step=config.packs_per_step,
        rank=distributed.rank(),
        world_size=distributed.world_size(),
        seed=seed,
        pin_memory=device.type == "cuda",
    )
    seconds_before, start = state.seconds, time.monotonic()
    skips, saved = Skips(), state.position
    with (
        Watch(config.rank_timeout),
        Termination() as termination,
        Meter("train", len(steps), unit="steps") as meter,
    ):
        meter.skip(state.position)
        while state.position < len(steps) and not selection.is_over and not termination.was_asked(device):
            # Data: this rank's packs, which of their rows each unroll step computes, and their weights.
            with reporter.waiting():
                packs = feeder.step_packs()
            plans, weight_K, num_tokens = plan_packs(packs, config, frozen, device)
            rate = learning_rate(state.step + 1, total_steps=len(steps), config=config)
            # Step: forward and backward for each pack; the last one updates the weights.
            outputs = []
            for batch, plan in zip(packs, plans, strict=True):
                outputs.append(engine(batch.to(device, dtype), plan.to(device), weight_K))
                engine.backward(outputs[-1].loss)
                is_done = engine.step(rate)
            if not skips.count(is_done, state):
                meter.advance(1)
                continue
            state.step += 1
            average.update(state.step)
            state.train_tokens += num_tokens
            state.seconds = seconds_before + time.monotonic() - start
            # Report, validate, decode, save.
            reporter.add(*outputs)
            is_last = state.position == len(steps)
            if state.step % config.log_every == 0 or is_last:
                reporter.report(state, lr=rate, grad_norm=engine.grad_norm())
            if state.step % config.validate_every == 0 or is_last:
                with average.in_place():
                    reporter.validation(
                        state, validate(engine, source, config, frozen=frozen, device=device, seed=seed)
                    )
            if selection.is_due(state.step, is_last):
                reporter.selection(selection.measure(state.step, average.head, reporter.losses()))
            if state.step % config.save_every == 0:
                save_checkpoint(folder, engine, average.head, state, config.keep_checkpoints)
                selection.prune()
                saved = state.position
            meter.advance(1, reporter.note)
        if state.position > saved:
            save_checkpoint(folder, engine, average.head, state, config.keep_checkpoints)
            selection.prune()
    feeder.close()
    reporter.close()
    termination.leave(state, len(steps))
    return state


def plan_packs(
    packs: Sequence[DraftBatch], config: TrainConfig, frozen: FrozenTarget, device: torch.device
) -> tuple[list[UnrollPlan], Tensor, int]:
    """Chooses the rows of this rank's packs.

    The loss is a sum over rows divided by the global count of what it is a mean of, whatever rank
    holds them.

    Returns:
        The plans; the factor [K] of every row of an unroll step, on the device; supervised tokens of
        the optimizer step on all ranks.
    """
    plans = [
        plan_unroll(
            batch,
            draft_ids_V=frozen.draft_ids_V,
            config=config.unroll,
            chunk_rows=config.loss.chunk_rows(len(frozen.lm_head_WD)),
            mean=config.loss.mean,
        )
        for batch in packs
    ]
    sums = torch.stack([torch.stack((plan.count_K, plan.num_terms_K)) for plan in plans]).sum(0)
    count_K, num_terms_K = distributed.sum_over_ranks(sums.to(device, torch.float32)).cpu()
    decay_K = (config.unroll.step_decay / config.unroll.survival) ** torch.arange(len(count_K)).double()
    weight_K = decay_K / num_terms_K.clamp_min(1)
    return plans, weight_K.to(device, torch.float32), int(count_K[0])


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
