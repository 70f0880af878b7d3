"""The `tokens` stage: the target's answers to token rows with loss masks, in one Parquet file."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from slipstream.data.answers import ANSWERS_FILE
from slipstream.data.config import Overlong, TokenizeConfig
from slipstream.data.conversations import read_answers
from slipstream.data.files import Stage, atomic_path, reading, stage_fingerprint
from slipstream.data.progress import Meter, say
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
MIN_PROMPTS_TO_SPLIT = 20
"""From so many prompts on, the validation split holds at least one."""


def check_masks(rows: Sequence[TokenizedSample], config: TokenizeConfig, when: str) -> dict[str, Any]:
    """Stops a run whose loss masks cannot be right, after every change of length; returns the counts.

    Raises:
        ValueError: the masks are empty, thin or too full.
    """
    num_tokens = sum(len(row.loss_mask_T) for row in rows)
    num_supervised = sum(int(row.loss_mask_T.sum()) for row in rows)
    coverage = num_supervised / max(num_tokens, 1)
    seen = f"coverage={coverage:.3f} {when}"
    # Every row holds a user turn, so some token must be unsupervised.
    full = next((row.id for row in rows if row.loss_mask_T.all()), None)
    if full is not None:
        raise ValueError(
            f"{seen}: user tokens are supervised in row {full} (its mask is all true): "
            f"check the target's chat template"
        )
    if num_supervised == 0 or coverage < config.min_coverage:
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
        "rows": len(rows),
        "tokens": num_tokens,
        "supervised_tokens": num_supervised,
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


def tokenize_all(
    conversations: Sequence[GeneratedConversation], template: ChatTemplate, config: TokenizeConfig
) -> tuple[list[TokenizedSample], dict[str, Any]]:
    """Rows of all conversations, sorted by id, and the counts.

    Raises:
        ValueError: the mask gate closes, before or after the length rules.
    """
    rows: list[TokenizedSample] = []
    dropped: Counter[str] = Counter()
    with Meter("tokenize", len(conversations), unit="row") as meter:
        for conversation in conversations:
            try:
                rows += template.views(conversation)
            except RefusedError as refused:
                dropped[str(refused)] += 1
            meter.advance(1)
    check_masks(rows, config, "in the rendered answers")
    fitted = [fit_length(row, config) for row in rows]
    dropped.update(flag for row, flag in fitted if row is None)
    kept = sorted((row for row, _ in fitted if row is not None), key=lambda row: row.id)
    reasons = dict(sorted(dropped.items()))
    counts = check_masks(kept, config, f"after the length rules (dropped: {reasons})")
    num_truncated = sum(flag == "truncated" for _, flag in fitted)
    return kept, {**counts, "truncated": num_truncated, "dropped": reasons}


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
    answers = read_answers(regenerated_folder / ANSWERS_FILE)
    if not answers:
        raise ValueError(
            f"{regenerated_folder / ANSWERS_FILE} holds no answer: "
            f"delete {regenerated_folder} to make it again"
        )
    template = ChatTemplate(target.tokenizer(), stop_token_ids(target), on_inserted=config.on_inserted)
    rows, facts = tokenize_all(answers, template, config)
    validation = validation_prompts((row.prompt_id for row in rows), validation_share)
    rows = [replace(row, split="validation") if row.prompt_id in validation else row for row in rows]
    num_validation = sum(row.split == "validation" for row in rows)
    stage.begin()
    write_rows(folder / TOKENS_FILE, rows)
    stage.complete([TOKENS_FILE], **facts, validation_rows=num_validation)
    say(
        f"tokenize     {facts['rows']:,} rows ({num_validation:,} for validation), "
        f"{facts['supervised_tokens']:,} of {facts['tokens']:,} tokens supervised, "
        f"{facts['truncated']:,} cut, dropped: {facts['dropped']}"
    )


def write_rows(path: Path, rows: Sequence[TokenizedSample]) -> None:
    """Writes the Parquet file; equal rows give equal bytes."""
    columns = {
        "id": [row.id for row in rows],
        "prompt_id": [row.prompt_id for row in rows],
        "split": [row.split for row in rows],
        "input_ids": [row.input_ids_T.int().numpy() for row in rows],
        "loss_mask": [row.loss_mask_T.numpy() for row in rows],
    }
    with atomic_path(path) as temporary:
        pq.write_table(pa.table(columns, SCHEMA), temporary, compression="zstd")


def read_samples(folder: Path, split: str | None = None) -> list[TokenizedSample]:
    """The rows of the stage in `folder`, of one split or of all, sorted by id."""
    path = folder / TOKENS_FILE
    with reading(path):
        table = pq.ParquetFile(path).read()
        if table.schema != SCHEMA:
            raise ValueError(f"columns are {', '.join(map(str, table.schema))}")
    return [
        TokenizedSample(
            id=row_id.as_py(),
            prompt_id=prompt_id.as_py(),
            split=row_split.as_py(),
            input_ids_T=torch.tensor(ids.values.to_numpy(), dtype=torch.int64),
            loss_mask_T=torch.tensor(mask.values.to_numpy(zero_copy_only=False)),
        )
        for row_id, prompt_id, row_split, ids, mask in zip(*table.columns, strict=True)
        if split in (None, row_split.as_py())
    ]
