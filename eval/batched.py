"""Speculative decoding of many sequences at once, each accepting as many drafts as it can.

Requests wait until a row is free; a row that ends gives its place to the last one. A guard decides
each round from the queue depth whether anything is drafted (`slipstream.eval.guard`).

Shape suffixes: B active row, T token row, K drafted token, N = K + 1 verified position, L captured
layer, D hidden size, V target vocabulary, W draft vocabulary.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.data.states import recorded_states
from slipstream.drafters.eagle3 import Eagle3Head
from slipstream.eval.guard import SpeculationGuard
from slipstream.eval.ragged import Columns, RaggedCache, RaggedDraftCache, pad_rows
from slipstream.eval.verify import Sampling, accept_sampled_rows

GREEDY = Sampling()


@dataclass(kw_only=True, slots=True)
class Request:
    """One prompt and its answer."""

    prompt_ids: Sequence[int]
    token_ids: list[int] = field(default_factory=list)
    unseen_ids_T: list[Tensor] = field(default_factory=list)
    """Tokens behind the rows that the drafter has not been given yet."""
    unseen_aux_TLD: list[Tensor] = field(default_factory=list)
    num_seen: int = 0
    """Rows that the drafter holds."""

    @property
    def num_committed(self) -> int:
        """Rows in the target's cache: the last token has none yet."""
        return len(self.prompt_ids) + len(self.token_ids) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafts:
    """A chain for every row."""

    ids_BK: Tensor
    probs_BKV: Tensor | None = None
    """What each was sampled from, over the target vocabulary; None: the likeliest was taken."""


@dataclass(kw_only=True, slots=True)
class Served:
    """What serving a list of requests took."""

    answers: list[list[int]]
    rounds: int = 0
    """Target passes of a batch."""
    speculative_rounds: int = 0
    row_rounds: int = 0
    """Rounds times the active rows, of the speculative ones."""
    accepted: int = 0
    seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    """Target passes but for the prompts'."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(map(len, self.answers))

    @property
    def acceptance_length(self) -> float:
        """tau of the speculative rounds."""
        return 1.0 + self.accepted / max(self.row_rounds, 1)


class BatchedHead:
    """An EAGLE-3 or 3.1 head that drafts chains for many rows."""

    def __init__(self, head: Eagle3Head, embedding_VD: Tensor, target_ids_W: Tensor) -> None:
        self.aux_layers = head.geometry.aux_layers
        self._head, self._embedding_VD, self._target_ids_W = head, embedding_VD, target_ids_W

    def start(
        self, num_rows: int, capacity: int, sampling: Sampling, generator: torch.Generator | None
    ) -> None:
        """Empties the cache; the last column takes what is padding. Samples as the target does."""
        self._sampling, self._generator = sampling, generator
        embedding = self._embedding_VD
        self._columns = Columns(num_rows, capacity + 1, embedding.device)
        self._cache = RaggedDraftCache(self._head.geometry, self._columns, embedding.dtype)

    def move_row(self, source: int, destination: int) -> None:
        """Row `destination` becomes a copy of row `source`."""
        self._cache.move_row(source, destination)

    def propose(self, requests: Sequence[Request], num_tokens: int) -> Drafts:
        """Drafts behind the rows that the drafter has not seen yet."""
        ids = [torch.cat(request.unseen_ids_T) for request in requests]
        aux = [torch.cat(request.unseen_aux_TLD) for request in requests]
        device, trash = self._embedding_VD.device, self._columns.capacity - 1
        starts = [request.num_seen for request in requests]
        position_BT = pad_rows(
            [torch.arange(a, a + len(x), device=device) for a, x in zip(starts, ids, strict=True)], trash
        )
        last_B = torch.tensor([len(x) - 1 for x in ids], device=device)
        row_B = torch.arange(len(ids), device=device)
        for request, x in zip(requests, ids, strict=True):
            request.num_seen += len(x)
            request.unseen_ids_T, request.unseen_aux_TLD = [], []
        end = max(request.num_seen for request in requests)
        carried_BTD, final_BTD = self._run(
            pad_rows(ids, 0), self._head.fuse(pad_rows(aux, 0.0)), position_BT, end
        )
        position_B = torch.tensor([request.num_seen for request in requests], device=device)
        carried_BD, final_BD = carried_BTD[row_B, last_B], final_BTD[row_B, last_B]
        chosen = [self._choose(final_BD)]
        while len(chosen) < num_tokens:
            end += 1
            carried_BTD, final_BTD = self._run(
                chosen[-1][0][:, None], carried_BD[:, None], position_B[:, None], end
            )
            carried_BD, position_B = carried_BTD[:, 0], position_B + 1
            chosen.append(self._choose(final_BTD[:, 0]))
        ids_BK = torch.stack([ids_B for ids_B, _ in chosen], dim=1)
        if self._sampling.is_greedy:
            return Drafts(ids_BK=ids_BK)
        return Drafts(ids_BK=ids_BK, probs_BKV=torch.stack([probs_BV for _, probs_BV in chosen], dim=1))

    def _choose(self, final_BD: Tensor) -> tuple[Tensor, Tensor]:
        """Token of each row and what chose it: when sampled, the distribution over the target vocabulary."""
        logits_BW = self._head.logits(final_BD)
        if self._sampling.is_greedy:
            return self._target_ids_W[logits_BW.argmax(-1)], logits_BW
        probs_BW = self._sampling.probs(logits_BW)
        draft_B = torch.multinomial(probs_BW, 1, generator=self._generator)[:, 0]
        probs_BV = probs_BW.new_zeros(len(probs_BW), len(self._embedding_VD))
        probs_BV[:, self._target_ids_W] = probs_BW
        return self._target_ids_W[draft_B], probs_BV

    def _run(
        self, ids_BT: Tensor, hidden_BTD: Tensor, position_BT: Tensor, end: int
    ) -> tuple[Tensor, Tensor]:
        self._columns.place(slice(0, len(ids_BT)), position_BT, end)
        embed_BTD = F.embedding(ids_BT, self._embedding_VD)
        carried, final = self._head(embed_BTD, hidden_BTD, position_BT, self._cache)
        return carried, final


class BatchedDecoder:
    """Serves requests in a batch of at most `max_batch` rows, `max_new_tokens` tokens each."""

    def __init__(
        self,
        model: PreTrainedModel,
        head: BatchedHead,
        *,
        num_draft_tokens: int,
        max_batch: int,
        max_new_tokens: int,
        guard: SpeculationGuard,
        stop_ids: Sequence[int] = (),
        sampling: Sampling = GREEDY,
    ) -> None:
        """Without `stop_ids` every answer has its full length."""
        self._sampling = sampling
        self._model, self._head, self._guard = model, head, guard
        self._num_draft_tokens, self._max_batch = num_draft_tokens, max_batch
        self._max_new_tokens, self._stop_ids = max_new_tokens, frozenset(stop_ids)
        self._num_layers = model.config.get_text_config(decoder=True).num_hidden_layers

    @torch.inference_mode()
    def serve(self, prompts: Sequence[Sequence[int]], generator: torch.Generator | None = None) -> Served:
        """Answers all prompts, in whatever order rows become free; `generator` on the target's device."""
        self._generator = generator
        requests = [Request(prompt_ids=prompt) for prompt in prompts]
        waiting, active = deque(requests), list[Request]()
        capacity = max(map(len, prompts)) + self._max_new_tokens + self._num_draft_tokens + 1
        num_rows = min(self._max_batch, len(prompts))
        cache = RaggedCache(self._num_layers, Columns(num_rows, capacity, self._model.device))
        self._head.start(num_rows, capacity, self._sampling, generator)
        served = Served(answers=[request.token_ids for request in requests])
        begin = time.perf_counter()
        with recorded_states(self._model.get_decoder(), self._head.aux_layers) as states:
            while waiting or active:
                while waiting and len(active) < num_rows:
                    active.append(waiting.popleft())
                    self._prefill(active, cache, states)
                speculates = self._guard.update(len(active) + len(waiting))
                self._round(active, cache, states, served, self._num_draft_tokens if speculates else 0)
                self._retire(active, cache)
        served.seconds = time.perf_counter() - begin
        return served

    def _prefill(self, active: Sequence[Request], cache: RaggedCache, states: dict[int, Tensor]) -> None:
        request, row = active[-1], len(active) - 1
        ids_1T = torch.tensor([request.prompt_ids], device=self._model.device)
        num = ids_1T.shape[1]
        cache.columns.place(slice(row, row + 1), torch.arange(num, device=ids_1T.device)[None], num)
        logits_11V = self._forward(ids_1T, cache, num_logits=1)
        _, next_1 = self._accept(Drafts(ids_BK=ids_1T[:, :0]), logits_11V)
        self._take(request, states, 0, num, torch.cat([ids_1T[0, 1:], next_1]))
        request.token_ids.append(int(next_1))

    def _round(
        self,
        active: Sequence[Request],
        cache: RaggedCache,
        states: dict[int, Tensor],
        served: Served,
        num_drafts: int,
    ) -> None:
        times = [time.perf_counter()]
        device = self._model.device
        last_B1 = torch.tensor([[request.token_ids[-1]] for request in active], device=device)
        drafts = self._head.propose(active, num_drafts) if num_drafts else Drafts(ids_BK=last_B1[:, :0])
        times.append(time.perf_counter())
        start_B1 = torch.tensor([[request.num_committed] for request in active], device=device)
        position_BN = start_B1 + torch.arange(num_drafts + 1, device=device)
        end = max(request.num_committed for request in active) + num_drafts + 1
        cache.columns.place(slice(0, len(active)), position_BN, end)
        ids_BN = torch.cat([last_B1, drafts.ids_BK], dim=1)
        logits_BNV = self._forward(ids_BN, cache, num_logits=num_drafts + 1)
        accepted_B, next_B = self._accept(drafts, logits_BNV)
        token_BN = F.pad(drafts.ids_BK, (0, 1)).scatter(1, accepted_B[:, None], next_B[:, None])
        # One transfer for all: on a GPU each one waits for the device.
        flat = torch.cat([accepted_B[:, None], token_BN], dim=1).tolist()
        times.append(time.perf_counter())
        for row, (request, (accepted, *tokens)) in enumerate(zip(active, flat, strict=True)):
            self._take(request, states, row, accepted + 1, token_BN[row, : accepted + 1])
            request.token_ids += tokens[: accepted + 1]
            served.accepted += accepted
        served.rounds += 1
        served.speculative_rounds += num_drafts > 0
        served.row_rounds += len(active) if num_drafts else 0
        served.draft_seconds += times[1] - times[0]
        served.verify_seconds += times[2] - times[1]

    def _accept(self, drafts: Drafts, logits_BNV: Tensor) -> tuple[Tensor, Tensor]:
        """How many drafts of each row are accepted, and the token after them."""
        if self._sampling.is_greedy:
            own_BN = logits_BNV.argmax(-1)
            accepted_B = (drafts.ids_BK == own_BN[:, :-1]).long().cumprod(1).sum(1)
            return accepted_B, own_BN.gather(1, accepted_B[:, None])[:, 0]
        probs_BNV = self._sampling.probs(logits_BNV)
        draft_probs_BKV = probs_BNV[:, :0] if drafts.probs_BKV is None else drafts.probs_BKV
        return accept_sampled_rows(drafts.ids_BK, draft_probs_BKV, probs_BNV, self._generator)

    def _forward(self, ids_BT: Tensor, cache: RaggedCache, num_logits: int) -> Tensor:
        output = self._model(
            input_ids=ids_BT,
            cache=cache,
            use_cache=True,
            logits_to_keep=num_logits,
            **cache.inputs(self._model.dtype),
        )
        logits_BNV: Tensor = output.logits
        return logits_BNV

    def _take(
        self, request: Request, states: dict[int, Tensor], row: int, num: int, next_ids_T: Tensor
    ) -> None:
        """Keeps committed rows for the drafter, also while nothing is drafted."""
        aux = [states[boundary][row, :num] for boundary in self._head.aux_layers]
        request.unseen_aux_TLD.append(torch.stack(aux, dim=1))
        request.unseen_ids_T.append(next_ids_T)

    def _retire(self, active: list[Request], cache: RaggedCache) -> None:
        """Ends answers; the last row takes the place of one that leaves."""
        for row in reversed(range(len(active))):
            tokens = active[row].token_ids
            ends = [i for i, token in enumerate(tokens, 1) if token in self._stop_ids]
            ends.append(self._max_new_tokens)
            if len(tokens) < ends[0]:
                continue
            del tokens[min(ends) :]
            last = active.pop()
            if row < len(active):
                active[row] = last
                cache.move_row(len(active), row)
                self._head.move_row(len(active), row)
