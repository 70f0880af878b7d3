"""The `tokens` stage: the target's answers to token rows with loss masks, in one Parquet file."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from slipstream.data.config import Overlong, TokenizeConfig
from slipstream.data.files import MANIFEST, Stage, atomic_path, stage_fingerprint
from slipstream.data.progress import Meter, say
from slipstream.data.regenerate import ANSWERS_FILE, read_answers
from slipstream.data.target.resolve import Target
from slipstream.data.template import ChatTemplate, RefusedError, stop_token_ids
from slipstream.data.types import GeneratedConversation, TokenizedSample

TOKENS_FILE = "tokens.parquet"
ROWS_PER_GROUP = 1024
MIN_PROMPTS_TO_SPLIT = 20
"""From so many prompts on, the validation split holds at least one."""
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("prompt_id", pa.string()),
        ("split", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
    ]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRow:
    """A document before it gets its split."""

    id: str
    prompt_id: str
    input_ids_T: NDArray[np.int32]
    loss_mask_T: NDArray[np.bool_]


class MaskGate:
    """Stops a run whose loss masks cannot be right; to be asked after every change of length."""

    def __init__(self, config: TokenizeConfig) -> None:
        self._config = config
        self.num_tokens = self.num_supervised = 0
        self._all_supervised = ""

    def add(self, row_id: str, loss_mask_T: NDArray[np.bool_]) -> None:
        """Counts one row; every row holds a user turn, so some token must be unsupervised."""
        self.num_tokens += loss_mask_T.size
        self.num_supervised += int(loss_mask_T.sum())
        if loss_mask_T.all():
            self._all_supervised = self._all_supervised or row_id

    @property
    def coverage(self) -> float:
        """Share of the tokens that are supervised."""
        return self.num_supervised / max(self.num_tokens, 1)

    def check(self, when: str) -> None:
        """Raises ValueError when the masks seen so far are empty, thin or too full."""
        low, high, seen = (
            self._config.min_coverage,
            self._config.max_coverage,
            f"coverage={self.coverage:.3f}",
        )
        if self._all_supervised:
            raise ValueError(
                f"{seen} {when}: user tokens are supervised in row {self._all_supervised} (its mask is all "
                f"true): check the target's chat template"
            )
        if self.num_supervised == 0 or self.coverage < low:
            raise ValueError(
                f"{seen} {when} is below data.tokenize.min_coverage={low}: check the answers and the "
                f"target's chat template, or lower it"
            )
        if self.coverage > high:
            raise ValueError(
                f"{seen} {when} is above data.tokenize.max_coverage={high}, user tokens are probably "
                f"supervised: check the target's chat template, or raise it"
            )


def tokenize_conversation(conversation: GeneratedConversation, template: ChatTemplate) -> list[TokenRow]:
    """One row for each view of a conversation, named `ID` or `ID.00`, `ID.01`, ...

    Raises:
        RefusedError: the template cannot render it.
    """
    views = template.views(conversation)
    names = (
        [conversation.id] if len(views) == 1 else [f"{conversation.id}.{i:02d}" for i in range(len(views))]
    )
    return [
        TokenRow(
            id=name,
            prompt_id=conversation.prompt_id,
            input_ids_T=view.input_ids_T,
            loss_mask_T=view.loss_mask_T,
        )
        for name, view in zip(names, views, strict=True)
    ]


def fit_length(row: TokenRow, config: TokenizeConfig) -> tuple[TokenRow | None, str]:
    """Applies the length rules.

    Returns:
        The row, cut where needed, and a flag ("truncated" or ""); or None and why it is dropped.
    """
    places_P = np.flatnonzero(row.loss_mask_T)
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
) -> tuple[list[TokenRow], dict[str, Any]]:
    """Rows of all conversations, sorted by id, and the counts.

    Raises:
        ValueError: the mask gate closes, before or after the length rules.
    """
    before, after = MaskGate(config), MaskGate(config)
    kept: list[TokenRow] = []
    reasons: Counter[str] = Counter()
    num_truncated = 0
    with Meter("tokenize", len(conversations), unit="row") as meter:
        for conversation in conversations:
            meter.advance(1)
            try:
                rows = tokenize_conversation(conversation, template)
            except RefusedError as refused:
                reasons[str(refused)] += 1
                continue
            for row in rows:
                before.add(row.id, row.loss_mask_T)
                fitted, flag = fit_length(row, config)
                if fitted is None:
                    reasons[flag] += 1
                    continue
                num_truncated += flag == "truncated"
                after.add(fitted.id, fitted.loss_mask_T)
                kept.append(fitted)
    dropped = dict(sorted(reasons.items()))
    before.check("in the rendered answers")
    after.check(f"after the length rules (dropped: {dropped})")
    facts = {
        "rows": len(kept),
        "tokens": after.num_tokens,
        "supervised_tokens": after.num_supervised,
        "coverage": round(after.coverage, 4),
        "truncated": num_truncated,
        "dropped": dropped,
    }
    return sorted(kept, key=lambda row: row.id), facts


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
    if (folder / MANIFEST).exists() and Stage(folder, "tokens", settings).is_complete:
        return
    # Tokenize first: a closed gate leaves nothing behind.
    template = ChatTemplate(target.tokenizer(), stop_token_ids(target), on_inserted=config.on_inserted)
    rows, facts = tokenize_all(read_answers(regenerated_folder / ANSWERS_FILE), template, config)
    validation = validation_prompts((row.prompt_id for row in rows), validation_share)
    stage = Stage(folder, "tokens", settings)
    write_rows(folder / TOKENS_FILE, rows, validation)
    num_validation = sum(row.prompt_id in validation for row in rows)
    stage.complete([TOKENS_FILE], **facts, validation_rows=num_validation)
    say(
        f"tokenize     {facts['rows']:,} rows ({num_validation:,} for validation), "
        f"{facts['supervised_tokens']:,} of {facts['tokens']:,} tokens supervised, "
        f"{facts['truncated']:,} cut, dropped: {facts['dropped']}"
    )


def write_rows(path: Path, rows: Sequence[TokenRow], validation: set[str]) -> None:
    """Writes the Parquet file; equal rows give equal bytes."""
    with atomic_path(path) as temporary, pq.ParquetWriter(temporary, SCHEMA, compression="zstd") as writer:
        for start in range(0, len(rows), ROWS_PER_GROUP):
            group = rows[start : start + ROWS_PER_GROUP]
            bounds = np.cumsum([0, *(row.input_ids_T.size for row in group)]).astype(np.int32)
            tokens = np.concatenate([row.input_ids_T for row in group])
            masks = np.concatenate([row.loss_mask_T for row in group])
            columns = [
                pa.array([row.id for row in group]),
                pa.array([row.prompt_id for row in group]),
                pa.array(["validation" if row.prompt_id in validation else "train" for row in group]),
                pa.ListArray.from_arrays(bounds, pa.array(tokens)),
                pa.ListArray.from_arrays(bounds, pa.array(masks)),
            ]
            writer.write_table(pa.Table.from_arrays(columns, schema=SCHEMA), row_group_size=ROWS_PER_GROUP)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenGroup:
    """Up to ROWS_PER_GROUP rows side by side."""

    ids: Sequence[str]
    bounds: NDArray[np.int64]
    """Token offsets of the rows, ending with the number of tokens."""
    input_ids_T: NDArray[np.int32]
    loss_mask_T: NDArray[np.bool_]


def read_groups(folder: Path, split: str | None = None) -> Iterator[TokenGroup]:
    """Streams the rows of the stage in `folder`, of one split or of all."""
    with pq.ParquetFile(folder / TOKENS_FILE) as file:
        for batch in file.iter_batches(ROWS_PER_GROUP):
            rows = batch if split is None else batch.filter(pc.equal(batch["split"], split))
            lengths = rows["input_ids"].value_lengths().to_numpy(zero_copy_only=False)
            yield TokenGroup(
                ids=rows["id"].to_pylist(),
                bounds=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
                input_ids_T=rows["input_ids"].flatten().to_numpy(zero_copy_only=False),
                loss_mask_T=rows["loss_mask"].flatten().to_numpy(zero_copy_only=False),
            )


def read_samples(folder: Path, split: str | None = None) -> list[TokenizedSample]:
    """The rows of the stage in `folder`, of one split or of all, sorted by id."""
    return [sample for group in read_groups(folder, split) for sample in _samples(group)]


def _samples(group: TokenGroup) -> Iterator[TokenizedSample]:
    ids_T = torch.from_numpy(group.input_ids_T.astype(np.int64))
    mask_T = torch.from_numpy(group.loss_mask_T.copy())
    for i, row_id in enumerate(group.ids):
        part = slice(int(group.bounds[i]), int(group.bounds[i + 1]))
        yield TokenizedSample(id=row_id, input_ids_T=ids_T[part].clone(), loss_mask_T=mask_T[part].clone())
