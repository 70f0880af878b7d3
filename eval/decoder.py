"""Speculative decoding of one sequence: draft, verify in one target pass, accept, commit.

What the head is fed is what a server feeds it (ENGINES.md section 2). With n committed tokens the
target's cache holds n - 1 rows: the last token has no state yet. A round runs that token and the
drafts through the target, keeps the rows of the accepted ones, and hands their states to the
drafter together with the token that follows each. The prompt is a round that drafts nothing.
A tree takes the same way with its own mask and positions; the rows of its accepted branch are then
moved together, and the prefix stays where it is.

Shape suffixes: T token row, K drafted token, N = K + 1 verified position, S cached token, L captured
layer, D hidden size, V target vocabulary.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.data.states import recorded_states
from slipstream.data.target.kv_cache import PreallocatedCache
from slipstream.eval.drafting import Draft, Drafter
from slipstream.eval.tree import accept_tree_greedy, accept_tree_sampled, tree_inputs
from slipstream.eval.verify import Dice, Sampling, accept_greedy, accept_sampled


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One verification round; drafts behind an accepted stop token count neither way."""

    drafted: int
    """Positions drafted: the depth of a tree."""
    accepted: int
    nodes: int = 0
    """Tokens of a tree; 0 for a chain, whose positions hold one each."""

    @property
    def num_tokens(self) -> int:
        """Drafted tokens, each of which the target has verified."""
        return self.nodes or self.drafted


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeResult:
    """A decoded answer."""

    token_ids: tuple[int, ...]
    """Ends with the stop token, unless the limit came first."""
    rounds: tuple[Round, ...]
    """One for each target pass after the prompt's."""
    seconds: float
    """Prompt included."""
    draft_seconds: float = 0.0
    """Of these in the drafter."""
    verify_seconds: float = 0.0
    """Of these in the target, prompt included; the rest is the decoder's own."""


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
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
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
                times = [time.perf_counter()]
                draft = self._draft(run)
                times.append(time.perf_counter())
                logits_NV = self._verify(run, draft)
                times.append(time.perf_counter())
                run.draft_seconds += times[1] - times[0]
                run.verify_seconds += times[2] - times[1]
                accepted, next_token = self._accept(run, draft, logits_NV)
                self._commit(run, draft, accepted, next_token)
        seconds = time.perf_counter() - begin
        return DecodeResult(
            token_ids=tuple(run.token_ids),
            rounds=tuple(run.rounds[1:]),
            seconds=seconds,
            draft_seconds=run.draft_seconds,
            verify_seconds=run.verify_seconds,
        )

    def _draft(self, run: _Run) -> Draft:
        # A round gives one token more than it drafts, and the answer must not exceed its limit.
        num_tokens = min(self._num_draft_tokens, run.max_new_tokens - len(run.token_ids) - 1)
        if num_tokens == 0 or not run.token_ids:  # the prompt's round has no states to draft from
            return Draft(ids_K=run.pending_T[:0])
        return self._drafter.propose(run.next_ids_T, run.aux_LTD, num_tokens)

    def _verify(self, run: _Run, draft: Draft) -> Tensor:
        ids_1T = torch.cat([run.pending_T, draft.ids_K])[None]
        num_logits = len(draft.ids_K) + 1
        inputs: dict[str, Tensor] = {}
        if draft.tree is not None:
            inputs = tree_inputs(draft.tree, run.cache.get_seq_length(), self._model.dtype)
        output = self._model(
            input_ids=ids_1T, cache=run.cache, use_cache=True, logits_to_keep=num_logits, **inputs
        )
        logits_NV: Tensor = output.logits[0]
        return logits_NV

    def _accept(self, run: _Run, draft: Draft, logits_NV: Tensor) -> tuple[list[int], int]:
        """Places of the accepted drafts, and the token after them."""
        if self._sampling.is_greedy:
            target_ids_N = logits_NV.argmax(dim=-1)
            if draft.tree is not None:
                return accept_tree_greedy(draft.ids_K, draft.tree, target_ids_N)
            num_accepted, next_token = accept_greedy(draft.ids_K, target_ids_N)
            return list(range(num_accepted)), next_token
        probs_NV = self._sampling.probs(logits_NV)
        if draft.tree is not None:
            return accept_tree_sampled(draft.ids_K, draft.tree, draft.probs_KV, probs_NV, Dice(run.generator))
        draft_probs_KV = draft.probs_KV
        if draft_probs_KV is None:
            draft_probs_KV = F.one_hot(draft.ids_K, probs_NV.shape[-1]).to(probs_NV.dtype)
        num_accepted, next_token = accept_sampled(draft.ids_K, draft_probs_KV, probs_NV, run.generator)
        return list(range(num_accepted)), next_token

    def _commit(self, run: _Run, draft: Draft, accepted: Sequence[int], next_token: int) -> None:
        num_pending, depth = len(run.pending_T), len(draft.ids_K)
        if draft.tree is not None:
            depth = int(draft.tree.depth_K.max())
        run.cache.keep_tail(run.cache.get_seq_length() - len(draft.ids_K), accepted)
        kept_T = [*range(num_pending), *(num_pending + place for place in accepted)]
        run.aux_LTD = [_rows(run.states[boundary][0], kept_T) for boundary in self._drafter.aux_layers]
        tokens = [*draft.ids_K[list(accepted)].tolist(), next_token]
        tokens_T = torch.tensor(tokens, device=self._model.device)
        run.next_ids_T = torch.cat([run.pending_T[1:], tokens_T])
        run.pending_T = tokens_T[-1:]
        num_kept = next((i for i, token in enumerate(tokens, 1) if token in self._stop_ids), len(tokens))
        run.token_ids += tokens[:num_kept]
        run.finished = run.token_ids[-1] in self._stop_ids or len(run.token_ids) >= run.max_new_tokens
        num_accepted = len(accepted)
        if num_kept < len(tokens):
            depth = num_accepted = num_kept
        nodes = 0 if draft.tree is None else len(draft.ids_K)
        run.rounds.append(Round(drafted=depth, accepted=num_accepted, nodes=nodes))


def _rows(states_TD: Tensor, places: Sequence[int]) -> Tensor:
    """Some rows, by a view where they are the first ones."""
    if list(places) == list(range(len(places))):
        return states_TD[: len(places)]
    return states_TD[torch.tensor(places, device=states_TD.device)]
