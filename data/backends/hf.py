"""Batched generation with transformers on this machine.

Shape suffixes: B row of the batch (finished rows leave it), T token, S generated token,
V target vocabulary, C candidate token of one step.
"""

import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from slipstream.data.config import SampleConfig
from slipstream.data.dialog import Answer
from slipstream.data.target.kv_cache import PreallocatedCache

FIRST_CANDIDATES = 128
"""Most likely tokens looked at for top-p, eight times as many while they do not hold its mass."""


class HFGenerator:
    """Generates answers for a batch of prompts."""

    def __init__(
        self, model: PreTrainedModel, *, stop_ids: Sequence[int], vocab_size: int, max_new_tokens: int
    ) -> None:
        """Keeps the settings; a padded model vocabulary is cut to `vocab_size` entries."""
        self._model, self._device = model, model.device
        self._stop_ids = torch.tensor(stop_ids, device=self._device)
        self._vocab_size, self._max_new_tokens = vocab_size, max_new_tokens

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[list[int]],
        sampling: SampleConfig,
        seeds: Sequence[int],
        on_step: Callable[[int, int], None] = lambda tokens, finished: None,
    ) -> list[Answer]:
        """Answers every prompt, a list of token ids.

        `seeds` holds one for each row, so that its draws do not depend on its neighbours; `on_step`
        is called after each step with the tokens made and the rows finished by it.
        """
        num_rows, max_new = len(prompts), self._max_new_tokens
        uniform_BS = torch.zeros(num_rows, max_new, device=self._device)
        if sampling.temperature > 0:
            for uniform_S, seed in zip(uniform_BS, seeds, strict=True):
                uniform_S.copy_(torch.rand(max_new, generator=torch.Generator().manual_seed(seed)))
        # Every prompt keeps at least one token of its own.
        num_common = min(len(os.path.commonprefix(prompts)), min(map(len, prompts)) - 1)
        cache = self._cache_of_prefix(prompts[0][:num_common], num_rows)
        input_BT, mask_BT = self._left_padded(prompts, num_common)
        num_prompt = mask_BT.shape[1]
        position_BT = (mask_BT.cumsum(1) - 1)[:, num_common:].clamp(min=0)
        mask_BT = torch.cat([mask_BT, mask_BT.new_ones(num_rows, max_new)], dim=1)
        answer_BS = torch.zeros(num_rows, max_new, dtype=torch.int64, device=self._device)
        length_B = torch.full((num_rows,), max_new, device=self._device)
        row_B = torch.arange(num_rows, device=self._device)  # place of each live row in the batch
        for step in range(max_new):
            output = self._model(
                input_ids=input_BT,
                attention_mask=mask_BT[:, : num_prompt + step],
                position_ids=position_BT,
                cache=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            logits_BV = output.logits[:, -1, : self._vocab_size]
            next_B = choose(logits_BV, sampling, uniform_BS[row_B, step])
            answer_BS[row_B, step] = next_B
            done_B = torch.isin(next_B, self._stop_ids)
            length_B[row_B[done_B]] = step + 1
            position_BT = position_BT[:, -1:] + 1
            num_live = row_B.numel()
            kept_B = _fill_gaps(~done_B)
            on_step(num_live, num_live - kept_B.numel() if step + 1 < max_new else num_live)
            if kept_B.numel() == 0:
                break
            if kept_B.numel() < num_live:
                cache.keep_rows(kept_B)
                row_B, next_B, mask_BT = row_B[kept_B], next_B[kept_B], mask_BT[kept_B]
                position_BT = position_BT[kept_B]
            input_BT = next_B[:, None]
        stop_ids = set(self._stop_ids.tolist())
        return [
            Answer(
                token_ids=tuple(ids[:length]),
                finish_reason="stop" if ids[length - 1] in stop_ids else "length",
            )
            for ids, length in zip(answer_BS.tolist(), length_B.tolist(), strict=True)
        ]

    def _cache_of_prefix(self, prefix: Sequence[int], num_rows: int) -> PreallocatedCache:
        """Runs the prefix that all prompts share (the system prompt) once for all rows."""
        cache = PreallocatedCache(self._model.config.get_text_config().num_hidden_layers)
        if prefix:
            input_1T = torch.tensor([prefix], device=self._device)
            self._model(input_ids=input_1T, cache=cache, use_cache=True, logits_to_keep=1)
            cache.batch_repeat_interleave(num_rows)
        return cache

    def _left_padded(self, prompts: Sequence[list[int]], num_common: int) -> tuple[Tensor, Tensor]:
        """Token ids behind the common prefix, ending in the last column, and the mask of everything."""
        rows = [torch.tensor(prompt[num_common:]) for prompt in prompts]
        input_BT = pad_sequence(rows, batch_first=True, padding_side="left")
        ones = [torch.ones_like(row) for row in rows]
        mask_BT = pad_sequence(ones, batch_first=True, padding_side="left")
        mask_BT = torch.cat([mask_BT.new_ones(len(rows), num_common), mask_BT], dim=1)
        return input_BT.to(self._device), mask_BT.to(self._device)


def choose(logits_BV: Tensor, sampling: SampleConfig, uniform_B: Tensor) -> Tensor:
    """The next token of every row: the most likely one, or drawn by inverting the distribution.

    >>> choose(torch.tensor([[0.0, 9.0]]), SampleConfig(temperature=1.0), torch.tensor([0.5]))
    tensor([1])
    """
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    probs_BC = (logits_BV.float() / sampling.temperature).softmax(-1)
    token_BC = None
    if sampling.top_k or sampling.top_p < 1:
        probs_BC, token_BC = _candidates(probs_BC, sampling)
    # float64, so that no draw below 1 reaches the end of the cumulated mass.
    mass_BC = probs_BC.double().cumsum(-1)
    drawn_B1 = torch.searchsorted(mass_BC, uniform_B.double()[:, None] * mass_BC[:, -1:], right=True)
    return (drawn_B1 if token_BC is None else token_BC.gather(1, drawn_B1))[:, 0]


def _candidates(probs_BV: Tensor, sampling: SampleConfig) -> tuple[Tensor, Tensor]:
    """Probabilities and ids of the tokens that top-k, then top-p leave, most likely first."""
    vocab_size = probs_BV.shape[1]
    num_candidates = min(sampling.top_k or FIRST_CANDIDATES, vocab_size)
    probs_BC, token_BC = probs_BV.topk(num_candidates)
    while not sampling.top_k and num_candidates < vocab_size and (probs_BC.sum(-1) < sampling.top_p).any():
        num_candidates = min(8 * num_candidates, vocab_size)
        probs_BC, token_BC = probs_BV.topk(num_candidates)
    total_B1 = probs_BC.sum(-1, keepdim=True) if sampling.top_k else 1.0
    before_BC = probs_BC.cumsum(-1) - probs_BC
    outside_BC = before_BC >= sampling.top_p * total_B1
    outside_BC[:, 0] = False
    return probs_BC.masked_fill(outside_BC, 0), token_BC


def _fill_gaps(keep_B: Tensor) -> Tensor:
    """Indices of the rows to keep, rows from the end in the places of those that leave.

    >>> _fill_gaps(torch.tensor([True, False, True, True]))
    tensor([0, 3, 2])
    """
    num_kept = int(keep_B.sum())
    order = torch.arange(num_kept, device=keep_B.device)
    order[~keep_B[:num_kept]] = num_kept + keep_B[num_kept:].nonzero()[:, 0]
    return order
