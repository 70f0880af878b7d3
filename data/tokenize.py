"""The `tokens` stage: the target's answers to token rows with loss masks, in one Parquet file."""

import functools
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from slipstream.data.answers import ANSWERS_FILE
from slipstream.data.backends.workers import OnStep, ordered
from slipstream.data.config import Overlong, TokenizeConfig
from slipstream.data.conversations import parse_answer
from slipstream.data.files import (
    Line,
    Stage,
    draft_of,
    index_jsonl,
    make_folder,
    read_lines,
    reading,
    stage_fingerprint,
    text,
)
from slipstream.data.progress import Meter, say
from slipstream.data.target.model import set_threads
from slipstream.data.target.resolve import Target
from slipstream.data.template import ChatTemplate, RefusedError, stop_token_ids
from slipstream.data.types import GeneratedConversation, TokenizedSample

TOKENS_FILE = "tokens.parquet"
SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "prompt_id": pa.string(),
        "split": pa.string(),
        "input_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
    }
)
ROWS_PER_TASK = 500
"""Conversations that stand in memory together."""
ROWS_PER_PROCESS, MOST_PROCESSES = 10_000, 2
"""A process takes seconds to start and half a gigabyte; `data.tokenize.workers` asks for more of them."""
MIN_PROMPTS_TO_SPLIT = 20
"""From so many prompts on, the validation split holds at least one."""


@dataclass(kw_only=True)
class MaskCounts:
    """What the loss masks of some rows add up to."""

    rows: int = 0
    tokens: int = 0
    supervised: int = 0
    full: str | None = None
    """The first row whose mask is all true."""

    @classmethod
    def of(cls, rows: Iterable[TokenizedSample]) -> "MaskCounts":
        """The counts of some rows."""
        counts = cls()
        for row in rows:
            counts.add(row)
        return counts

    def add(self, row: TokenizedSample) -> None:
        """Counts one row."""
        self.rows += 1
        self.tokens += len(row.loss_mask_T)
        self.supervised += int(row.loss_mask_T.sum())
        if self.full is None and row.loss_mask_T.all():
            self.full = row.id

    def update(self, more: "MaskCounts") -> None:
        """Adds what was counted of later rows."""
        self.rows += more.rows
        self.tokens += more.tokens
        self.supervised += more.supervised
        self.full = self.full or more.full


def check_masks(counts: MaskCounts, config: TokenizeConfig, when: str) -> dict[str, Any]:
    """Stops a run whose loss masks cannot be right, after every change of length; returns the counts.

    Raises:
        ValueError: the masks are empty, thin or too full.
    """
    coverage = counts.supervised / max(counts.tokens, 1)
    seen = f"coverage={coverage:.3f} {when}"
    # Every row holds a user turn, so some token must be unsupervised.
    if counts.full is not None:
        raise ValueError(
            f"{seen}: user tokens are supervised in row {counts.full} (its mask is all true): "
            f"check the target's chat template"
        )
    if counts.supervised == 0 or coverage < config.min_coverage:
        raise ValueError(
            f"{seen} is below data.tokenize.min_coverage={config.min_coverage}: check the answers and the "
            f"target's chat template, or lower it"
        )
    if coverage > config.max_coverage:
        raise ValueError(
            f"{seen} is above data.tokenize.max_coverage={config.max_coverage}, user tokens are probably "
            f"supervised: check the target's chat template, or raise it"
        )
    return {
        "rows": counts.rows,
        "tokens": counts.tokens,
        "supervised_tokens": counts.supervised,
        "coverage": round(coverage, 4),
    }


def fit_length(row: TokenizedSample, config: TokenizeConfig) -> tuple[TokenizedSample | None, str]:
    """The row, cut where needed, and a flag ("truncated" or ""); or None and why it is dropped."""
    places_P = row.loss_mask_T.nonzero().flatten()
    flag = ""
    if len(places_P) and places_P[0] >= config.max_length:
        return None, "prompt_too_long"
    if len(row.input_ids_T) > config.max_length:
        if config.overlong is Overlong.drop:
            return None, "too_long"
        places_P, flag = places_P[places_P < config.max_length], "truncated"
    if len(places_P) < config.min_supervised:
        return None, "too_few_targets"
    length = int(places_P[-1]) + 1  # no row of the drafter reads what follows the last answer
    cut = replace(row, input_ids_T=row.input_ids_T[:length], loss_mask_T=row.loss_mask_T[:length])
    return cut, flag


def validation_prompts(prompt_ids: Iterable[str], share: float) -> set[str]:
    """The prompts kept out of training: those whose hash lies below `share`.

    Both splits get one where that is possible: validation when there are MIN_PROMPTS_TO_SPLIT.
    """
    places = {i: int(hashlib.sha256(i.encode()).hexdigest()[:12], 16) / 16**12 for i in set(prompt_ids)}
    chosen = {i for i, place in places.items() if place < share}
    if share > 0 and not chosen and len(places) >= MIN_PROMPTS_TO_SPLIT:
        chosen.add(min(places, key=places.__getitem__))
    if chosen and len(chosen) == len(places):
        chosen.remove(max(places, key=places.__getitem__))
    return chosen


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """An answered conversation in the answers file."""

    id: str
    prompt_id: str
    split: str
    line: Line


@dataclass(kw_only=True)
class Part:
    """Some conversations as rows, and what became of them."""

    rows: pa.Table = field(default_factory=SCHEMA.empty_table)
    rendered: MaskCounts = field(default_factory=MaskCounts)
    """Before the length rules."""
    kept: MaskCounts = field(default_factory=MaskCounts)
    dropped: Counter[str] = field(default_factory=Counter)
    truncated: int = 0

    def update(self, more: "Part") -> None:
        """Adds the counts of a later part."""
        self.rendered.update(more.rendered)
        self.kept.update(more.kept)
        self.dropped.update(more.dropped)
        self.truncated += more.truncated

    def check(self, config: TokenizeConfig) -> dict[str, Any]:
        """The counts; ValueError when the mask gate closes, before or after the length rules."""
        check_masks(self.rendered, config, "in the rendered answers")
        reasons = dict(sorted(self.dropped.items()))
        counts = check_masks(self.kept, config, f"after the length rules (dropped: {reasons})")
        return {**counts, "truncated": self.truncated, "dropped": reasons}


class Tokenizer:
    """Makes rows of conversations in the answers file; one for each process."""

    def __init__(self, target: Target, *, path: Path, config: TokenizeConfig) -> None:
        self._path, self._config = path, config
        self._template = ChatTemplate(
            target.tokenizer(), stop_token_ids(target), on_inserted=config.on_inserted
        )

    def __call__(self, entries: Sequence[Entry], on_step: OnStep) -> Part:
        """The rows of some entries, in their order."""
        part = Part()
        rows = []
        splits = {entry.prompt_id: entry.split for entry in entries}
        for conversation in read_lines(self._path, (entry.line for entry in entries), parse_answer):
            found = self._rows(conversation, part)
            rows += [replace(row, split=splits[conversation.prompt_id]) for row in found]
            on_step(0, 1)
        part.rows = as_table(rows)
        return part

    def _rows(self, conversation: GeneratedConversation, part: Part) -> Iterator[TokenizedSample]:
        try:
            views = self._template.views(conversation)
        except RefusedError as refused:
            part.dropped[str(refused)] += 1
            return
        for view in views:
            part.rendered.add(view)
            row, flag = fit_length(view, self._config)
            if row is None:
                part.dropped[flag] += 1
            else:
                part.truncated += flag == "truncated"
                part.kept.add(row)
                yield row


def run(
    config: TokenizeConfig, target: Target, regenerated_folder: Path, folder: Path, validation_share: float
) -> None:
    """The `tokens` stage: `answers.jsonl` of the target to `tokens.parquet`."""
    settings = {
        "target": target.fingerprint,
        "regenerated": stage_fingerprint(regenerated_folder),
        **{key: value for key, value in asdict(config).items() if key != "workers"},
        "overlong": config.overlong.value,
        "validation_share": validation_share,
    }
    stage = Stage(folder, "tokens", settings)
    if stage.is_complete:
        return
    answers = regenerated_folder / ANSWERS_FILE
    entries = _entries(answers, validation_share)
    if not entries:
        raise ValueError(f"{answers} holds no answer: delete {regenerated_folder} to make it again")
    total = Part()
    with draft_of(folder / TOKENS_FILE) as draft:
        with Meter("tokenize", len(entries), unit="row") as meter:
            tables = _tokenized(entries, answers, config, target, total, lambda _, rows: meter.advance(rows))
            write_tables(draft, tables)
        facts = total.check(config)
        stage.begin()
        os.replace(draft, folder / TOKENS_FILE)
    num_validation = sum(
        pc.sum(pc.equal(table["split"], "validation")).as_py() or 0 for table in read_tables(folder)
    )
    stage.complete([TOKENS_FILE], **facts, validation_rows=num_validation)
    say(
        f"tokenize     {facts['rows']:,} rows ({num_validation:,} for validation), "
        f"{facts['supervised_tokens']:,} of {facts['tokens']:,} tokens supervised, "
        f"{facts['truncated']:,} cut, dropped: {facts['dropped']}"
    )


def _entries(answers: Path, validation_share: float) -> list[Entry]:
    """Every conversation of the answers file, sorted by id, with its split."""
    found = list(index_jsonl(answers, lambda row: (text(row["id"]), text(row["prompt_id"]))))
    validation = validation_prompts((prompt_id for (_, prompt_id), _ in found), validation_share)
    return [
        Entry(
            id=name,
            prompt_id=prompt_id,
            split="validation" if prompt_id in validation else "train",
            line=line,
        )
        for (name, prompt_id), line in sorted(found, key=lambda item: item[0])
    ]


def _tokenized(
    entries: Sequence[Entry],
    answers: Path,
    config: TokenizeConfig,
    target: Target,
    total: Part,
    on_step: OnStep,
) -> Iterator[pa.Table]:
    """Rows of all entries, part after part, counted into `total`."""
    tasks = [entries[i : i + ROWS_PER_TASK] for i in range(0, len(entries), ROWS_PER_TASK)]
    make = functools.partial(Tokenizer, path=answers, config=config)
    set_threads()
    cores = min(torch.get_num_threads(), len(entries) // ROWS_PER_PROCESS, MOST_PROCESSES)
    workers = max(1, min(config.workers or cores, len(tasks)))
    for part in ordered(make, target, tasks, workers=workers, on_step=on_step, stage="tokenize"):
        total.update(part)
        yield part.rows


def as_table(rows: Sequence[TokenizedSample]) -> pa.Table:
    """Rows as columns of SCHEMA."""
    columns = {
        "id": [row.id for row in rows],
        "prompt_id": [row.prompt_id for row in rows],
        "split": [row.split for row in rows],
        "input_ids": [row.input_ids_T.int().numpy() for row in rows],
        "loss_mask": [row.loss_mask_T.numpy() for row in rows],
    }
    return pa.table(columns, SCHEMA)


def write_tables(path: Path, tables: Iterable[pa.Table]) -> None:
    """Writes a Parquet file, one row group for each table; equal tables give equal bytes."""
    make_folder(path.parent)
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        for table in tables:
            writer.write_table(table)


def read_tables(folder: Path) -> Iterator[pa.Table]:
    """The rows of the stage in `folder`, sorted by id, as one table of SCHEMA after another."""
    path = folder / TOKENS_FILE
    with reading(path):
        file = pq.ParquetFile(path)
        if file.schema_arrow != SCHEMA:
            raise ValueError(f"columns are {', '.join(map(str, file.schema_arrow))}")
    for number in range(file.num_row_groups):
        with reading(path):
            table = file.read_row_group(number)
        yield table


def read_samples(folder: Path, split: str | None = None) -> list[TokenizedSample]:
    """The rows of the stage in `folder`, of one split or of all, sorted by id."""
    return [
        TokenizedSample(
            id=row_id.as_py(),
            prompt_id=prompt_id.as_py(),
            split=row_split.as_py(),
            input_ids_T=torch.tensor(ids.values.to_numpy(), dtype=torch.int64),
            loss_mask_T=torch.tensor(mask.values.to_numpy(zero_copy_only=False)),
        )
        for table in read_tables(folder)
        for row_id, prompt_id, row_split, ids, mask in zip(*table.columns, strict=True)
        if split in (None, row_split.as_py())
    ]
