"""Runs the target over the tokenized documents and caches its hidden states.

Boundary b is the state entering layer b (HF `hidden_states[b]`); for an n-layer target boundary n
is the last layer's output before the final norm, which HF's last entry is not.

The work is planned before it starts: the same documents and settings give the same batches and
shards, so a killed run continues behind its last whole shard and ends with the same bytes.
"""

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.data.cache import STORAGE_DTYPES, CacheWriter
from slipstream.data.config import CaptureConfig
from slipstream.data.files import Stage, check_disk, stage_fingerprint
from slipstream.data.progress import Meter, say
from slipstream.data.target.resolve import Target
from slipstream.data.tokenize import read_samples
from slipstream.data.types import HiddenStateSample, TokenizedSample

HEAD_ROWS = 512
"""Rows whose full-vocabulary logits are in memory together."""

Batch = list[TokenizedSample]


def run(
    config: CaptureConfig, target: Target, aux_layers: tuple[int, ...], tokens_folder: Path, folder: Path
) -> None:
    """The `hidden_states` stage: the target's states at boundaries `aux_layers` for `tokens.parquet`.

    Raises:
        ValueError: no supervised token, too large for the cap or the disk, a state that the
            storage type cannot hold, or a folder made with other settings.
    """
    settings = {
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "target_dtype": str(target.dtype),
        "aux_layers": aux_layers,
        "dtype": config.dtype.value,
        "tokens": stage_fingerprint(tokens_folder),
        "tokens_per_forward": config.tokens_per_forward,
        "tokens_per_shard": config.tokens_per_shard,
    }
    stage = Stage(folder, "hidden_states", settings)
    if stage.is_complete:
        return
    start = time.monotonic()
    samples = read_samples(tokens_folder)
    if not any(sample.loss_mask_T.any() for sample in samples):
        raise ValueError(
            f"{tokens_folder} holds no supervised token: look at its rows with scripts/show_mask.py "
            f"and run the tokens stage again"
        )
    facts = _check_size(config, samples, len(aux_layers), target.config.hidden_size, folder)
    shards = plan_shards(samples, config.tokens_per_forward, config.tokens_per_shard)
    stage.begin()
    writer = CacheWriter(folder)
    missing = [number for number in range(len(shards)) if not writer.has(number)]
    if missing:
        model, dtype = target.model(), STORAGE_DTYPES[config.dtype]
        with Meter("hidden states", facts["tokens"], unit="tokens") as meter:
            meter.skip(facts["tokens"] - sum(_num_tokens(batch) for i in missing for batch in shards[i]))
            for number in missing:
                captured: list[HiddenStateSample] = []
                for batch in shards[number]:
                    captured += capture_batch(model, batch, aux_layers, dtype)
                    meter.advance(_num_tokens(batch))
                writer.write(number, captured, [sample.split for batch in shards[number] for sample in batch])
    names = writer.finish(len(shards))
    stage.complete(names, **facts, seconds=round(time.monotonic() - start, 1))


def _num_tokens(samples: Sequence[TokenizedSample]) -> int:
    return sum(len(sample.input_ids_T) for sample in samples)


def estimate_bytes(
    num_tokens: int, num_supervised: int, num_aux: int, hidden_size: int, bytes_per_element: int
) -> int:
    """Size of a cache on disk, but for headers of some hundred bytes a shard.

    >>> round(estimate_bytes(2_048_000, 2_048_000, 3, 4096, 2) / 1e9, 1)
    67.1
    """
    state = hidden_size * bytes_per_element
    # Beside the states: token id and mask of every token, argmax and log-sum-exp where supervised.
    return num_tokens * (num_aux * state + 4 + 1) + num_supervised * (state + 4 + 4)


def plan_shards(
    samples: Sequence[TokenizedSample], tokens_per_forward: int, tokens_per_shard: int
) -> list[list[Batch]]:
    """Shards of batches: which documents share a forward pass, and which passes share a shard.

    Longest first: little padding, and a batch that does not fit the memory fails at the start.
    `tokens_per_forward` counts padding; a longer document is a batch of its own.
    """
    batches: list[Batch] = []
    for sample in sorted(samples, key=lambda sample: (-len(sample.input_ids_T), sample.id)):
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0].input_ids_T) <= tokens_per_forward:
            batches[-1].append(sample)
        else:
            batches.append([sample])
    shards: list[list[Batch]] = []
    filled = 0
    for batch in batches:
        if not shards or filled + _num_tokens(batch) > tokens_per_shard:
            shards.append([])
            filled = 0
        shards[-1].append(batch)
        filled += _num_tokens(batch)
    return shards


@contextlib.contextmanager
def recorded_states(base: nn.Module, boundaries: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Yields a dict that every forward pass of `base` fills with the states at `boundaries`.

    A boundary is what enters a layer, or the final norm: hooks read it there, because HF's own
    `hidden_states` keeps all layers and ends with the normed state.
    """
    places: list[nn.Module] = [*base.layers, base.norm]  # type: ignore[list-item, misc]
    states: dict[int, Tensor] = {}

    def keep(boundary: int, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        states[boundary] = args[0]

    with contextlib.ExitStack() as hooks:
        for boundary in boundaries:
            hook = functools.partial(keep, boundary)
            hooks.enter_context(places[boundary].register_forward_pre_hook(hook))
        yield states


@torch.no_grad()
def capture_batch(
    model: PreTrainedModel,
    samples: Sequence[TokenizedSample],
    aux_layers: tuple[int, ...],
    dtype: torch.dtype,
) -> list[HiddenStateSample]:
    """One forward pass of the target over documents of any lengths; states of storage type `dtype`.

    Returns:
        One sample for each document, on the CPU, without padding.

    Raises:
        ValueError: a state is not finite in the storage type.
    """
    base = model.get_decoder()
    ids = [sample.input_ids_T for sample in samples]
    masks = [sample.loss_mask_T for sample in samples]
    ids_BT, mask_BT, real_BT = (
        nn.utils.rnn.pad_sequence(rows, batch_first=True).to(model.device)
        for rows in (ids, masks, [torch.ones_like(mask_T) for mask_T in masks])
    )
    layers = (*aux_layers, len(base.layers))
    with recorded_states(base, layers) as states:
        output = base(input_ids=ids_BT, attention_mask=real_BT.long(), use_cache=False)
    head, normed_PD = model.get_output_embeddings(), output.last_hidden_state[mask_BT]
    argmax_P, logsumexp_P = _summarise_logits(head, normed_PD)
    states_TLD = torch.stack([states[layer][real_BT] for layer in layers], dim=1)
    supervised = [int(mask_T.sum()) for mask_T in masks]
    parts = zip(
        samples,
        _stored(states_TLD, dtype, samples, layers).split([len(row) for row in ids]),
        argmax_P.cpu().split(supervised),
        logsumexp_P.cpu().split(supervised),
        strict=True,
    )
    return [
        HiddenStateSample(
            id=sample.id,
            input_ids_T=sample.input_ids_T,
            loss_mask_T=sample.loss_mask_T,
            aux_TLD=states[:, :-1],
            last_hidden_PD=states[sample.loss_mask_T, -1],
            argmax_P=argmax,
            logsumexp_P=logsumexp,
        )
        for sample, states, argmax, logsumexp in parts
    ]


def _summarise_logits(head: nn.Module, normed_PD: Tensor) -> tuple[Tensor, Tensor]:
    """Argmax and log-sum-exp of the full-vocabulary logits, never more than a chunk of them."""
    argmax, logsumexp = [], []
    for chunk_CD in torch.split(normed_PD, HEAD_ROWS):
        logits_CV = head(chunk_CD).float()
        argmax.append(logits_CV.argmax(-1))
        logsumexp.append(logits_CV.logsumexp(-1))
    return torch.cat(argmax), torch.cat(logsumexp)


def _stored(
    states_TLD: Tensor, dtype: torch.dtype, samples: Sequence[TokenizedSample], layers: Sequence[int]
) -> Tensor:
    """States of all samples in the storage type, on the CPU; refuses what does not fit."""
    stored_TLD = states_TLD.to(dtype)
    bad_TLD = ~stored_TLD.isfinite()
    if bad_TLD.any():
        # The lowest boundary: from there a nan spreads through all that follow.
        layer, row, element = bad_TLD.transpose(0, 1).nonzero()[0].tolist()
        names = [sample.id for sample in samples for _ in sample.input_ids_T]
        raise ValueError(
            f"sample {names[row]}: the state at boundary {layers[layer]} holds "
            f"{states_TLD[row, layer, element].item():g}, which {dtype} cannot store: set "
            f"data.capture.dtype to bfloat16 or float32 for a large value; for nan or inf run the target "
            f"itself in another target.dtype"
        )
    return stored_TLD.cpu()


def _check_size(
    config: CaptureConfig, samples: Sequence[TokenizedSample], num_aux: int, hidden_size: int, folder: Path
) -> dict[str, int]:
    """Says the size of the cache before the first forward pass, and refuses one too large."""
    num_tokens, num_supervised = _num_tokens(samples), sum(int(s.loss_mask_T.sum()) for s in samples)
    itemsize = STORAGE_DTYPES[config.dtype].itemsize
    num_bytes = estimate_bytes(num_tokens, num_supervised, num_aux, hidden_size, itemsize)
    say(
        f"hidden states: {len(samples):,} documents, {num_tokens:,} tokens, {num_supervised:,} supervised: "
        f"{num_bytes / 1e9:.2f} GB in {folder}"
    )
    if num_bytes / 1e9 > config.max_gigabytes:
        raise ValueError(
            f"the hidden-state cache would take {num_bytes / 1e9:.2f} GB, more than "
            f"data.capture.max_gigabytes={config.max_gigabytes}: raise it, or take fewer or shorter documents"
        )
    written = sum(file.stat().st_size for file in folder.glob("shard-*.safetensors"))
    check_disk(folder, num_bytes - written, what="the hidden-state cache")
    return {"tokens": num_tokens, "supervised_tokens": num_supervised, "bytes": num_bytes}
