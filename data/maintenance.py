"""Care of a finished cache: find and discard damaged shards, say what it holds, make it smaller."""

import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slipstream.data.cache import (
    INDEX,
    CacheWriter,
    HiddenStateCache,
    record_path,
    shard_name,
)
from slipstream.data.config import Store, TeacherStore
from slipstream.data.files import Stage, check_disk, file_hash, read_json, read_manifest, reading
from slipstream.data.progress import Meter

STAGE = "hidden_states"


def read_index(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Shards by name, and rows, of a finished cache."""
    index = read_json(folder / INDEX)
    with reading(folder / INDEX):
        return dict(index["shards"]), list(index["rows"])


def damaged_shards(folder: Path) -> dict[str, list[str]]:
    """Ids of the documents in each shard that is not, byte for byte, what was written."""
    shards, rows = read_index(folder)
    damaged: dict[str, list[str]] = {}
    with Meter("verify", sum(shard["bytes"] for shard in shards.values()) / 1e9, unit="GB") as meter:
        for name, shard in shards.items():
            path = folder / name
            if not path.is_file() or file_hash(path) != shard["sha256"]:
                damaged[name] = [row["id"] for row in rows if row["shard"] == name]
            meter.advance(shard["bytes"] / 1e9)
    return damaged


def discard(folder: Path, names: Iterable[str]) -> None:
    """Removes shards, so that the hidden_states stage makes them, and only them, again."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
        record_path(folder / name).unlink(missing_ok=True)


def statistics(folder: Path) -> Mapping[str, str]:
    """What a cache holds, as shown to the user."""
    shards, rows = read_index(folder)
    settings = read_manifest(folder)["settings"]
    num_bytes = sum(shard["bytes"] for shard in shards.values())
    num_tokens = sum(row["num_tokens"] for row in rows)
    splits = Counter(row["split"] for row in rows)
    return {
        "target": str(settings["target"]),
        "boundaries": str(settings["aux_layers"]),
        "states": str(settings.get("store", settings["dtype"])),
        "teacher": f"top {settings['topk']} tokens" if "topk" in settings else "last state",
        "documents": ", ".join(f"{num:,} {split}" for split, num in sorted(splits.items())),
        "tokens": f"{num_tokens:,}, {sum(row['num_supervised'] for row in rows):,} supervised",
        "disk": f"{num_bytes / 1e9:.3f} GB in {len(shards):,} shards",
        "bytes per token": f"{num_bytes / max(num_tokens, 1):,.1f}",
    }


def trim(folder: Path, settings: Mapping[str, Any], store: Store) -> None:
    """Stores a cache of whole states in a one-byte form; the target is not needed.

    The bytes are those that a capture with `settings` would have written. The whole states go when
    the small ones are complete.

    Args:
        folder: of the finished cache.
        settings: of the stage as it will be.
        store: fp8 or int8.

    Raises:
        ValueError: the cache differs from `settings` in more than the store, or the disk is full.
    """
    if store is Store.bf16:
        raise ValueError("trim makes states smaller: set data.capture.store=int8 or fp8")
    whole = {key: value for key, value in settings.items() if key != "store"}
    Stage(folder, STAGE, whole)
    shards, rows = read_index(folder)
    num_bytes = sum(shard["bytes"] for shard in shards.values())
    cache, places = HiddenStateCache(folder), [(row["shard"], row["first_token"], row["id"]) for row in rows]
    splits = {row["id"]: row["split"] for row in rows}
    small = Stage(folder.with_name(f"{folder.name}.trim"), STAGE, settings)
    check_disk(folder, num_bytes / 2, what="the smaller cache, which is made beside the other,")
    small.begin()
    teacher = TeacherStore.topk if "topk" in settings else TeacherStore.last_hidden
    writer = CacheWriter(small.folder, store=store, teacher=teacher)
    with Meter("trim", len(shards), unit="shards") as meter:
        for number in range(len(shards)):
            if not writer.has(number):
                ids = [id for name, _, id in sorted(places) if name == shard_name(number)]
                writer.write(number, [cache.load(id) for id in ids], [splits[id] for id in ids])
            meter.advance(1)
    facts = read_manifest(folder)["facts"]
    small.complete(writer.finish(len(shards)), **facts | {"bytes": writer.num_bytes()})
    old = folder.with_name(f"{folder.name}.old")
    folder.rename(old)
    small.folder.rename(folder)
    shutil.rmtree(old)
