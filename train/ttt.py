"""Training-time test: the unroll of a draft head over its own outputs (EAGLE-3, 2503.01840).

Step k of row t depends only on the step-0 keys of rows <= t and on row t's own chain, so any
subset of the rows is unrolled exactly: rows without supervision give step-0 keys and nothing
else, and with survival sampling each step hands a nested random subset to the next.

Shapes: T rows of the pack, R_k rows unrolled at step k, X head rows of all steps, K steps, L
captured layers, D hidden size, P teachers, V target vocabulary, W draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.data.types import DraftBatch
from slipstream.drafters.eagle3 import Eagle3Head
from slipstream.drafters.fused import rms_norm
from slipstream.drafters.layers import DraftLayer, Rotary, norm_eps
from slipstream.drafters.ttt_attention import AttentionRows, Chain, attention_rows, unrolled_attention
from slipstream.train.config import LossConfig, LossMean, OutsideVocab, TeacherForm, UnrollConfig
from slipstream.train.losses import LossRows, Teacher, head_loss, plan_loss_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """Which rows one unroll step computes."""

    rows: AttentionRows
    """Rows of the pack, ascending."""
    kept_R: Tensor
    """int64; where these rows stand among the rows of the step before."""

    def to(self, device: torch.device) -> "StepPlan":
        """Moves the indices to a device."""
        return StepPlan(rows=self.rows.to(device), kept_R=self.kept_R.to(device, non_blocking=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class UnrollPlan:
    """Rows of every step, decided on the CPU before the device sees the batch."""

    steps: Sequence[StepPlan]
    loss_rows: LossRows
    count_K: Tensor
    """float64; rows that would carry loss at each step if every row survived."""
    num_terms_K: Tensor
    """float64; what the loss of each step is the mean of: these rows, or the documents they lie in."""

    def to(self, device: torch.device) -> "UnrollPlan":
        """Moves the indices to a device."""
        steps = [step.to(device) for step in self.steps]
        return replace(self, steps=steps, loss_rows=self.loss_rows.to(device))


def plan_unroll(
    batch: DraftBatch,
    *,
    draft_ids_V: Tensor,
    config: UnrollConfig,
    chunk_rows: int,
    mean: LossMean = LossMean.token,
) -> UnrollPlan:
    """Chooses the rows of every step.

    Row t is unrolled at step k when it counts there and `survival_T[t] < config.survival**k`, which
    nests the subsets. A row carries loss unless its target argmax lies outside the draft
    vocabulary and `config.outside_vocab` is drop.

    Args:
        batch: on the CPU.
        draft_ids_V: draft id of every target id, -1 without one.
        config: unroll settings; survival 1.0 keeps every row.
        chunk_rows: rows whose logits exist at one time.
        mean: what the loss is a mean of.
    """
    num_live, draw = batch.num_live_T.numpy(), batch.survival_T.numpy()
    teacher = batch.teacher_T.numpy()
    known_P = (draft_ids_V[batch.argmax_P] >= 0).numpy()
    if config.outside_vocab is OutsideVocab.renormalise:
        known_P = np.ones_like(known_P)
    document = np.searchsorted(batch.document_starts, np.arange(num_live.size), side="right") - 1
    steps, counts, num_terms, previous = [], [], [], np.arange(num_live.size)
    loss_rows, teachers, shares = [], [], []
    for k in range(config.num_steps):
        live = np.flatnonzero(num_live > k)
        counting = live[known_P[teacher[live + k]]]
        of_document = np.bincount(document[counting], minlength=len(batch.document_starts))
        counts.append(float(counting.size))
        num_terms.append(counts[-1] if mean is LossMean.token else float((of_document > 0).sum()))
        rows = live[draw[live] < config.survival**k]
        if rows.size == 0:
            continue  # subsets are nested, so the steps that compute something stay contiguous
        steps.append(
            StepPlan(
                rows=attention_rows(rows, batch.document_starts),
                kept_R=torch.from_numpy(np.searchsorted(previous, rows)),
            )
        )
        loss_rows.append(np.flatnonzero(known_P[teacher[rows + k]]))
        carrying = rows[loss_rows[-1]]
        teachers.append(teacher[carrying + k])
        shares.append(
            np.ones(carrying.size) if mean is LossMean.token else 1 / of_document[document[carrying]]
        )
        previous = rows
    return UnrollPlan(
        steps=steps,
        loss_rows=plan_loss_rows(loss_rows, teachers, chunk_rows, shares),
        count_K=torch.tensor(counts, dtype=torch.float64),
        num_terms_K=torch.tensor(num_terms, dtype=torch.float64),
    )


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

    def __init__(self, head: Eagle3Head, frozen: FrozenTarget, config: LossConfig) -> None:
        super().__init__()
        self.head = head
        self._frozen, self._config = frozen, config

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
        result = head_loss(
            unroll(self.head, batch, plan, self._frozen.embedding_VD),
            self.head.norm.weight,
            norm_eps(self.head.norm),
            self.head.lm_head.weight,
            self._teacher(batch),
            plan.loss_rows,
            weight_K=weight_K,
            kind=self._config.kind,
        )
        missing = num_steps - len(plan.steps)
        num_rows = [step.kept_R.numel() for step in plan.steps]
        counts = torch.tensor([plan.loss_rows.rows_of_steps(), num_rows], dtype=torch.float32)
        num_loss_rows_K, num_rows_K = F.pad(counts, (0, missing)).to(weight_K.device, non_blocking=True)
        return UnrollOutput(
            result.total,
            F.pad(result.loss_K, (0, missing)),
            num_loss_rows_K,
            F.pad(result.correct_K, (0, missing)),
            num_rows_K,
        )

    @torch.no_grad()
    def _teacher(self, batch: DraftBatch) -> Teacher:
        frozen, normed_PD, top = self._frozen, batch.last_hidden_PD, None
        if batch.top_ids_PE.numel():
            top = (frozen.draft_ids_V[batch.top_ids_PE], batch.top_log_probs_PE)
        else:
            normed_PD = rms_norm(normed_PD, frozen.norm_D, frozen.norm_eps)[0]
        teacher = Teacher(
            normed_PD=normed_PD,
            lm_head_WD=frozen.lm_head_WD,
            logsumexp_P=batch.logsumexp_P,
            draft_argmax_P=frozen.draft_ids_V[batch.argmax_P],
            top=top,
        )
        if self._config.teacher is TeacherForm.cached:
            teacher = teacher.with_cache(self._config.chunk_rows(len(frozen.lm_head_WD)))
        return teacher


def unroll(head: Eagle3Head, batch: DraftBatch, plan: UnrollPlan, embedding_VD: Tensor) -> list[Tensor]:
    """Output of the last layer, before the final norm, at every step, [R_k, D] each.

    Step 0 fuses the target's states. At step k >= 1 a row feeds its own carried state and the
    embedding of x[t+1+k] (teacher forcing), at rotary position t+k. Below the last layer step 0
    runs on every row, since the keys of the layer above come from its output.
    """
    embed_TD = F.embedding(batch.token_T, embedding_VD)
    input_TD = head.fuse(batch.aux_TLD)
    layers: list[_UnrolledLayer] = []
    for layer in head.decoder_layers():
        if layers:
            input_TD = layers[-1].step(0, _every_row(batch), input_TD)
        layers.append(_UnrolledLayer(head.rotary, layer, input_TD, embed_TD, batch.position_T))

    outs: list[Tensor] = []
    state_RD = input_TD
    for k, step in enumerate(plan.steps):
        # Only rows that survive the step before go on.
        if k:
            state_RD = head.carried(state_RD)
        state_RD = state_RD.index_select(0, step.kept_R)
        for unrolled in layers if k else layers[-1:]:
            state_RD = unrolled.step(k, step, state_RD)
        outs.append(state_RD)
    return outs


class _UnrolledLayer:
    """A layer over one pack: step-0 keys and values of all rows, and the chains of the unrolled ones."""

    def __init__(
        self, rotary: Rotary, layer: DraftLayer, input_TD: Tensor, embed_TD: Tensor, position_T: Tensor
    ) -> None:
        self._rotary, self._layer, self._position_T = rotary, layer, position_T
        # The embedding's share only shifts from step to step.
        self._shares = layer.embedding_shares(embed_TD)
        every_row = torch.arange(len(input_TD), device=input_TD.device)
        key_TMH, self._value_TMH = layer.project("kv", input_TD, self._shares, every_row)
        self._key_TMH = rotary(key_TMH, position_T)
        self._chain: list[Chain] = []

    def step(self, k: int, step: StepPlan, state_RD: Tensor) -> Tensor:
        """Output of the layer at step k for the rows of `step`, whose input is `state_RD`."""
        source_R, position_R = step.rows.row_R + k, self._position_T[step.rows.row_R] + k
        query_RNH, *own = self._layer.project("qkv" if k else "q", state_RD, self._shares, source_R)
        # What their chain has made so far goes on with the rows that survive.
        self._chain = [c._replace(place_R=c.place_R.index_select(0, step.kept_R)) for c in self._chain]
        if k:
            place_R = torch.arange(len(state_RD), device=state_RD.device)
            self._chain.append(Chain(self._rotary(own[0], position_R), own[1], place_R))
        attended_RX = unrolled_attention(
            self._rotary(query_RNH, position_R), self._key_TMH, self._value_TMH, self._chain, step.rows
        )
        return self._layer.finish(state_RD, attended_RX)


def _every_row(batch: DraftBatch) -> StepPlan:
    """Step 0 of every row of every document."""
    device = batch.token_T.device
    rows = np.arange(batch.token_T.numel())
    plan = StepPlan(rows=attention_rows(rows, batch.document_starts), kept_R=torch.from_numpy(rows))
    return plan.to(device)
