"""Drafts with a small language model of its own, which must share the target's tokenizer.

Shape suffixes: T committed row, F node of the level that is being extended, X node extended so far,
S cached token, L captured layer, D hidden size, V target vocabulary, W draft vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from slipstream.data.target.kv_cache import PreallocatedCache
from slipstream.data.target.model import load_model
from slipstream.data.target.resolve import Target


class LanguageModel:
    """A causal language model as a draft model, over its own key-value cache."""

    aux_layers: tuple[int, ...] = ()

    def __init__(self, model: PreTrainedModel, vocab_size: int) -> None:
        """Takes a frozen model; `vocab_size` is the target's."""
        self._model, self.vocab_size = model, vocab_size
        self._num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
        num_known = min(vocab_size, model.config.get_text_config(decoder=True).vocab_size)
        self.target_ids_W = torch.arange(num_known, device=model.device)

    def start(self, prompt_ids: Sequence[int], capacity: int) -> None:
        """See `DraftModel`."""
        self._cache = PreallocatedCache(self._num_layers, capacity)
        self._num_committed = 0
        self._first_1 = torch.tensor(prompt_ids[:1], device=self._model.device)

    def commit(self, next_ids_T: Tensor, aux_LTD: Sequence[Tensor]) -> Tensor:
        """See `DraftModel`."""
        self._cache.crop(self._num_committed)
        ids_T = next_ids_T if self._num_committed else torch.cat([self._first_1, next_ids_T])
        self._num_committed += len(ids_T)
        output = self._model(input_ids=ids_T[None], cache=self._cache, use_cache=True, logits_to_keep=1)
        logits_1W: Tensor = output.logits[0, :, : len(self.target_ids_W)]
        return logits_1W

    def extend(self, ids_F: Tensor, parent_F: Tensor, visible_FX: Tensor, depth: int) -> Tensor:
        """See `DraftModel`."""
        num_new, num_all = visible_FX.shape
        dtype, device = self._model.dtype, ids_F.device
        mask_FS = torch.zeros(num_new, self._num_committed + num_all, dtype=dtype, device=device)
        mask_FS[:, self._num_committed :].masked_fill_(~visible_FX, torch.finfo(dtype).min)
        position_F = torch.full((num_new,), self._num_committed + depth - 1, device=device)
        output = self._model(
            input_ids=ids_F[None],
            attention_mask=mask_FS[None, None],
            position_ids=position_F[None],
            cache=self._cache,
            use_cache=True,
        )
        logits_FW: Tensor = output.logits[0, :, : len(self.target_ids_W)]
        return logits_FW


def load_language_model(target: Target, folder: Path) -> LanguageModel:
    """Reads a draft model from a folder in the HF form.

    Raises:
        ValueError: there is none, or its tokenizer is another one.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"eval.drafter: {folder} holds no model: draft_model@FOLDER names one")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ours, theirs = target.tokenizer().get_vocab(), tokenizer.get_vocab()
    if ours != theirs:
        num_other = len(ours.items() ^ theirs.items())
        raise ValueError(
            f"eval.drafter: the tokenizer in {folder} differs from the target's in {num_other} entries: a "
            f"draft model needs the same one"
        )
    model = load_model(folder, dtype=target.dtype, device=target.device)
    return LanguageModel(model, target.config.vocab_size)
