"""The `tokens` stage: the target's answers to token rows with loss masks, in one Parquet file."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from slipstream.data.config import Overlong, TokenizeConfig
from slipstream.data.conversations import parse_answer
from slipstream.data.files import (
    Line,
    Stage,
    draft_of,
    index_jsonl,
    read_lines,
    reading,
    stage_fingerprint,
    text,
)
from slipstream.data.progress import Meter, say
from slipstream.data.regenerate import ANSWERS_FILE
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
ROWS_PER_GROUP = 1000
"""Rows of the Parquet file that stand in memory together."""
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

    def add(self, row: TokenizedSample) -> None:
        """Counts one row."""
        self.rows += 1
        self.tokens += len(row.loss_mask_T)
        self.supervised += int(row.loss_mask_T.sum())
        if self.full is None and row.loss_mask_T.all():
            self.full = row.id


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
    """An answered conversation in the answers file; they sort by id."""

    id: str
    prompt_id: str
    line: Line


class Tokenizing:
    """Turns the answers of one file into rows, one by one, and counts what becomes of them."""

    def __init__(self, path: Path, template: ChatTemplate, config: TokenizeConfig) -> None:
        self._path, self._template, self._config = path, template, config
        self._rendered, self._kept = MaskCounts(), MaskCounts()
        self._dropped: Counter[str] = Counter()
        self._num_truncated = self._num_validation = 0

    def rows(self, entries: Sequence[Entry], validation: set[str]) -> Iterator[TokenizedSample]:
        """Rows of the entries, in their order."""
        lines = (entry.line for entry in entries)
        with Meter("tokenize", len(entries), unit="row") as meter:
            for conversation in read_lines(self._path, lines, parse_answer):
                split = "validation" if conversation.prompt_id in validation else "train"
                for row in self._fitted(conversation):
                    self._num_validation += split == "validation"
                    yield replace(row, split=split)
                meter.advance(1)

    def _fitted(self, conversation: GeneratedConversation) -> Iterator[TokenizedSample]:
        try:
            views = self._template.views(conversation)
        except RefusedError as refused:
            self._dropped[str(refused)] += 1
            return
        for view in views:
            self._rendered.add(view)
            row, flag = fit_length(view, self._config)
            if row is None:
                self._dropped[flag] += 1
            else:
                self._num_truncated += flag == "truncated"
                self._kept.add(row)
                yield row

    def check(self) -> dict[str, Any]:
        """The counts; ValueError when the mask gate closes, before or after the length rules."""
        check_masks(self._rendered, self._config, "in the rendered answers")
        reasons = dict(sorted(self._dropped.items()))
        counts = check_masks(self._kept, self._config, f"after the length rules (dropped: {reasons})")
        facts = {"truncated": self._num_truncated, "dropped": reasons}
        return {**counts, **facts, "validation_rows": self._num_validation}


def run(
    config: TokenizeConfig, target: Target, regenerated_folder: Path, folder: Path, validation_share: float
) -> None:
    """The `tokens` stage: `answers.jsonl` of the target to `tokens.parquet`."""
    settings = {
        "target": target.fingerprint,
        "regenerated": stage_fingerprint(regenerated_folder),
        **asdict(config),
        "overlong": config.overlong.value,
        "validation_share": validation_share,
    }
    stage = Stage(folder, "tokens", settings)
    if stage.is_complete:
        return
    answers = regenerated_folder / ANSWERS_FILE
    names = index_jsonl(answers, lambda row: (text(row["id"]), text(row["prompt_id"])))
    entries = [Entry(id=name, prompt_id=prompt_id, line=line) for (name, prompt_id), line in names]
    if not entries:
        raise ValueError(f"{answers} holds no answer: delete {regenerated_folder} to make it again")
    entries.sort(key=lambda entry: entry.id)
    validation = validation_prompts((entry.prompt_id for entry in entries), validation_share)
    template = ChatTemplate(target.tokenizer(), stop_token_ids(target), on_inserted=config.on_inserted)
    work = Tokenizing(answers, template, config)
    with draft_of(folder / TOKENS_FILE) as draft:
        write_rows(draft, work.rows(entries, validation))
        facts = work.check()
        stage.begin()
        os.replace(draft, folder / TOKENS_FILE)
    stage.complete([TOKENS_FILE], **facts)
    say(
        f"tokenize     {facts['rows']:,} rows ({facts['validation_rows']:,} for validation), "
        f"{facts['supervised_tokens']:,} of {facts['tokens']:,} tokens supervised, "
        f"{facts['truncated']:,} cut, dropped: {facts['dropped']}"
    )


def write_rows(path: Path, rows: Iterable[TokenizedSample]) -> None:
    """Writes a Parquet file group by group; equal rows give equal bytes."""
    stream = iter(rows)
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        while group := list(islice(stream, ROWS_PER_GROUP)):
            columns = {
                "id": [row.id for row in group],
                "prompt_id": [row.prompt_id for row in group],
                "split": [row.split for row in group],
                "input_ids": [row.input_ids_T.int().numpy() for row in group],
                "loss_mask": [row.loss_mask_T.numpy() for row in group],
            }
            writer.write_table(pa.table(columns, SCHEMA))


def read_groups(folder: Path) -> Iterator[pa.Table]:
    """The rows of the stage in `folder` group by group, as columns of SCHEMA, sorted by id."""
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
        for table in read_groups(folder)
        for row_id, prompt_id, row_split, ids, mask in zip(*table.columns, strict=True)
        if split in (None, row_split.as_py())
    ]
