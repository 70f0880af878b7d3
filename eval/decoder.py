"""Speculative decoding of one sequence: draft a chain, verify it in one target pass, accept, commit.

What the head is fed is what a server feeds it (ENGINES.md section 2). With n committed tokens the
target's cache holds n - 1 rows: the last token has no state yet. A round runs that token and the
drafts through the target, keeps the rows of the accepted ones, and hands their states to the
drafter together with the token that follows each. The prompt is a round that drafts nothing.

Shape suffixes: T token row, K drafted token, N = K + 1 verified position, L captured layer, D hidden
size, V target vocabulary, W draft vocabulary.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.data.capture import recorded_states
from slipstream.data.target.kv_cache import PreallocatedCache
from slipstream.drafters.eagle3 import Eagle3Head
from slipstream.drafters.layers import DraftCache
from slipstream.eval.verify import Sampling, accept_greedy, accept_sampled


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A proposed chain."""

    ids_K: Tensor
    """int64 target ids, on the target's device."""
    probs_KV: Tensor | None = None
    """What each was sampled from, over the target vocabulary; None: chosen for certain."""


class Drafter(Protocol):
    """Proposes chains for one sequence at a time."""

    aux_layers: tuple[int, ...]
    """Boundaries of the target states it reads."""

    def start(
        self, prompt_ids: Sequence[int], capacity: int, sampling: Sampling, generator: torch.Generator | None
    ) -> None:
        """Begins a sequence of at most `capacity` tokens, sampled as the target's are."""

    def propose(self, next_ids_T: Tensor, aux_LTD: Sequence[Tensor], num_tokens: int) -> Draft:
        """Drafts behind the committed tokens.

        Args:
            next_ids_T: the token after each row committed since the last call; the last one was
                just sampled and has no state yet.
            aux_LTD: states of these rows, one [T, D] for each of `aux_layers`.
            num_tokens: at most so many, at least 1.
        """


class EagleDrafter:
    """Drafts with an EAGLE-3 head over its own key-value cache."""

    def __init__(self, head: Eagle3Head, embedding_VD: Tensor, target_ids_W: Tensor) -> None:
        """Takes a head in evaluation mode, the target's embedding and the target id of each draft id."""
        self.aux_layers: tuple[int, ...] = head.geometry.aux_layers
        self._head, self._embedding_VD, self._target_ids_W = head, embedding_VD, target_ids_W

    def start(
        self, prompt_ids: Sequence[int], capacity: int, sampling: Sampling, generator: torch.Generator | None
    ) -> None:
        """Empties the cache."""
        embedding = self._embedding_VD
        self._cache = DraftCache(1, capacity, self._head.geometry, embedding.device, embedding.dtype)
        self._position_1T = torch.arange(capacity, device=embedding.device)[None]
        self._num_committed = 0
        self._sampling, self._generator = sampling, generator

    def fuse(self, aux_TLD: Tensor) -> Tensor:
        """Captured states to what the first layer reads, [T, D]."""
        return self._head.fuse(aux_TLD)

    def propose(self, next_ids_T: Tensor, aux_LTD: Sequence[Tensor], num_tokens: int) -> Draft:
        """See `Drafter`."""
        # Rows of the last round's drafts are replaced by rows of true target states.
        self._cache.truncate(self._num_committed)
        self._num_committed += len(next_ids_T)
        ids_T, hidden_1TD = next_ids_T, self.fuse(torch.stack(tuple(aux_LTD), dim=1))[None]
        ids: list[Tensor] = []
        probs: list[Tensor] = []
        while len(ids) < num_tokens:
            start = self._cache.length
            position_1T = self._position_1T[:, start : start + len(ids_T)]
            embed_1TD = F.embedding(ids_T, self._embedding_VD)[None]
            carried_1TD, final_1TD = self._head(embed_1TD, hidden_1TD, position_1T, self._cache)
            logits_1W = self._head.logits(final_1TD[:, -1])
            if self._sampling.is_greedy:
                draft_id_1 = logits_1W.argmax(dim=-1)
            else:
                probs.append(self._sampling.probs(logits_1W))
                draft_id_1 = torch.multinomial(probs[-1], 1, generator=self._generator)[0]
            ids.append(self._target_ids_W[draft_id_1])
            ids_T, hidden_1TD = ids[-1], carried_1TD[:, -1:]
        if self._sampling.is_greedy:
            return Draft(ids_K=torch.cat(ids))
        probs_KV = probs[0].new_zeros(num_tokens, len(self._embedding_VD))
        probs_KV[:, self._target_ids_W] = torch.cat(probs)
        return Draft(ids_K=torch.cat(ids), probs_KV=probs_KV)


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One verification round; drafts behind an accepted stop token count neither way."""

    drafted: int
    accepted: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeResult:
    """A decoded answer."""

    token_ids: tuple[int, ...]
    """Ends with the stop token, unless the limit came first."""
    rounds: tuple[Round, ...]
    """One for each target pass after the prompt's."""
    seconds: float
    """Prompt included."""


@dataclass(kw_only=True, slots=True)
class _Run:
    """The sequence being decoded."""

    max_new_tokens: int
    generator: torch.Generator | None
    cache: PreallocatedCache
    states: Mapping[int, Tensor]
    """Boundary -> states [1, T, D] of the target's last pass."""
    pending_T: Tensor
    """Tokens without a target state: the prompt at first, then the last token."""
    next_ids_T: Tensor = field(init=False)
    """The token after each row of the last pass that was kept."""
    aux_LTD: list[Tensor] = field(init=False)
    """States of these rows, one [T, D] for each boundary."""
    token_ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finished: bool = False


class SpeculativeDecoder:
    """Decodes one sequence at a time; the tokens are those the target alone would give.

    Drafts at most K = `num_draft_tokens` a round, none when it is 0: plain autoregressive decoding.
    `sampling` holds for drafter and target alike; `stop_ids` end an answer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: Drafter,
        *,
        num_draft_tokens: int,
        sampling: Sampling,
        stop_ids: Sequence[int],
    ) -> None:
        self._model, self._drafter = model, drafter
        self._num_draft_tokens, self._sampling = num_draft_tokens, sampling
        self._stop_ids = frozenset(stop_ids)
        self._config = model.config.get_text_config(decoder=True)

    @torch.inference_mode()
    def generate(
        self, prompt_ids: Sequence[int], max_new_tokens: int, generator: torch.Generator | None = None
    ) -> DecodeResult:
        """Decodes one answer to a prompt of at least one token; `generator` on the target's device.

        Raises:
            ValueError: prompt and answer do not fit the target's positions.
        """
        capacity = len(prompt_ids) + max_new_tokens
        if capacity > self._config.max_position_embeddings:
            raise ValueError(
                f"a prompt of {len(prompt_ids)} tokens and eval.max_new_tokens={max_new_tokens} exceed the "
                f"target's {self._config.max_position_embeddings} positions: lower it or shorten the prompt"
            )
        begin = time.perf_counter()
        self._drafter.start(prompt_ids, capacity, self._sampling, generator)
        with recorded_states(self._model.get_decoder(), self._drafter.aux_layers) as states:
            run = _Run(
                max_new_tokens=max_new_tokens,
                generator=generator,
                cache=PreallocatedCache(self._config.num_hidden_layers, capacity),
                states=states,
                pending_T=torch.tensor(prompt_ids, device=self._model.device),
            )
            while not run.finished:
                draft = self._draft(run)
                logits_NV = self._verify(run, draft)
                num_accepted, next_token = self._accept(run, draft, logits_NV)
                self._commit(run, draft, num_accepted, next_token)
        seconds = time.perf_counter() - begin
        return DecodeResult(token_ids=tuple(run.token_ids), rounds=tuple(run.rounds[1:]), seconds=seconds)

    def _draft(self, run: _Run) -> Draft:
        # A round gives one token more than it drafts, and the answer must not exceed its limit.
        num_tokens = min(self._num_draft_tokens, run.max_new_tokens - len(run.token_ids) - 1)
        if num_tokens == 0 or not run.token_ids:  # the prompt's round has no states to draft from
            return Draft(ids_K=run.pending_T[:0])
        return self._drafter.propose(run.next_ids_T, run.aux_LTD, num_tokens)

    def _verify(self, run: _Run, draft: Draft) -> Tensor:
        ids_1T = torch.cat([run.pending_T, draft.ids_K])[None]
        num_logits = len(draft.ids_K) + 1
        output = self._model(input_ids=ids_1T, cache=run.cache, use_cache=True, logits_to_keep=num_logits)
        logits_NV: Tensor = output.logits[0]
        return logits_NV

    def _accept(self, run: _Run, draft: Draft, logits_NV: Tensor) -> tuple[int, int]:
        if self._sampling.is_greedy:
            return accept_greedy(draft.ids_K, logits_NV.argmax(dim=-1))
        probs_NV = self._sampling.probs(logits_NV)
        draft_probs_KV = draft.probs_KV
        if draft_probs_KV is None:
            draft_probs_KV = F.one_hot(draft.ids_K, probs_NV.shape[-1]).to(probs_NV.dtype)
        return accept_sampled(draft.ids_K, draft_probs_KV, probs_NV, run.generator)

    def _commit(self, run: _Run, draft: Draft, num_accepted: int, next_token: int) -> None:
        num_drafted, num_rows = len(draft.ids_K), len(run.pending_T) + num_accepted
        run.cache.crop(run.cache.get_seq_length() - num_drafted + num_accepted)
        run.aux_LTD = [run.states[boundary][0, :num_rows] for boundary in self._drafter.aux_layers]
        tokens = [*draft.ids_K[:num_accepted].tolist(), next_token]
        tokens_T = torch.tensor(tokens, device=self._model.device)
        run.next_ids_T = torch.cat([run.pending_T[1:], tokens_T])
        run.pending_T = tokens_T[-1:]
        num_kept = next((i for i, token in enumerate(tokens, 1) if token in self._stop_ids), len(tokens))
        run.token_ids += tokens[:num_kept]
        run.finished = run.token_ids[-1] in self._stop_ids or len(run.token_ids) >= run.max_new_tokens
        if num_kept < len(tokens):
            num_drafted = num_accepted = num_kept
        run.rounds.append(Round(drafted=num_drafted, accepted=num_accepted))
