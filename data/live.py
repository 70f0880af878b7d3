"""A source without a cache: the target runs when a document is asked for.

The forward passes are those that a capture with the same settings would make, so the states, and
with them the training, are the same to the bit.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from slipstream.data.cache import STORAGE_DTYPES, RowInfo, shard_name
from slipstream.data.capture import Batch, plan_shards
from slipstream.data.config import CaptureConfig
from slipstream.data.progress import say
from slipstream.data.sizes import GIB, count, estimate_bytes
from slipstream.data.states import capture_batch
from slipstream.data.types import HiddenStateSample, TokenizedSample


class LiveSource:
    """Documents with the states of a target that runs in this process; see `HiddenStateSource`."""

    def __init__(
        self,
        load_model: Callable[[], PreTrainedModel],
        samples: Sequence[TokenizedSample],
        aux_layers: tuple[int, ...],
        config: CaptureConfig,
        *,
        max_bytes: float,
    ) -> None:
        """Loads nothing yet.

        Args:
            load_model: gives the target, at the first document.
            samples: of the `tokens` stage.
            aux_layers: boundaries.
            config: of the capture that is not made.
            max_bytes: of states that are kept for their next use; the oldest go.
        """
        self._load_model, self._aux_layers, self._config = load_model, aux_layers, config
        self._model: PreTrainedModel | None = None
        self._samples, self._max_bytes = samples, max_bytes
        self._batches: dict[str, Batch] = {}
        self._shards: dict[str, str] = {}
        for number, shard in enumerate(
            plan_shards(samples, config.tokens_per_forward, config.tokens_per_shard)
        ):
            for batch in shard:
                self._batches |= {sample.id: batch for sample in batch}
                self._shards |= {sample.id: shard_name(number) for sample in batch}
        self._kept: OrderedDict[str, HiddenStateSample] = OrderedDict()
        self._num_bytes = 0
        # The feeder's thread and validation ask at the same time.
        self._lock = threading.Lock()

    def warn(self, hidden_size: int, vocab_size: int, shuffle_shards: int) -> None:
        """Says what running again costs, where the states of all documents do not fit the memory."""
        config, num_aux = self._config, len(self._aux_layers)
        sizes = {"num_aux": num_aux, "hidden_size": hidden_size, "vocab_size": vocab_size}
        needed = estimate_bytes(config, count(self._samples), **sizes)
        passes = {id(batch): batch for batch in self._batches.values()}
        together = len(self._batches) / max(len(passes), 1)
        if needed > self._max_bytes and not shuffle_shards and together > 1:
            say(
                f"warning: data.live_gib={self._max_bytes / GIB:g} does not hold {needed / GIB:.1f} GiB of "
                f"states, so up to {together:.0f} documents run for each one that is used: set "
                f"data.shuffle_shards, or data.capture.tokens_per_forward=1"
            )

    def rows(self, split: str) -> list[RowInfo]:
        """The documents of a split, ordered by id."""
        return [
            RowInfo(
                id=sample.id,
                split=split,
                num_tokens=len(sample.input_ids_T),
                num_supervised=int(sample.loss_mask_T.sum()),
                shard=self._shards[sample.id],
            )
            for sample in self._samples
            if sample.split == split
        ]

    def load(self, id: str) -> HiddenStateSample:
        """One document; the others of its forward pass are kept."""
        with self._lock:
            if id not in self._kept:
                self._run(self._batches[id])
            self._kept.move_to_end(id)
            found = self._kept[id]
            while self._num_bytes > self._max_bytes and len(self._kept) > 1:
                self._num_bytes -= _num_bytes(self._kept.popitem(last=False)[1])
            return found

    def _run(self, batch: Batch) -> None:
        if self._model is None:
            self._model = self._load_model()
        dtype: torch.dtype = STORAGE_DTYPES[self._config.dtype]
        for sample in capture_batch(self._model, batch, self._aux_layers, dtype):
            if sample.id not in self._kept:
                # A copy, because a view would keep the whole pass in memory.
                self._kept[sample.id] = replace(sample, aux_TLD=sample.aux_TLD.clone())
                self._num_bytes += _num_bytes(sample)


def _num_bytes(sample: HiddenStateSample) -> int:
    """Of the states, beside which the rest is small."""
    return sample.aux_TLD.nbytes + sample.last_hidden_PD.nbytes
