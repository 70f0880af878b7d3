"""The `vocab_map` stage: which target tokens the draft vocabulary holds."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.data.files import MANIFEST, Stage, atomic_path, stage_fingerprint
from slipstream.data.progress import say
from slipstream.data.target.resolve import Target
from slipstream.data.template import stop_token_ids
from slipstream.data.tokenize import read_groups
from slipstream.data.types import VocabMap

MAP_FILE = "vocab_map.safetensors"
LOW_COVERAGE = 0.95


def build_vocab_map(
    counts_V: NDArray[np.int64], draft_vocab_size: int, forced_ids: Iterable[int], real_ids: Iterable[int]
) -> VocabMap:
    """The most frequent target tokens; ties, and tokens never seen, by lowest id.

    Args:
        counts_V: supervised tokens of each target id.
        draft_vocab_size: W.
        forced_ids: always in (tokens that end an answer).
        real_ids: ids of tokenizer entries; a padded vocabulary has more rows than entries.

    Raises:
        ValueError: the target has not that many tokens.

    >>> counts_V = np.array([0, 2, 0, 5, 0, 0, 0, 5, 0, 1, 0, 0])
    >>> build_vocab_map(counts_V, 6, [], range(12)).d2t_W.tolist()
    [0, 0, 0, 0, 3, 4]
    """
    vocab_size = len(counts_V)
    if draft_vocab_size == vocab_size:
        return _map_of(torch.arange(vocab_size), vocab_size)
    real = {i for i in real_ids if i < vocab_size}
    forced = set(forced_ids) & real
    if not max(len(forced), 1) <= draft_vocab_size <= len(real):
        raise ValueError(
            f"drafter.draft_vocab_size={draft_vocab_size} must lie between {max(len(forced), 1)} and "
            f"{len(real)} (the target's tokenizer entries), or be its whole vocabulary, {vocab_size}"
        )
    ranked = sorted(real, key=lambda i: (i not in forced, -int(counts_V[i]), i))
    return _map_of(torch.tensor(sorted(ranked[:draft_vocab_size])), vocab_size)


def _map_of(target_ids_W: Tensor, vocab_size: int) -> VocabMap:
    t2d_V = torch.zeros(vocab_size, dtype=torch.bool)
    t2d_V[target_ids_W] = True
    return VocabMap(d2t_W=target_ids_W - torch.arange(len(target_ids_W)), t2d_V=t2d_V)


def supervised_counts(tokens_folder: Path, vocab_size: int) -> NDArray[np.int64]:
    """How often each target id is supervised in the training split, `[V]`."""
    counts_V = np.zeros(vocab_size, dtype=np.int64)
    for group in read_groups(tokens_folder, "train"):
        counts_V += np.bincount(group.input_ids_T[group.loss_mask_T], minlength=vocab_size)
    return counts_V


def run(draft_vocab_size: int, target: Target, tokens_folder: Path, folder: Path) -> None:
    """The `vocab_map` stage: `tokens.parquet` to `vocab_map.safetensors`."""
    settings = {
        "target": target.fingerprint,
        "tokens": stage_fingerprint(tokens_folder),
        "draft_vocab_size": draft_vocab_size,
    }
    if (folder / MANIFEST).exists() and Stage(folder, "vocab_map", settings).is_complete:
        return
    counts_V = supervised_counts(tokens_folder, target.config.vocab_size)
    entries = target.tokenizer().get_vocab().values()
    vocab_map = build_vocab_map(counts_V, draft_vocab_size, stop_token_ids(target), entries)
    coverage = float(counts_V[vocab_map.t2d_V.numpy()].sum() / max(counts_V.sum(), 1))
    stage = Stage(folder, "vocab_map", settings)
    # One metadata key only: safetensors writes several in random order.
    metadata = {"slipstream": json.dumps({**settings, "coverage": round(coverage, 6)}, sort_keys=True)}
    with atomic_path(folder / MAP_FILE) as temporary:
        save_file({"d2t": vocab_map.d2t_W, "t2d": vocab_map.t2d_V}, temporary, metadata=metadata)
    facts: dict[str, Any] = {"draft_vocab_size": draft_vocab_size, "coverage": round(coverage, 6)}
    stage.complete([MAP_FILE], **facts)
    say(f"vocab map    {draft_vocab_size:,} of {len(counts_V):,} tokens cover {coverage:.4f} of the answers")
    if coverage < LOW_COVERAGE:
        say(
            f"warning: the draft vocabulary covers {coverage:.3f} of the supervised tokens, each of the "
            f"others is a sure miss: raise drafter.draft_vocab_size={draft_vocab_size}"
        )


def read_vocab_map(folder: Path) -> VocabMap:
    """Reads the map of the stage in `folder`.

    Raises:
        ValueError: it is missing or is not a map in offset form.
    """
    path = folder / MAP_FILE
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: run the vocab_map stage first") from None
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read ({error}): delete {folder} to make it again") from None
    if (
        tensors.keys() != {"d2t", "t2d"}
        or tensors["d2t"].dtype != torch.int64
        or tensors["t2d"].dtype != torch.bool
    ):
        raise ValueError(f"{path} must hold d2t (int64) and t2d (bool): delete {folder} to make it again")
    vocab_map = VocabMap(d2t_W=tensors["d2t"], t2d_V=tensors["t2d"])
    if not torch.equal(vocab_map.target_ids_W, vocab_map.t2d_V.nonzero().flatten()):
        raise ValueError(
            f"{path}: i + d2t[i] must be the ids marked in t2d, ascending (d2t holds offsets, not ids): "
            f"delete {folder} to make it again"
        )
    return vocab_map
