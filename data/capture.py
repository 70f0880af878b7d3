"""Runs the target over the tokenized documents and caches its hidden states.

The work is planned before it starts: the same documents and settings give the same batches and
shards, so a killed run continues behind its last whole shard and ends with the same bytes.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.data.cache import STORAGE_DTYPES, CacheWriter
from slipstream.data.config import CaptureConfig, Store, TeacherStore
from slipstream.data.files import Stage, stage_fingerprint
from slipstream.data.progress import Meter, say
from slipstream.data.sizes import Counts, check_size, count, estimate_bytes, estimate_seconds
from slipstream.data.states import capture_batch
from slipstream.data.target.resolve import Target
from slipstream.data.tokenize import read_samples
from slipstream.data.types import HiddenStateSample, TokenizedSample

POLL_SECONDS = 0.5
VLLM_LOG = "vllm.log"
"""What the engine says, in the stage's folder."""

Batch = list[TokenizedSample]
Backend = Callable[[Batch], list[HiddenStateSample]]
"""Runs the target over documents; states at every captured boundary, and the teacher, on the CPU."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The processes that share a capture; each takes every n-th shard."""

    rank: int = 0
    world_size: int = 1
    barrier: Callable[[], None] = lambda: None


def run(
    config: CaptureConfig,
    target: Target,
    aux_layers: tuple[int, ...],
    tokens_folder: Path,
    folder: Path,
    *,
    ranks: Ranks | None = None,
    engine_python: Callable[[], Path] | None = None,
) -> None:
    """The `hidden_states` stage: the target's states at boundaries `aux_layers` for `tokens.parquet`.

    Args:
        config: the recipe's section.
        target: whose states.
        aux_layers: boundaries.
        tokens_folder: the stage before.
        folder: of this stage.
        ranks: the processes that do this together.
        engine_python: gives the interpreter of an engine that `config.backend` names.

    Raises:
        ValueError: no supervised token, too large for the cap or the disk, a state that the
            storage type cannot hold, or a folder made with other settings.
    """
    ranks = ranks or Ranks()
    stage = Stage(folder, "hidden_states", settings(config, target, aux_layers, tokens_folder))
    if stage.is_complete:
        return
    start = time.monotonic()
    samples = read_samples(tokens_folder)
    if not any(sample.loss_mask_T.any() for sample in samples):
        raise ValueError(
            f"{tokens_folder} holds no supervised token: look at its rows with scripts/show_mask.py "
            f"and run the tokens stage again"
        )
    counts = count(samples)
    num_bytes = _check_size(config, counts, target, len(aux_layers), folder)
    shards = plan_shards(samples, config.tokens_per_forward, config.tokens_per_shard)
    if ranks.rank == 0:
        stage.begin()
    ranks.barrier()
    writer = CacheWriter(folder, store=config.store, teacher=config.teacher)
    missing = [n for n in range(ranks.rank, len(shards), ranks.world_size) if not writer.has(n)]
    with _Progress(writer, shards, missing, counts.tokens, num_bytes) as progress:
        if missing:
            with _backend(config, target, aux_layers, engine_python, samples, folder) as capture:
                for number in missing:
                    _capture_shard(capture, writer, number, shards[number], progress)
        if ranks.rank == 0:
            progress.wait_for(set(range(len(shards))) - set(missing))
    if ranks.rank == 0:
        facts = {"tokens": counts.tokens, "supervised_tokens": counts.supervised, "bytes": num_bytes}
        names = writer.finish(len(shards))
        stage.complete(names, **facts, seconds=round(time.monotonic() - start, 1))


def settings(
    config: CaptureConfig, target: Target, aux_layers: tuple[int, ...], tokens_folder: Path
) -> dict[str, object]:
    """Everything that the states depend on; what is as it always was is not named."""
    found: dict[str, object] = {
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "target_dtype": str(target.dtype),
        "aux_layers": aux_layers,
        "dtype": config.dtype.value,
        "tokens": stage_fingerprint(tokens_folder),
        "tokens_per_forward": config.tokens_per_forward,
        "tokens_per_shard": config.tokens_per_shard,
    }
    if config.backend != "hf":
        found["backend"] = config.backend
    if config.store is not Store.bf16:
        found["store"] = config.store.value
    if config.teacher is TeacherStore.topk:
        found["topk"] = config.topk
    return found


@contextlib.contextmanager
def _backend(
    config: CaptureConfig,
    target: Target,
    aux_layers: tuple[int, ...],
    engine_python: Callable[[], Path] | None,
    samples: Sequence[TokenizedSample],
    folder: Path,
) -> Iterator[Backend]:
    """Starts what runs the target, and ends it."""
    dtype, topk = STORAGE_DTYPES[config.dtype], top_k(config)
    if config.backend == "hf":
        model = target.model()
        # Looked up at each call, so that a test can count them.
        yield lambda batch: capture_batch(model, batch, aux_layers, dtype, topk)
        return
    from slipstream.data.backends.vllm_capture import VllmCapture

    assert engine_python is not None, "a backend with an environment of its own"
    with VllmCapture(
        target,
        engine_python(),
        aux_layers,
        tokens_per_forward=config.tokens_per_forward,
        max_tokens=max(len(sample.input_ids_T) for sample in samples),
        dtype=dtype,
        topk=topk,
        log=folder / VLLM_LOG,
    ) as capture:
        yield capture


def top_k(config: CaptureConfig) -> int:
    """Top tokens of each teacher; 0 where it is the last state."""
    return config.topk if config.teacher is TeacherStore.topk else 0


def _capture_shard(
    capture: Backend, writer: CacheWriter, number: int, shard: list[Batch], progress: "_Progress"
) -> None:
    captured: list[HiddenStateSample] = []
    for batch in shard:
        captured += capture(batch)
        progress.advance(batch)
    writer.write(number, captured, [sample.split for batch in shard for sample in batch])
    progress.wrote()


class _Progress(AbstractContextManager["_Progress"]):
    """One line for all ranks: what others have written counts when their shard is whole."""

    def __init__(
        self, writer: CacheWriter, shards: list[list[Batch]], mine: list[int], num_tokens: int, num_bytes: int
    ) -> None:
        self._writer, self._total = writer, num_bytes
        self._tokens = [sum(map(_num_tokens, shard)) for shard in shards]
        self._others = set(range(len(shards))) - set(mine)
        self._rows, self._start, self._disk = 0, time.monotonic(), writer.num_bytes()
        self._meter = Meter("hidden states", num_tokens, unit="tokens")

    def __enter__(self) -> "_Progress":
        self._meter.__enter__()
        there = {number for number in self._others if self._writer.is_recorded(number)}
        self._meter.skip(sum(self._tokens[number] for number in there))
        self._others -= there
        return self

    def __exit__(self, *error: Any) -> None:
        self._meter.__exit__(*error)

    def advance(self, batch: Batch) -> None:
        """Counts a forward pass of this rank."""
        self._rows += len(batch)
        self._show(_num_tokens(batch))

    def wrote(self) -> None:
        """A shard of this rank is on the disk, and maybe others of other ranks."""
        self._disk = self._writer.num_bytes()
        self._show(self._new_of_others())

    def _show(self, num_tokens: int) -> None:
        rate = self._rows / max(time.monotonic() - self._start, 1e-9)
        note = f"{rate:,.1f} rows/s here, {self._disk / 1e9:.2f} of {self._total / 1e9:.2f} GB"
        self._meter.advance(num_tokens, note)

    def wait_for(self, numbers: set[int]) -> None:
        """Returns when these shards are whole, whoever writes them."""
        for number in sorted(numbers):
            while not self._writer.has(number):
                time.sleep(POLL_SECONDS)
            self.wrote()

    def _new_of_others(self) -> int:
        new = {number for number in self._others if self._writer.is_recorded(number)}
        self._others -= new
        return sum(self._tokens[number] for number in new)


def _num_tokens(samples: Sequence[TokenizedSample]) -> int:
    return sum(len(sample.input_ids_T) for sample in samples)


def plan_shards(
    samples: Sequence[TokenizedSample], tokens_per_forward: int, tokens_per_shard: int
) -> list[list[Batch]]:
    """Shards of batches: which documents share a forward pass, and which passes share a shard.

    Longest first: little padding, and a batch that does not fit the memory fails at the start.
    `tokens_per_forward` counts padding; a longer document is a batch of its own.
    """
    batches: list[Batch] = []
    for sample in sorted(samples, key=lambda sample: (-len(sample.input_ids_T), sample.id)):
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0].input_ids_T) <= tokens_per_forward:
            batches[-1].append(sample)
        else:
            batches.append([sample])
    shards: list[list[Batch]] = []
    filled = 0
    for batch in batches:
        if not shards or filled + _num_tokens(batch) > tokens_per_shard:
            shards.append([])
            filled = 0
        shards[-1].append(batch)
        filled += _num_tokens(batch)
    return shards


def _check_size(config: CaptureConfig, counts: Counts, target: Target, num_aux: int, folder: Path) -> int:
    """Says what the cache will take before the first forward pass, and refuses one too large."""
    model = target.config
    sizes = {"hidden_size": model.hidden_size, "vocab_size": model.vocab_size}
    num_bytes = estimate_bytes(config, counts, num_aux=num_aux, **sizes)
    minutes = estimate_seconds(model, counts.tokens, target.device, target.dtype) / 60
    say(
        f"hidden states: {counts.documents:,} documents, {counts.tokens:,} tokens, {counts.supervised:,} "
        f"supervised: {num_bytes / 1e9:.2f} GB in {folder}, roughly {minutes:,.1f} min of one such device"
    )
    check_size(config, num_bytes, folder)
    return num_bytes
