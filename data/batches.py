"""From cached documents to aligned, packed batches. `align` is the only place that shifts."""

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch

from slipstream.data.cache import HiddenStateSource, RowInfo
from slipstream.data.types import IGNORED, DraftBatch, HiddenStateSample, num_rows


def align(sample: HiddenStateSample, *, seed: int, epoch: int) -> DraftBatch:
    """One document as rows: the single statement of who sees and predicts what.

    Row t joins the target's states of token t with the embedding of token t+1 and predicts what
    the target says about token t+2, which is the teacher stored for token t+1 (ALGORITHMS.md
    section 1). It counts at unroll step k when x[t+1] .. x[t+2+k] all lie in one generated span.
    Rows behind the last one that counts are left out, since nothing attends to them.

    Generated-token mask 0 0 0 0 1 1 1 0 of x0..x7: row 3 counts at k=0 and k=1, row 4 at k=0.

    >>> zeros = torch.zeros
    >>> mask = torch.tensor([0, 0, 0, 0, 1, 1, 1, 0], dtype=torch.bool)
    >>> rows = align(
    ...     HiddenStateSample(
    ...         id="a", input_ids_T=torch.arange(8), loss_mask_T=mask, aux_TLD=zeros(8, 3, 4),
    ...         last_hidden_PD=zeros(3, 4), argmax_P=zeros(3).long(), logsumexp_P=zeros(3),
    ...     ), seed=0, epoch=0,
    ... )
    >>> rows.token_T.tolist(), rows.num_live_T.tolist(), rows.teacher_T.tolist()
    ([1, 2, 3, 4, 5], [0, 0, 0, 2, 1], [-1, -1, -1, 0, 1])

    Raises:
        ValueError: a state is not finite.
    """
    check_finite(sample)
    mask, rows = sample.loss_mask_T.numpy(), num_rows(sample.loss_mask_T)
    run_left, run = np.zeros(mask.size + 1, dtype=np.int64), 0
    for t in range(mask.size - 1, -1, -1):
        run = run + 1 if mask[t] else 0
        run_left[t] = run
    after = slice(1, rows + 1)
    teacher = np.where(mask, np.cumsum(mask) - 1, IGNORED)
    digest = hashlib.sha256(f"{seed}/{epoch}/{sample.id}".encode()).digest()
    random = np.random.default_rng(int.from_bytes(digest[:8], "big"))
    return DraftBatch(
        token_T=sample.input_ids_T[after],
        aux_TLD=sample.aux_TLD[:rows],
        position_T=torch.arange(rows),
        num_live_T=torch.from_numpy(np.maximum(run_left[after] - 1, 0)),
        survival_T=torch.from_numpy(random.random(rows, dtype=np.float32)),
        teacher_T=torch.from_numpy(teacher[after]),
        document_starts=(0, rows),
        last_hidden_PD=sample.last_hidden_PD,
        argmax_P=sample.argmax_P,
        logsumexp_P=sample.logsumexp_P,
        top_ids_PE=sample.top_ids_PE,
        top_log_probs_PE=sample.top_log_probs_PE,
        ids=(sample.id,),
    )


def check_finite(sample: HiddenStateSample) -> None:
    """Raises ValueError, which names the document, where a state is not a number."""
    for name in ("aux_TLD", "last_hidden_PD", "logsumexp_P"):
        states = getattr(sample, name)
        # One pass without a copy; a sum may overflow, so it only raises a suspicion.
        if not states.sum(dtype=torch.float32).isfinite() and not (finite := states.isfinite()).all():
            where = int((~finite).nonzero()[0, 0])
            raise ValueError(
                f"document {sample.id} has a state that is not finite ({name}, row {where}): delete the "
                f"hidden_states folder to capture again, or leave the document out"
            )


def pack(documents: Sequence[DraftBatch]) -> DraftBatch:
    """Lays documents one after the other; nothing is padded."""
    starts, teachers, num_teachers = [0], [], 0
    for document in documents:
        starts.append(starts[-1] + document.token_T.numel())
        has_teacher = document.teacher_T != IGNORED
        teachers.append(torch.where(has_teacher, document.teacher_T + num_teachers, IGNORED))
        num_teachers += document.argmax_P.numel()

    def joined(name: str) -> torch.Tensor:
        return torch.cat([getattr(document, name) for document in documents])

    return DraftBatch(
        token_T=joined("token_T"),
        aux_TLD=joined("aux_TLD"),
        position_T=joined("position_T"),
        num_live_T=joined("num_live_T"),
        survival_T=joined("survival_T"),
        teacher_T=torch.cat(teachers),
        document_starts=starts,
        last_hidden_PD=joined("last_hidden_PD"),
        argmax_P=joined("argmax_P"),
        logsumexp_P=joined("logsumexp_P"),
        top_ids_PE=joined("top_ids_PE"),
        top_log_probs_PE=joined("top_log_probs_PE"),
        ids=[i for document in documents for i in document.ids],
    )


def plan_epoch(
    rows: Sequence[RowInfo],
    *,
    tokens_per_pack: int,
    packs_per_step: int,
    seed: int,
    epoch: int,
    shuffle_shards: int = 0,
) -> list[list[list[str]]]:
    """Decides which documents share a pack and which packs share an optimizer step.

    The plan depends on the rows, the seed and the epoch only, never on the number of ranks. With
    `shuffle_shards` the documents of so many shards, drawn anew in each epoch, are shuffled together.

    Returns:
        For each optimizer step its packs, each a list of document ids. Only the last step may
        hold fewer than `packs_per_step` packs.
    """
    order = _order(rows, np.random.default_rng([seed, epoch]), shuffle_shards)
    packs: list[list[str]] = []
    used = tokens_per_pack
    for i in order:
        row = rows[i]
        if used + row.num_tokens > tokens_per_pack:
            packs.append([])
            used = 0
        packs[-1].append(row.id)
        used += row.num_tokens
    return [packs[i : i + packs_per_step] for i in range(0, len(packs), packs_per_step)]


def _order(rows: Sequence[RowInfo], random: np.random.Generator, shuffle_shards: int) -> list[int]:
    if not shuffle_shards:
        return list(map(int, random.permutation(len(rows))))
    shards: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        shards.setdefault(row.shard, []).append(i)
    names = random.permutation(sorted(shards)).tolist()
    order: list[int] = []
    for start in range(0, len(names), shuffle_shards):
        together = [i for name in names[start : start + shuffle_shards] for i in shards[name]]
        order += map(int, random.permutation(together))
    return order


class Feeder(Protocol):
    """Gives this rank the packs of one optimizer step after the other."""

    def step_packs(self) -> list[DraftBatch]:
        """This rank's packs of the next step, the same number on every rank."""


class CachedFeeder:
    """Reads packs ahead of the training step in a background thread."""

    def __init__(
        self,
        source: HiddenStateSource,
        steps: Sequence[tuple[int, list[list[str]]]],
        *,
        packs_per_step: int,
        rank: int,
        world_size: int,
        seed: int,
        pin_memory: bool,
    ) -> None:
        """Begins to read.

        Args:
            source: where documents come from.
            steps: (epoch, packs) of every optimizer step still to do.
            packs_per_step: global packs of a step; ranks without a pack get an empty one.
            rank: this process.
            world_size: processes that share a step.
            seed: of the survival draws.
            pin_memory: for faster copies to a CUDA device.
        """
        self._source, self._seed, self._pin = source, seed, pin_memory
        self._mine = range(rank, packs_per_step, world_size)
        self._steps = iter(steps)
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._pending = self._submit()

    def _submit(self) -> "Future[list[DraftBatch]] | None":
        step = next(self._steps, None)
        return None if step is None else self._pool.submit(self._read, *step)

    def _read(self, epoch: int, packs: list[list[str]]) -> list[DraftBatch]:
        return [
            self._build(packs[i] if i < len(packs) else packs[0][:1], epoch, i < len(packs))
            for i in self._mine
        ]

    def _build(self, ids: list[str], epoch: int, is_real: bool) -> DraftBatch:
        documents = [align(self._source.load(i), seed=self._seed, epoch=epoch) for i in ids]
        batch = pack(documents)
        if not is_real:
            batch.num_live_T.zero_()
        return batch.pin_memory() if self._pin else batch

    def step_packs(self) -> list[DraftBatch]:
        """See `Feeder`."""
        assert self._pending is not None, "more steps asked for than planned"
        packs = self._pending.result()
        self._pending = self._submit()
        return packs

    def close(self) -> None:
        """Stops reading."""
        self._pool.shutdown(wait=False, cancel_futures=True)
