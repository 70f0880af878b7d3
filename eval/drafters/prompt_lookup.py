"""Drafts what followed the last occurrence of the newest tokens: no model at all."""

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.eval.drafting import Draft
from slipstream.eval.verify import Sampling

MAX_NGRAM = 3
"""Longest run of tokens that is looked up; shorter ones follow when it has not occurred before."""


class PromptLookup:
    """Longest suffix of prompt and answer, at most `MAX_NGRAM` tokens, that occurred before."""

    aux_layers: tuple[int, ...] = ()

    def start(
        self, prompt_ids: Sequence[int], capacity: int, sampling: Sampling, generator: torch.Generator | None
    ) -> None:
        """Indexes the prompt's first token; the others come as committed rows."""
        self._ids: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}
        self._append(prompt_ids[0])

    def propose(self, next_ids_T: Tensor, aux_LTD: Sequence[Tensor], num_tokens: int) -> Draft:
        """See `Drafter`."""
        for token in next_ids_T.tolist():
            self._append(token)
        for size in range(min(MAX_NGRAM, len(self._ids)), 0, -1):
            place = self._behind.get(tuple(self._ids[-size:]))
            if place is not None:
                return Draft(ids_K=next_ids_T.new_tensor(self._ids[place : place + num_tokens]))
        return Draft(ids_K=next_ids_T[:0])

    def _append(self, token: int) -> None:
        end = len(self._ids)
        for size in range(1, min(MAX_NGRAM, end) + 1):
            self._behind[tuple(self._ids[end - size :])] = end
        self._ids.append(token)
