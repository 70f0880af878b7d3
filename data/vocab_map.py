"""The `vocab_map` stage: which target tokens the draft vocabulary holds."""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from slipstream.data.files import Stage, atomic_path, reading, stage_fingerprint
from slipstream.data.progress import say
from slipstream.data.target.resolve import Target
from slipstream.data.template import stop_token_ids
from slipstream.data.tokenize import read_tables
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
    real = {i for i in real_ids if i < vocab_size}
    forced = set(forced_ids) & real
    target_ids_W = torch.arange(vocab_size)
    if draft_vocab_size != vocab_size:
        if not max(len(forced), 1) <= draft_vocab_size <= len(real):
            raise ValueError(
                f"drafter.draft_vocab_size={draft_vocab_size} must lie between {max(len(forced), 1)} and "
                f"{len(real)} (the target's tokenizer entries), or be its whole vocabulary, {vocab_size}"
            )
        ranked = sorted(real, key=lambda i: (i not in forced, -int(counts_V[i]), i))
        target_ids_W = torch.tensor(sorted(ranked[:draft_vocab_size]))
    t2d_V = torch.zeros(vocab_size, dtype=torch.bool)
    t2d_V[target_ids_W] = True
    return VocabMap(d2t_W=target_ids_W - torch.arange(draft_vocab_size), t2d_V=t2d_V)


def supervised_counts(tokens_folder: Path, vocab_size: int) -> NDArray[np.int64]:
    """How often each target id is supervised in the training split, `[V]`."""
    counts_V = np.zeros(vocab_size, dtype=np.int64)
    for rows in read_tables(tokens_folder):
        train = rows.filter(pc.equal(rows["split"], "train"))
        ids_T, mask_T = (pc.list_flatten(train[name]).to_numpy() for name in ("input_ids", "loss_mask"))
        counts_V += np.bincount(ids_T[mask_T.astype(bool)], minlength=vocab_size)
    return counts_V


def run(
    draft_vocab_size: int,
    target: Target,
    tokens_folder: Path,
    folder: Path,
    *,
    given: tuple[str, Callable[[], VocabMap]] | None = None,
) -> None:
    """The `vocab_map` stage: `tokens.parquet` to `vocab_map.safetensors`.

    `given` is where a map comes from that belongs to weights, and what reads it: tokens are then counted
    for its coverage alone.
    """
    settings = {
        "target": target.fingerprint,
        "tokens": stage_fingerprint(tokens_folder),
        "draft_vocab_size": draft_vocab_size,
        **({"init_from": given[0]} if given else {}),
    }
    stage = Stage(folder, "vocab_map", settings)
    if stage.is_complete:
        return
    counts_V = supervised_counts(tokens_folder, target.config.vocab_size)
    if given:
        vocab_map = given[1]()
    else:
        entries = target.tokenizer().get_vocab().values()
        vocab_map = build_vocab_map(counts_V, draft_vocab_size, stop_token_ids(target), entries)
    coverage = float(counts_V[vocab_map.t2d_V.numpy()].sum() / max(counts_V.sum(), 1))
    stage.begin()
    with atomic_path(folder / MAP_FILE) as temporary:
        save_file({"d2t": vocab_map.d2t_W, "t2d": vocab_map.t2d_V}, temporary)
    stage.complete([MAP_FILE], draft_vocab_size=draft_vocab_size, coverage=round(coverage, 6))
    say(f"vocab map    {draft_vocab_size:,} of {len(counts_V):,} tokens cover {coverage:.4f} of the answers")
    if coverage < LOW_COVERAGE:
        say(
            f"warning: the draft vocabulary covers {coverage:.3f} of the supervised tokens, each of the "
            f"others is a sure miss: "
            + (f"it is that of {given[0]}" if given else f"raise drafter.draft_vocab_size={draft_vocab_size}")
        )


def read_vocab_map(folder: Path) -> VocabMap:
    """Reads the map of the stage in `folder`.

    Raises:
        ValueError: it is missing or is not a map in offset form.
    """
    path = folder / MAP_FILE
    with reading(path):
        tensors = load_file(path)
    if {name: t.dtype for name, t in tensors.items()} != {"d2t": torch.int64, "t2d": torch.bool}:
        raise ValueError(f"{path} must hold d2t (int64) and t2d (bool): delete {folder} to make it again")
    vocab_map = VocabMap(d2t_W=tensors["d2t"], t2d_V=tensors["t2d"])
    if not torch.equal(vocab_map.target_ids_W, vocab_map.t2d_V.nonzero().flatten()):
        raise ValueError(
            f"{path}: i + d2t[i] must be the ids marked in t2d, ascending (d2t holds offsets, not ids): "
            f"delete {folder} to make it again"
        )
    return vocab_map
