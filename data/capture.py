"""Runs the target over the tokenized documents and caches its hidden states.

Boundary b is the state entering layer b (HF `hidden_states[b]`); for an n-layer target boundary n
is the last layer's output before the final norm, which HF's last entry is not.

The work is planned before it starts: the same documents and settings give the same batches and
shards, so a killed run continues behind its last whole shard and ends with the same bytes.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.data.cache import STORAGE_DTYPES, CacheGeometry, CacheWriter, RowInfo
from slipstream.data.config import CaptureConfig
from slipstream.data.files import MANIFEST, Stage, check_disk, stage_fingerprint
from slipstream.data.progress import Meter, say
from slipstream.data.target.resolve import Target
from slipstream.data.tokenize import read_samples
from slipstream.data.types import HiddenStateSample, TokenizedSample

NAME = "hidden_states"
SPLITS = ("train", "validation")
HEAD_ROWS = 512
"""Rows whose full-vocabulary logits are in memory together."""

Batch = list[RowInfo]


def run(
    config: CaptureConfig, target: Target, aux_layers: tuple[int, ...], tokens_folder: Path, folder: Path
) -> None:
    """The hidden_states stage: returns at once when complete, continues when not.

    Args:
        config: storage type, batch and shard size, cap.
        target: the model whose states are kept.
        aux_layers: boundary indices of the captured states.
        tokens_folder: of the complete tokens stage.
        folder: of this stage.

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
    if (folder / MANIFEST).exists() and Stage(folder, NAME, settings).is_complete:
        return
    rows, samples = _read_rows(tokens_folder)
    hidden_size = target.config.hidden_size
    geometry = CacheGeometry(aux_layers=aux_layers, hidden_size=hidden_size, dtype=config.dtype)
    shards = plan_shards(rows, config.tokens_per_forward, config.tokens_per_shard)
    writer = CacheWriter(folder, geometry)
    missing = [number for number in range(len(shards)) if not writer.has(number)]
    _check_size(config, geometry, rows, [row for i in missing for b in shards[i] for row in b], folder)

    # Only now, so that a refused run leaves no folder behind that refuses the corrected one.
    stage = Stage(folder, NAME, settings)
    start = time.monotonic()
    _capture(writer, target, shards, missing, samples)
    stage.complete(
        writer.finish(len(shards)),
        tokens=sum(row.num_tokens for row in rows),
        supervised_tokens=sum(row.num_supervised for row in rows),
        bytes=_bytes(geometry, rows),
        seconds=round(time.monotonic() - start, 1),
    )


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


def plan_shards(rows: Sequence[RowInfo], tokens_per_forward: int, tokens_per_shard: int) -> list[list[Batch]]:
    """Which documents share a forward pass, and which passes share a shard.

    Longest first: little padding, and a batch that does not fit the memory fails at the start.

    Args:
        rows: in any order.
        tokens_per_forward: of a batch, padding included; a longer document is a batch of its own.
        tokens_per_shard: a shard ends before the batch that would exceed it.

    Returns:
        Shards, each a list of batches.
    """
    batches: list[Batch] = []
    for row in sorted(rows, key=lambda row: (-row.num_tokens, row.id)):
        if batches and (len(batches[-1]) + 1) * batches[-1][0].num_tokens <= tokens_per_forward:
            batches[-1].append(row)
        else:
            batches.append([row])
    shards: list[list[Batch]] = []
    filled = 0
    for batch in batches:
        num_tokens = sum(row.num_tokens for row in batch)
        if shards and filled + num_tokens <= tokens_per_shard:
            shards[-1].append(batch)
            filled += num_tokens
        else:
            shards.append([batch])
            filled = num_tokens
    return shards


@contextlib.contextmanager
def recorded_states(base: nn.Module, boundaries: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Yields a dict that every forward pass of `base` fills with the states at `boundaries`.

    A boundary is what enters a layer, or the final norm: hooks read it there, because HF's own
    `hidden_states` keeps all layers and ends with the normed state.
    """
    places: list[nn.Module] = [*base.layers, base.norm]  # type: ignore[list-item, misc]
    states: dict[int, Tensor] = {}

    def keep(boundary: int) -> torch.utils.hooks.RemovableHandle:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            states[boundary] = args[0]

        return places[boundary].register_forward_pre_hook(hook)

    handles = [keep(boundary) for boundary in sorted(set(boundaries))]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def capture_batch(
    model: PreTrainedModel,
    samples: Sequence[TokenizedSample],
    aux_layers: tuple[int, ...],
    dtype: torch.dtype,
) -> list[HiddenStateSample]:
    """One forward pass over several documents.

    Args:
        model: the target with its head, in evaluation mode.
        samples: documents of any lengths; shorter ones are padded on the right.
        aux_layers: boundary indices.
        dtype: storage type.

    Returns:
        One sample for each document, on the CPU, without padding.

    Raises:
        ValueError: a state is not finite in the storage type.
    """
    base = model.get_decoder()
    head = model.get_output_embeddings()
    device = model.device
    ids = [s.input_ids_T for s in samples]
    ids_BT = nn.utils.rnn.pad_sequence(ids, batch_first=True).to(device)
    real_BT = nn.utils.rnn.pad_sequence([torch.ones_like(i).bool() for i in ids], batch_first=True).to(device)
    mask_BT = nn.utils.rnn.pad_sequence([s.loss_mask_T for s in samples], batch_first=True).to(device)
    num_layers = len(base.layers)
    with recorded_states(base, [*aux_layers, num_layers]) as states:
        output = base(input_ids=ids_BT, attention_mask=real_BT.long(), use_cache=False)
    aux_TLD = torch.stack([states[layer][real_BT] for layer in aux_layers], dim=1)
    last_PD = states[num_layers][mask_BT]
    argmax_P, logsumexp_P = _summarise_logits(head, output.last_hidden_state[mask_BT])

    tokens = [row.numel() for row in ids]
    supervised = [int(s.loss_mask_T.sum()) for s in samples]
    names = [s.id for s in samples]
    aux = _stored(aux_TLD, dtype, names, tokens, aux_layers)
    last = _stored(last_PD.unsqueeze(1), dtype, names, supervised, (num_layers,))
    argmax, logsumexp = torch.split(argmax_P.cpu(), supervised), torch.split(logsumexp_P.cpu(), supervised)
    return [
        HiddenStateSample(
            id=sample.id,
            input_ids_T=sample.input_ids_T,
            loss_mask_T=sample.loss_mask_T,
            aux_TLD=aux[i],
            last_hidden_PD=last[i].squeeze(1),
            argmax_P=argmax[i],
            logsumexp_P=logsumexp[i],
        )
        for i, sample in enumerate(samples)
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
    states_NLD: Tensor, dtype: torch.dtype, names: Sequence[str], sizes: Sequence[int], layers: Sequence[int]
) -> tuple[Tensor, ...]:
    """Converts to the storage type and splits into documents; refuses what does not fit."""
    stored_NLD = states_NLD.to(dtype)
    bad_NLD = ~stored_NLD.isfinite()
    if bad_NLD.any():
        # The lowest boundary: from there a nan spreads through all that follow.
        layer, row, element = bad_NLD.transpose(0, 1).nonzero()[0].tolist()
        value = states_NLD[row, layer, element].item()
        document = int((torch.tensor(sizes).cumsum(0) <= row).sum())
        raise ValueError(
            f"sample {names[document]}: the state at boundary {layers[layer]} holds {value:g}, "
            f"which {dtype} cannot store: set data.capture.dtype to bfloat16 or float32 for a large value; "
            f"for nan or inf run the target itself in another target.dtype"
        )
    return torch.split(stored_NLD.cpu(), list(sizes))


def _read_rows(tokens_folder: Path) -> tuple[list[RowInfo], dict[str, TokenizedSample]]:
    rows, samples = [], {}
    for split in SPLITS:
        for sample in read_samples(tokens_folder, split):
            num_tokens, num_supervised = sample.input_ids_T.numel(), int(sample.loss_mask_T.sum())
            rows.append(
                RowInfo(id=sample.id, split=split, num_tokens=num_tokens, num_supervised=num_supervised)
            )
            samples[sample.id] = sample
    if not any(row.num_supervised for row in rows):
        raise ValueError(
            f"{tokens_folder} holds no supervised token: look at its rows with scripts/show_mask.py "
            f"and run the tokens stage again"
        )
    return rows, samples


def _bytes(geometry: CacheGeometry, rows: Sequence[RowInfo]) -> int:
    num_tokens, num_supervised = sum(r.num_tokens for r in rows), sum(r.num_supervised for r in rows)
    bytes_per_element = STORAGE_DTYPES[geometry.dtype].itemsize
    return estimate_bytes(
        num_tokens, num_supervised, geometry.num_aux, geometry.hidden_size, bytes_per_element
    )


def _check_size(
    config: CaptureConfig, geometry: CacheGeometry, rows: list[RowInfo], missing: list[RowInfo], folder: Path
) -> None:
    """Says the size of the cache before the first forward pass, and refuses one too large."""
    gigabytes = _bytes(geometry, rows) / 1e9
    say(
        f"hidden states: {len(rows):,} documents, {sum(r.num_tokens for r in rows):,} tokens, "
        f"{sum(r.num_supervised for r in rows):,} supervised: {gigabytes:.2f} GB in {folder}"
    )
    if gigabytes > config.max_gigabytes:
        raise ValueError(
            f"the hidden-state cache would take {gigabytes:.2f} GB, more than "
            f"data.capture.max_gigabytes={config.max_gigabytes}: raise it, or take fewer or shorter documents"
        )
    check_disk(folder, _bytes(geometry, missing), what="the hidden-state cache")


def _capture(
    writer: CacheWriter,
    target: Target,
    shards: list[list[Batch]],
    missing: list[int],
    samples: dict[str, TokenizedSample],
) -> None:
    """Makes the missing shards, one after another."""
    if not missing:
        return
    geometry = writer.geometry
    dtype = STORAGE_DTYPES[geometry.dtype]
    rows_of = [[row for batch in shard for row in batch] for shard in shards]
    all_rows = [row for rows in rows_of for row in rows]
    final = _bytes(geometry, all_rows) / 1e9
    done = [row for number, rows in enumerate(rows_of) if number not in set(missing) for row in rows]
    written = _bytes(geometry, done) / 1e9
    model = target.model()
    with Meter("hidden states", sum(row.num_tokens for row in all_rows), unit="tokens") as meter:
        meter.skip(sum(row.num_tokens for row in done))
        for number in missing:
            captured: list[HiddenStateSample] = []
            for batch in shards[number]:
                captured += capture_batch(
                    model, [samples[row.id] for row in batch], geometry.aux_layers, dtype
                )
                meter.advance(
                    sum(row.num_tokens for row in batch), f"{written:.2f} of {final:.2f} GB written"
                )
            writer.write(number, rows_of[number], captured)
            written += _bytes(geometry, rows_of[number]) / 1e9
