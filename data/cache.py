"""The hidden-state cache: safetensors shards and one `index.json`.

A shard holds the rows (documents) of some forward passes one after another, without padding:

| tensor      | shape       | type    | tokens     |
|-------------|-------------|---------|------------|
| input_ids   | [T]         | int32   | all        |
| loss_mask   | [T]         | bool    | all        |
| aux         | [T, L, D]   | storage | all        |
| last_hidden | [P, D]      | storage | supervised |
| argmax      | [P]         | int32   | supervised |
| logsumexp   | [P]         | float32 | supervised |

A small cache (`data.capture.store`, `data.capture.teacher`) holds in the place of `aux`, for the rows
that alignment keeps, or of the last three:

| tensor      | shape       | type        | tokens     |
|-------------|-------------|-------------|------------|
| aux_codes   | [R, L, D]   | int8 or fp8 | kept rows  |
| aux_scale   | [R, L]      | bfloat16    | kept rows  |
| top_ids     | [P, E]      | uint16, int32 | supervised |
| top_codes   | [P, E]      | uint8       | supervised |
| tail        | [P]         | float32     | supervised |

The stage's manifest tells the target, the captured layers and the storage type.
`shard-00000.json` beside a shard says that it is whole and which rows it holds; `index.json` is
put together from these, so an interrupted capture continues behind the last whole shard.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from slipstream.data.config import Dtype, Store, TeacherStore
from slipstream.data.files import atomic_path, file_hash, read_json, reading, write_json
from slipstream.data.small import (
    dequantise,
    id_type,
    pack_log_probs,
    quantise,
    top_teacher,
    unpack_log_probs,
)
from slipstream.data.types import HiddenStateSample, num_rows

FORMAT = "slipstream-hidden-states-1"
SMALL_FORMAT = "slipstream-hidden-states-2"
"""Of a cache whose shards hold fewer rows of states than tokens, or top tokens."""
INDEX = "index.json"
STORAGE_DTYPES = {
    Dtype.float32: torch.float32,
    Dtype.bfloat16: torch.bfloat16,
    Dtype.float16: torch.float16,
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowInfo:
    """What is known of a document without reading its states."""

    id: str
    split: str
    num_tokens: int
    num_supervised: int
    shard: str = dataclasses.field(default="", compare=False)
    """What is read together."""


class HiddenStateSource(Protocol):
    """Gives documents with the target's states: a cache on disk, or a live target."""

    def rows(self, split: str) -> list[RowInfo]:
        """The documents of a split, always in the same order."""

    def load(self, id: str) -> HiddenStateSample:
        """One document."""


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"shard-{number:05d}.safetensors"


def record_path(shard: Path) -> Path:
    """The file that says that a shard is whole."""
    return shard.with_suffix(".json")


class CacheWriter:
    """Writes the shards of one cache, then its index."""

    def __init__(
        self,
        folder: Path,
        *,
        store: Store = Store.bf16,
        teacher: TeacherStore = TeacherStore.last_hidden,
    ) -> None:
        """Opens the folder; the stage has begun."""
        self.folder, self._store, self._teacher = folder, store, teacher

    def has(self, number: int) -> bool:
        """Whether an earlier run wrote this shard, and it is still as it was written."""
        path = self.folder / shard_name(number)
        record = record_path(path)
        if not (path.exists() and record.exists()):
            return False
        with reading(record, way_out="delete it, its shard is made anew"):
            recorded: str = json.loads(record.read_bytes())["sha256"]
        return file_hash(path) == recorded

    def is_recorded(self, number: int) -> bool:
        """Whether a shard was written, sound or not."""
        return record_path(self.folder / shard_name(number)).exists()

    def num_bytes(self) -> int:
        """Size of the shards so far, by whomever."""
        return sum(file.stat().st_size for file in self.folder.glob("shard-*.safetensors"))

    def write(self, number: int, samples: Sequence[HiddenStateSample], splits: Sequence[str]) -> None:
        """Writes one shard and, once it is whole, the record that names its rows."""
        path = self.folder / shard_name(number)
        tensors = {
            "input_ids": torch.cat([s.input_ids_T.int() for s in samples]),
            "loss_mask": torch.cat([s.loss_mask_T for s in samples]),
            **_aux_tensors(samples, self._store),
            **_teacher_tensors(samples, self._teacher),
        }
        with atomic_path(path) as temporary:
            # No metadata: safetensors writes it in random order, and equal runs give equal bytes.
            save_file(tensors, temporary)
        entries: list[dict[str, Any]] = []
        token = supervised = row = 0
        for sample, split in zip(samples, splits, strict=True):
            sizes = {"num_tokens": len(sample.input_ids_T), "num_supervised": len(sample.argmax_P)}
            place: dict[str, Any] = {"shard": path.name, "first_token": token, "first_supervised": supervised}
            if self._store is not Store.bf16:
                place |= {"first_row": row, "num_rows": num_rows(sample.loss_mask_T)}
                row += place["num_rows"]
            entries.append({"id": sample.id, "split": split, **sizes, **place})
            token, supervised = token + sizes["num_tokens"], supervised + sizes["num_supervised"]
        record = {"sha256": file_hash(path), "bytes": path.stat().st_size, "rows": entries}
        write_json(record_path(path), record)

    def finish(self, num_shards: int) -> list[str]:
        """Writes the index of shards 0 .. num_shards - 1; returns the names of all outputs."""
        names = [shard_name(number) for number in range(num_shards)]
        shards = {name: read_json(record_path(self.folder / name)) for name in names}
        rows = [row for shard in shards.values() for row in shard.pop("rows")]
        layout: dict[str, Any] = {"format": FORMAT}
        if self._store is not Store.bf16 or self._teacher is not TeacherStore.last_hidden:
            layout = {"format": SMALL_FORMAT, "store": self._store.value, "teacher": self._teacher.value}
        index = {**layout, "shards": shards, "rows": sorted(rows, key=lambda row: row["id"])}
        write_json(self.folder / INDEX, index)
        return [*names, INDEX]


def _aux_tensors(samples: Sequence[HiddenStateSample], store: Store) -> dict[str, torch.Tensor]:
    if store is Store.bf16:
        return {"aux": torch.cat([s.aux_TLD for s in samples])}
    kept = [s.aux_TLD[: num_rows(s.loss_mask_T)] for s in samples]
    return dict(zip(("aux_codes", "aux_scale"), quantise(torch.cat(kept), store), strict=True))


def _teacher_tensors(samples: Sequence[HiddenStateSample], teacher: TeacherStore) -> dict[str, torch.Tensor]:
    if teacher is TeacherStore.last_hidden:
        return {
            "last_hidden": torch.cat([s.last_hidden_PD for s in samples]),
            "argmax": torch.cat([s.argmax_P.int() for s in samples]),
            "logsumexp": torch.cat([s.logsumexp_P for s in samples]),
        }
    ids_PE = torch.cat([s.top_ids_PE for s in samples])
    codes_PE, tail_P = pack_log_probs(torch.cat([s.top_log_probs_PE for s in samples]))
    num_ids = int(ids_PE.max()) + 1 if len(ids_PE) else 0
    return {"top_ids": ids_PE.to(id_type(num_ids)), "top_codes": codes_PE, "tail": tail_P}


class HiddenStateCache:
    """Reads a cache; a row is read from the memory-mapped shard, never a whole shard."""

    def __init__(self, folder: Path) -> None:
        """Reads the index and checks that the shards are there.

        Raises:
            ValueError: no index, another format, a shard missing or of the wrong size.
        """
        index = read_json(folder / INDEX)
        with reading(folder / INDEX):
            found_format, shards = index["format"], dict(index["shards"])
            entries: dict[str, dict[str, Any]] = {row["id"]: row for row in index["rows"]}
        if found_format not in (FORMAT, SMALL_FORMAT):
            raise ValueError(
                f"{folder / INDEX} has format {found_format!r}, this version reads {FORMAT!r} and "
                f"{SMALL_FORMAT!r}: delete {folder} and capture again"
            )
        self._store, self._teacher = Store.bf16, TeacherStore.last_hidden
        if found_format == SMALL_FORMAT:
            with reading(folder / INDEX):
                self._store, self._teacher = Store(index["store"]), TeacherStore(index["teacher"])
        for name, shard in shards.items():
            found = (folder / name).stat().st_size if (folder / name).is_file() else None
            if found != shard["bytes"]:
                state = "is missing" if found is None else f"has {found} bytes, not {shard['bytes']}"
                raise ValueError(
                    f"{folder / name} {state}: run the hidden_states stage again, it makes only this "
                    f"shard anew"
                )
        self._folder = folder
        self._entries = entries
        self._shards: dict[str, Any] = {}

    def rows(self, split: str) -> list[RowInfo]:
        """The documents of a split, ordered by id."""
        keys = [field.name for field in dataclasses.fields(RowInfo)]
        entries = [entry for entry in self._entries.values() if entry["split"] == split]
        return [RowInfo(**{key: entry[key] for key in keys}) for entry in entries]

    def load(self, id: str) -> HiddenStateSample:
        """One document.

        Raises:
            KeyError: the cache holds no such id.
            ValueError: its shard is damaged.
        """
        row = self._entries[id]
        path = self._folder / row["shard"]
        with reading(path, way_out="delete it and run the hidden_states stage again"):
            if row["shard"] not in self._shards:
                self._shards[row["shard"]] = safe_open(path, framework="pt")
            shard, tokens = self._shards[row["shard"]], _span(row["first_token"], row["num_tokens"])
            return HiddenStateSample(
                id=id,
                input_ids_T=shard.get_slice("input_ids")[tokens].long(),
                loss_mask_T=shard.get_slice("loss_mask")[tokens],
                aux_TLD=self._aux(shard, row),
                **self._read_teacher(shard, _span(row["first_supervised"], row["num_supervised"])),
            )

    def _aux(self, shard: Any, row: dict[str, Any]) -> torch.Tensor:
        if self._store is Store.bf16:
            aux_TLD: torch.Tensor = shard.get_slice("aux")[_span(row["first_token"], row["num_tokens"])]
            return aux_TLD
        rows = _span(row["first_row"], row["num_rows"])
        return dequantise(shard.get_slice("aux_codes")[rows], shard.get_slice("aux_scale")[rows])

    def _read_teacher(self, shard: Any, supervised: slice) -> dict[str, torch.Tensor]:
        if self._teacher is TeacherStore.last_hidden:
            return {
                "last_hidden_PD": shard.get_slice("last_hidden")[supervised],
                "argmax_P": shard.get_slice("argmax")[supervised].long(),
                "logsumexp_P": shard.get_slice("logsumexp")[supervised],
            }
        tail_P = shard.get_slice("tail")[supervised]
        codes_PE = shard.get_slice("top_codes")[supervised]
        return top_teacher(shard.get_slice("top_ids")[supervised].long(), unpack_log_probs(codes_PE, tail_P))


def _span(first: int, num: int) -> slice:
    return slice(first, first + num)
