"""Speculative decoding of one sequence: draft a chain, verify it in one target pass, accept, commit.

What the head is fed is what a server feeds it (ENGINES.md section 2). With n committed tokens the
target's cache holds n - 1 rows: the last token has no state yet. A round runs that token and the
drafts through the target, keeps the rows of the accepted ones, and hands their states to the
drafter together with the token that follows each.

Shape suffixes: T token row, K drafted token, N = K + 1 verified position, D hidden size, V target
vocabulary, W draft vocabulary.
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
from slipstream.eval.verify import accept_greedy, accept_sampled, truncated_probs


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are chosen; temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0.0

    def probs(self, logits: Tensor) -> Tensor:
        """The distribution that is sampled from, of logits [..., V]; not for greedy."""
        return truncated_probs(logits, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)


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

    def start(self, prompt_ids: Sequence[int], max_length: int) -> None:
        """Begins a sequence that will hold at most `max_length` tokens."""

    def propose(
        self,
        next_ids_T: Tensor,
        aux_LTD: Sequence[Tensor],
        num_tokens: int,
        sampling: Sampling,
        generator: torch.Generator | None,
    ) -> Draft:
        """Drafts behind the committed tokens.

        Args:
            next_ids_T: the token after each row committed since the last call; the last one was
                just sampled and has no state yet.
            aux_LTD: states of these rows, one [T, D] for each of `aux_layers`.
            num_tokens: at most so many, at least 1.
            sampling: the same as the target's.
            generator: on the target's device.
        """


class NoDrafter:
    """Drafts nothing: plain autoregressive decoding through the same code."""

    aux_layers: tuple[int, ...] = ()

    def start(self, prompt_ids: Sequence[int], max_length: int) -> None:
        """Nothing to prepare."""

    def propose(
        self,
        next_ids_T: Tensor,
        aux_LTD: Sequence[Tensor],
        num_tokens: int,
        sampling: Sampling,
        generator: torch.Generator | None,
    ) -> Draft:
        """An empty chain."""
        return Draft(ids_K=next_ids_T[:0])


class EagleDrafter:
    """Drafts with an EAGLE-3 head over its own key-value cache."""

    def __init__(self, head: Eagle3Head, embedding_VD: Tensor, target_ids_W: Tensor) -> None:
        """Takes tensors on the target's device, in the type the head runs in.

        Args:
            head: in evaluation mode.
            embedding_VD: the target's.
            target_ids_W: target id of each draft id.
        """
        self.aux_layers: tuple[int, ...] = head.geometry.aux_layers
        self._head, self._embedding_VD, self._target_ids_W = head, embedding_VD, target_ids_W

    def start(self, prompt_ids: Sequence[int], max_length: int) -> None:
        """Empties the cache."""
        embedding = self._embedding_VD
        self._cache = DraftCache(1, max_length, self._head.geometry, embedding.device, embedding.dtype)
        self._position_1T = torch.arange(max_length, device=embedding.device)[None]
        self._num_committed = 0

    def propose(
        self,
        next_ids_T: Tensor,
        aux_LTD: Sequence[Tensor],
        num_tokens: int,
        sampling: Sampling,
        generator: torch.Generator | None,
    ) -> Draft:
        """See `Drafter`."""
        # Rows of the last round's drafts are replaced by rows of true target states.
        self._cache.truncate(self._num_committed)
        start, self._num_committed = self._num_committed, self._num_committed + len(next_ids_T)
        hidden = self._head.fuse(torch.stack(tuple(aux_LTD), dim=1))[None]
        carried, final = self._run(next_ids_T, hidden, start)
        chosen = [self._choose(final, sampling, generator)]
        while len(chosen) < num_tokens:
            carried, final = self._run(chosen[-1][0], carried[:, -1:], self._cache.length)
            chosen.append(self._choose(final, sampling, generator))
        probs = [probs_1V for _, probs_1V in chosen if probs_1V is not None]
        return Draft(
            ids_K=torch.cat([ids_1 for ids_1, _ in chosen]), probs_KV=torch.cat(probs) if probs else None
        )

    def _run(self, ids_T: Tensor, hidden_1TD: Tensor, start: int) -> tuple[Tensor, Tensor]:
        embed_1TD = F.embedding(ids_T, self._embedding_VD)[None]
        position_1T = self._position_1T[:, start : start + len(ids_T)]
        states: tuple[Tensor, Tensor] = self._head(embed_1TD, hidden_1TD, position_1T, self._cache)
        return states

    def _choose(
        self, final_1TD: Tensor, sampling: Sampling, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor | None]:
        """The next draft [1] in target ids, and the distribution [1, V] it was sampled from."""
        logits_1W = self._head.logits(final_1TD[:, -1])
        if sampling.is_greedy:
            return self._target_ids_W[logits_1W.argmax(dim=-1)], None
        probs_1W = sampling.probs(logits_1W)
        id_1 = torch.multinomial(probs_1W, 1, generator=generator)[0]
        probs_1V = probs_1W.new_zeros(1, self._embedding_VD.shape[0])
        probs_1V[:, self._target_ids_W] = probs_1W
        return self._target_ids_W[id_1], probs_1V


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One verification round.

    Drafts behind an accepted stop token belong to no answer and count neither way.
    """

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

    cache: PreallocatedCache
    states: Mapping[int, Tensor]
    """Boundary -> states [1, T, D] of the target's last pass."""
    max_new_tokens: int
    generator: torch.Generator | None
    next_ids_T: Tensor
    """The token after each row the drafter has not seen; the last has no target state yet."""
    aux_LTD: list[Tensor]
    token_ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finished: bool = False


class SpeculativeDecoder:
    """Decodes one sequence at a time; the tokens are those the target alone would give."""

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: Drafter,
        *,
        num_draft_tokens: int,
        sampling: Sampling,
        stop_ids: Sequence[int],
    ) -> None:
        """Takes the target's model in evaluation mode.

        Args:
            model: the target.
            drafter: on the target's device.
            num_draft_tokens: K.
            sampling: of drafter and target alike.
            stop_ids: tokens that end an answer.
        """
        self._model, self._drafter = model, drafter
        self._num_draft_tokens, self._sampling = num_draft_tokens, sampling
        self._stop_ids = frozenset(stop_ids)
        config = model.config.get_text_config(decoder=True)
        self._num_layers: int = config.num_hidden_layers
        self._max_positions: int = config.max_position_embeddings

    @torch.inference_mode()
    def generate(
        self, prompt_ids: Sequence[int], max_new_tokens: int, generator: torch.Generator | None = None
    ) -> DecodeResult:
        """Decodes one answer.

        Args:
            prompt_ids: at least one token.
            max_new_tokens: never exceeded.
            generator: on the target's device; unused when greedy.

        Raises:
            ValueError: prompt and answer do not fit the target's positions.
        """
        if len(prompt_ids) + max_new_tokens > self._max_positions:
            raise ValueError(
                f"a prompt of {len(prompt_ids)} tokens and eval.max_new_tokens={max_new_tokens} exceed "
                f"the target's {self._max_positions} positions: lower it or shorten the prompt"
            )
        start = time.perf_counter()
        with recorded_states(self._model.get_decoder(), self._drafter.aux_layers) as states:
            run = self._prefill(prompt_ids, max_new_tokens, states, generator)
            while not run.finished:
                self._step(run)
        seconds = time.perf_counter() - start
        return DecodeResult(token_ids=tuple(run.token_ids), rounds=tuple(run.rounds), seconds=seconds)

    def _step(self, run: _Run) -> None:
        draft = self._draft(run)
        logits_NV = self._verify(run, draft)
        num_accepted, next_token = self._accept(draft, logits_NV, run.generator)
        self._commit(run, draft, num_accepted, next_token)

    def _prefill(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        states: Mapping[int, Tensor],
        generator: torch.Generator | None,
    ) -> _Run:
        max_length = len(prompt_ids) + max_new_tokens
        self._drafter.start(prompt_ids, max_length)
        prompt_T = torch.tensor(prompt_ids, device=self._model.device)
        run = _Run(
            cache=PreallocatedCache(self._num_layers, max_length),
            states=states,
            max_new_tokens=max_new_tokens,
            generator=generator,
            next_ids_T=prompt_T,
            aux_LTD=[],
        )
        logits_1V = self._forward(run, prompt_T, logits_to_keep=1)
        _, first = self._accept(Draft(ids_K=prompt_T[:0]), logits_1V, generator)
        self._extend(run, [first])
        run.next_ids_T = torch.cat([prompt_T[1:], run.next_ids_T])
        run.aux_LTD = self._aux(run, len(prompt_ids))
        return run

    def _draft(self, run: _Run) -> Draft:
        # The round gives one token more than it drafts, and the answer must not exceed its limit.
        num = min(self._num_draft_tokens, run.max_new_tokens - len(run.token_ids) - 1)
        if num == 0:
            return Draft(ids_K=run.next_ids_T[:0])
        return self._drafter.propose(run.next_ids_T, run.aux_LTD, num, self._sampling, run.generator)

    def _verify(self, run: _Run, draft: Draft) -> Tensor:
        return self._forward(run, torch.cat([run.next_ids_T[-1:], draft.ids_K]), logits_to_keep=0)

    def _forward(self, run: _Run, ids_T: Tensor, *, logits_to_keep: int) -> Tensor:
        """Runs new tokens over the cache; logits of the last `logits_to_keep` (0: of all)."""
        output = self._model(
            input_ids=ids_T[None], cache=run.cache, use_cache=True, logits_to_keep=logits_to_keep
        )
        logits: Tensor = output.logits[0]
        return logits

    def _accept(self, draft: Draft, logits_NV: Tensor, generator: torch.Generator | None) -> tuple[int, int]:
        if self._sampling.is_greedy:
            return accept_greedy(draft.ids_K, logits_NV.argmax(dim=-1))
        probs_NV = self._sampling.probs(logits_NV)
        draft_probs_KV = draft.probs_KV
        if draft_probs_KV is None:
            draft_probs_KV = F.one_hot(draft.ids_K, probs_NV.shape[-1]).to(probs_NV.dtype)
        return accept_sampled(draft.ids_K, draft_probs_KV, probs_NV, generator)

    def _commit(self, run: _Run, draft: Draft, num_accepted: int, next_token: int) -> None:
        num_drafted = len(draft.ids_K)
        run.cache.crop(run.cache.get_seq_length() - num_drafted + num_accepted)
        run.aux_LTD = self._aux(run, num_accepted + 1)
        tokens = [*draft.ids_K[:num_accepted].tolist(), next_token]
        num_kept = self._extend(run, tokens)
        run.rounds.append(
            Round(
                drafted=num_drafted if num_kept == len(tokens) else num_kept,
                accepted=min(num_accepted, num_kept),
            )
        )

    def _aux(self, run: _Run, num_rows: int) -> list[Tensor]:
        """States of the first rows of the last pass, one [T, D] for each boundary."""
        return [run.states[boundary][0, :num_rows] for boundary in self._drafter.aux_layers]

    def _extend(self, run: _Run, tokens: list[int]) -> int:
        """Adds tokens to the answer up to the first stop token; returns how many."""
        stops = [i for i, token in enumerate(tokens) if token in self._stop_ids]
        num_kept = stops[0] + 1 if stops else len(tokens)
        run.token_ids += tokens[:num_kept]
        run.finished = bool(stops) or len(run.token_ids) >= run.max_new_tokens
        run.next_ids_T = torch.tensor(tokens, device=self._model.device)
        return num_kept
