"""What a cache will take, of disk and of time, said before anything runs.

Shape suffixes as in `slipstream.data.types`.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from slipstream.data.cache import STORAGE_DTYPES
from slipstream.data.config import CaptureConfig, Store, TeacherStore
from slipstream.data.files import check_disk
from slipstream.data.small import id_type
from slipstream.data.types import TokenizedSample, num_rows

GIB = 1 << 30
PRODUCT = 512
"""Size of the square product that tells how fast this machine is."""
PRODUCT_SECONDS = 0.1
USED_SHARE = 0.5
"""Of that speed, what a whole forward pass reaches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """How much there is to capture."""

    documents: int
    tokens: int
    supervised: int
    rows: int
    """Rows that alignment keeps."""


def count(samples: Sequence[TokenizedSample]) -> Counts:
    """Of documents."""
    return Counts(
        documents=len(samples),
        tokens=sum(len(sample.input_ids_T) for sample in samples),
        supervised=sum(int(sample.loss_mask_T.sum()) for sample in samples),
        rows=sum(num_rows(sample.loss_mask_T) for sample in samples),
    )


def estimate_bytes(
    config: CaptureConfig, counts: Counts, *, num_aux: int, hidden_size: int, vocab_size: int
) -> int:
    """Size of a cache on disk, but for headers of some hundred bytes a shard.

    >>> counts = Counts(documents=1000, tokens=2_048_000, supervised=2_048_000, rows=2_046_000)
    >>> sizes = dict(num_aux=3, hidden_size=4096, vocab_size=128256)
    >>> round(estimate_bytes(CaptureConfig(), counts, **sizes) / 1e9, 1)
    67.1
    >>> small = CaptureConfig(store=Store.int8, teacher=TeacherStore.topk)
    >>> round(estimate_bytes(small, counts, **sizes) / 1e9, 1)
    25.8
    """
    itemsize = STORAGE_DTYPES[config.dtype].itemsize
    aux = counts.tokens * num_aux * hidden_size * itemsize
    if config.store is not Store.bf16:
        aux = counts.rows * num_aux * (hidden_size + torch.bfloat16.itemsize)
    teacher = hidden_size * itemsize + 4 + 4  # with argmax and log-sum-exp
    if config.teacher is TeacherStore.topk:
        teacher = min(config.topk, vocab_size) * (id_type(vocab_size).itemsize + 1) + 4
    return aux + counts.tokens * (4 + 1) + counts.supervised * teacher  # with token id and mask


def estimate_seconds(
    config: PreTrainedConfig, num_tokens: int, device: torch.device, dtype: torch.dtype
) -> float:
    """Time of the target's forward passes, from a product measured now; within a factor of two or so."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    # Embedding rows are looked up and the head is read at supervised rows alone.
    weights: int = sum(p.numel() for p in model.get_decoder().layers.parameters())
    return 2 * weights * num_tokens / (USED_SHARE * _flops(device, dtype))


def _flops(device: torch.device, dtype: torch.dtype) -> float:
    square = torch.ones(PRODUCT, PRODUCT, device=device, dtype=dtype)
    products, start = 0, time.monotonic()
    while products < 2 or time.monotonic() - start < PRODUCT_SECONDS:
        # Read back, because a device only queues what it is told.
        float((square @ square)[0, 0])
        products += 1
    return products * 2 * PRODUCT**3 / (time.monotonic() - start)


def check_size(config: CaptureConfig, num_bytes: int, folder: Path) -> None:
    """Raises ValueError for a cache above the cap, or too large for the disk it is written to."""
    if num_bytes / GIB > config.max_gib:
        raise ValueError(
            f"the hidden-state cache would take {num_bytes / GIB:.2f} GiB, more than "
            f"data.capture.max_gib={config.max_gib}: raise it, set data.capture.store=int8 and "
            f"data.capture.teacher=topk, take fewer or shorter documents, or set data.source=live"
        )
    written = sum(file.stat().st_size for file in folder.glob("shard-*.safetensors"))
    check_disk(folder, num_bytes - written, what="the hidden-state cache")
