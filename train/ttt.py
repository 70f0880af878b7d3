"""Training-time test: the unroll of a draft head over its own outputs (EAGLE-3, 2503.01840).

Step k of row t depends only on the step-0 keys of rows <= t and on row t's own chain, so any
subset of the rows is unrolled exactly: rows without supervision give step-0 keys and nothing
else, and with survival sampling each step hands a nested random subset to the next.

Shapes: T rows of the pack, R_k rows unrolled at step k, X head rows of all steps, K steps, L
captured layers, D hidden size, P teachers, V target vocabulary, W draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.data.types import DraftBatch
from slipstream.drafters.eagle3 import Eagle3Head
from slipstream.drafters.layers import DraftLayer, Rotary
from slipstream.drafters.ttt_attention import unrolled_attention
from slipstream.train.config import Loss, OutsideVocab, UnrollConfig
from slipstream.train.losses import Teacher, head_loss, make_teacher


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """Which rows one unroll step computes."""

    row_R: Tensor
    """int64; rows of the pack, ascending."""
    kept_R: Tensor
    """int64; where these rows stand among the rows of the step before."""
    loss_X: Tensor
    """int64; which of these rows carry loss."""
    segments: Sequence[tuple[int, int, int, int]]
    """See `unrolled_attention`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnrollPlan:
    """Rows of every step, decided on the CPU before the device sees the batch."""

    steps: Sequence[StepPlan]
    count_K: Tensor
    """float64; rows that would carry loss at each step if every row survived."""

    def to(self, device: torch.device) -> "UnrollPlan":
        """Moves the indices to a device."""
        moved = [
            StepPlan(
                row_R=step.row_R.to(device, non_blocking=True),
                kept_R=step.kept_R.to(device, non_blocking=True),
                loss_X=step.loss_X.to(device, non_blocking=True),
                segments=step.segments,
            )
            for step in self.steps
        ]
        return UnrollPlan(steps=moved, count_K=self.count_K)


def plan_unroll(batch: DraftBatch, *, draft_ids_V: Tensor, config: UnrollConfig) -> UnrollPlan:
    """Chooses the rows of every step.

    Row t is unrolled at step k when it counts there and `survival_T[t] < config.survival**k`, which
    nests the subsets. A row carries loss unless its target argmax lies outside the draft
    vocabulary and `config.outside_vocab` is drop.

    Args:
        batch: on the CPU.
        draft_ids_V: draft id of every target id, -1 without one.
        config: unroll settings; survival 1.0 keeps every row.
    """
    num_live, draw = batch.num_live_T.numpy(), batch.survival_T.numpy()
    teacher = batch.teacher_T.numpy()
    known_P = (draft_ids_V[batch.argmax_P] >= 0).numpy()
    if config.outside_vocab is OutsideVocab.renormalise:
        known_P = np.ones_like(known_P)
    starts = np.asarray(batch.document_starts)
    steps, counts, previous = [], [], np.arange(num_live.size)
    for k in range(config.num_steps):
        live = np.flatnonzero(num_live > k)
        counts.append(float(known_P[teacher[live + k]].sum()))
        rows = live[draw[live] < config.survival**k]
        if rows.size == 0:
            continue  # subsets are nested, so the steps that compute something stay contiguous
        bounds = np.searchsorted(rows, starts)
        segments = [
            (int(a), int(b), int(starts[d]), int(rows[b - 1]) + 1)
            for d, (a, b) in enumerate(zip(bounds[:-1], bounds[1:], strict=True))
            if b > a
        ]
        steps.append(
            StepPlan(
                row_R=torch.from_numpy(rows),
                kept_R=torch.from_numpy(np.searchsorted(previous, rows)),
                loss_X=torch.from_numpy(np.flatnonzero(known_P[teacher[rows + k]])),
                segments=segments,
            )
        )
        previous = rows
    return UnrollPlan(steps=steps, count_K=torch.tensor(counts, dtype=torch.float64))


class FrozenTarget(NamedTuple):
    """The target's tensors that training reads and never changes."""

    embedding_VD: Tensor
    norm_D: Tensor
    norm_eps: float
    lm_head_WD: Tensor
    """Head rows of the draft vocabulary."""
    draft_ids_V: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> "FrozenTarget":
        """Moves to a device; floating-point tensors become `dtype`."""
        return FrozenTarget(
            self.embedding_VD.to(device, dtype),
            self.norm_D.to(device, dtype),
            self.norm_eps,
            self.lm_head_WD.to(device, dtype),
            self.draft_ids_V.to(device),
        )


class UnrollOutput(NamedTuple):
    """Sums over the rows of one pack; all tensors stay on the device."""

    loss: Tensor
    """What is differentiated: row weights times row losses."""
    loss_sum_K: Tensor
    num_loss_rows_K: Tensor
    correct_K: Tensor
    """Rows whose draft argmax is the target argmax."""
    num_rows_K: Tensor
    """Unrolled rows, those outside the draft vocabulary (always a miss) included."""


class Unroller(nn.Module):
    """The trained module: a head, the target's frozen tensors beside it, and the unroll."""

    def __init__(self, head: Eagle3Head, frozen: FrozenTarget, *, kind: Loss, chunk_rows: int) -> None:
        super().__init__()
        self.head = head
        self._frozen, self._kind, self._chunk_rows = frozen, kind, chunk_rows

    def forward(self, batch: DraftBatch, plan: UnrollPlan, weight_K: Tensor) -> UnrollOutput:
        """Unrolls one pack.

        Args:
            batch: on the head's device.
            plan: its rows, on the same device.
            weight_K: factor of every row of step k in the loss.
        """
        num_steps = weight_K.numel()
        if not plan.steps:
            # Every parameter takes part, so ranks with an empty pack reduce the same gradients.
            nothing = sum(parameter.sum() * 0.0 for parameter in self.head.parameters())
            zero_K = torch.zeros(num_steps, device=weight_K.device)
            return UnrollOutput(torch.as_tensor(nothing), zero_K, zero_K, zero_K, zero_K)
        teacher = self._teacher(batch)
        finals = unroll(self.head, batch, plan, self._frozen.embedding_VD)
        final_XD = torch.cat([f[step.loss_X] for f, step in zip(finals, plan.steps, strict=True)])
        teacher_X = torch.cat(
            [batch.teacher_T[step.row_R[step.loss_X] + k] for k, step in enumerate(plan.steps)]
        )
        sizes = [step.loss_X.numel() for step in plan.steps]
        weight_X = torch.cat([weight_K[k].expand(size) for k, size in enumerate(sizes)])
        result = head_loss(
            final_XD,
            self.head.lm_head.weight,
            teacher,
            teacher_R=teacher_X,
            row_weight_R=weight_X,
            kind=self._kind,
            chunk_rows=self._chunk_rows,
        )
        padding = [0.0] * (num_steps - len(sizes))
        rows = [float(step.row_R.numel()) for step in plan.steps]
        return UnrollOutput(
            result.total,
            _sum_by_step(result.loss_R, sizes, num_steps),
            torch.tensor([*map(float, sizes), *padding], device=weight_K.device),
            _sum_by_step(result.correct_R.float(), sizes, num_steps),
            torch.tensor([*rows, *padding], device=weight_K.device),
        )

    @torch.no_grad()
    def _teacher(self, batch: DraftBatch) -> Teacher:
        frozen = self._frozen
        return make_teacher(
            batch.last_hidden_PD,
            norm_D=frozen.norm_D,
            norm_eps=frozen.norm_eps,
            lm_head_WD=frozen.lm_head_WD,
            logsumexp_P=batch.logsumexp_P,
            draft_argmax_P=frozen.draft_ids_V[batch.argmax_P],
        )


def unroll(head: Eagle3Head, batch: DraftBatch, plan: UnrollPlan, embedding_VD: Tensor) -> list[Tensor]:
    """Final states of the head at every step, [R_k, D] each.

    Step 0 fuses the target's states. At step k >= 1 a row feeds its own carried state and the
    embedding of x[t+1+k] (teacher forcing), at rotary position t+k. Below the last layer step 0
    runs on every row, since the keys of the layer above come from its output.
    """
    embed_TD = F.embedding(batch.token_T, embedding_VD)
    input_TD = fused_TD = head.fuse(batch.aux_TLD)
    layers: list[_UnrolledLayer] = []
    for layer in head.decoder_layers():
        if layers:
            input_TD = layers[-1].step(0, _every_row(batch), input_TD)
        layers.append(_UnrolledLayer(head.rotary, layer, input_TD, embed_TD, batch.position_T))

    finals: list[Tensor] = []
    carried_RD = fused_TD
    for k, step in enumerate(plan.steps):
        # Only rows that survive the step before go on.
        state_RD = carried_RD[step.kept_R] if k else input_TD[step.row_R]
        for unrolled in layers if k else layers[-1:]:
            state_RD = unrolled.step(k, step, state_RD)
        carried_RD, final_RD = head.finish(state_RD)
        finals.append(final_RD)
    return finals


class _UnrolledLayer:
    """A layer over one pack: step-0 keys and values of all rows, and the chains of the unrolled ones."""

    def __init__(
        self, rotary: Rotary, layer: DraftLayer, input_TD: Tensor, embed_TD: Tensor, position_T: Tensor
    ) -> None:
        self._rotary, self._layer, self._position_T = rotary, layer, position_T
        # The embedding's share only shifts from step to step.
        self._halves = layer.embedding_halves(embed_TD)
        self._normed_TD = layer.normed(input_TD)
        self._key_TMH = rotary(self._project("k", self._normed_TD), position_T)
        self._value_TMH = self._project("v", self._normed_TD)
        self._chain: list[tuple[Tensor, Tensor]] = []

    def step(self, k: int, step: StepPlan, state_RD: Tensor) -> Tensor:
        """Output of the layer at step k for the rows of `step`, whose input is `state_RD`."""
        # What their chain has made so far goes on with the rows that survive.
        self._chain = [(key[step.kept_R], value[step.kept_R]) for key, value in self._chain]
        source_R, position_R = step.row_R + k, self._position_T[step.row_R] + k
        normed_RD = self._layer.normed(state_RD) if k else self._normed_TD[step.row_R]
        query_RNH = self._rotary(self._project("q", normed_RD, source_R), position_R)
        if k:
            key_RMH = self._rotary(self._project("k", normed_RD, source_R), position_R)
            self._chain.append((key_RMH, self._project("v", normed_RD, source_R)))
        attended_RX = unrolled_attention(
            query_RNH, self._key_TMH, self._value_TMH, self._chain, step.row_R, step.segments
        )
        return self._layer.finish(self._layer.residual(state_RD, normed_RD), attended_RX)

    def _project(self, name: str, normed_RD: Tensor, source_R: Tensor | None = None) -> Tensor:
        half = self._halves.get(name)
        if half is not None and source_R is not None:
            half = half[source_R]
        return self._layer.self_attn.project(name, normed_RD, half)


def _every_row(batch: DraftBatch) -> StepPlan:
    """Step 0 of every row of every document."""
    row_T = torch.arange(batch.token_T.numel(), device=batch.token_T.device)
    starts = batch.document_starts
    segments = [(a, b, a, b) for a, b in zip(starts[:-1], starts[1:], strict=True) if b > a]
    return StepPlan(row_R=row_T, kept_R=row_T, loss_X=row_T, segments=segments)


def _sum_by_step(value_X: Tensor, sizes: Sequence[int], num_steps: int) -> Tensor:
    sums = [part.sum() for part in value_X.split(list(sizes))]
    return torch.stack(sums + [value_X.new_zeros(())] * (num_steps - len(sums)))
