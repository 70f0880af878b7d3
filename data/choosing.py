"""The `prompts` stage: filters, exact and near duplicates, the mix of sources, the held-out split.

Rows are read one at a time. A usable one is written to a scratch file in its normal form, and only
its id and place stay in memory. Everything after that is decided in the order of the ids, hashes of
the content: the choice does not depend on the order of rows, and stays as it is when more come.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.table import Table

from slipstream.data.config import PromptsConfig, Source
from slipstream.data.conversations import (
    PATHS_KEY,
    PROMPTS_FILE,
    Dropped,
    content_id,
    parse_prompt,
    read_source,
    source_files,
)
from slipstream.data.files import Stage, atomic_path, file_hash, scratch_file
from slipstream.data.progress import is_main_process, say
from slipstream.data.types import Conversation, Message

HELDOUT_FILE = "heldout.jsonl"

NUM_PERMUTATIONS = 64
"""Of a MinHash; the similarity it gives is right to about 0.05."""
SHINGLE = 3
"""Words of one piece that near duplicates are compared by."""
WORD = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\\w+")
"""A word, or one character of a script that writes no spaces."""
SURE = 0.9
"""Probability from which on a prompt counts as being in another language."""
LANGUAGE_CHARS = 1000
"""Characters of a prompt that its language is read from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A prompt in the scratch file."""

    id: str
    source: int
    start: int


@dataclass(kw_only=True)
class Tally:
    """What became of the rows of one source."""

    path: str
    read: int = 0
    kept: int = 0
    heldout: int = 0
    first_bad: str = ""
    unusable: Counter[str] = field(default_factory=Counter)
    """Rows that are no chat, by reason."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Good rows that were not chosen, by reason."""

    @property
    def dropped(self) -> dict[str, int]:
        """All rows that are gone, by reason."""
        return dict(sorted((self.unusable + self.left_out).items()))


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The chosen rows, sorted by id, and what became of all the others."""

    kept: list[Row]
    heldout: list[Row]
    tallies: list[Tally]


def load_prompts(config: PromptsConfig, *, key: str = PATHS_KEY) -> list[Conversation]:
    """The chosen prompts in memory, sorted by id; raises as `choose`."""
    with scratch_file(Path.cwd()) as scratch:
        rows = choose(config, scratch, key=key).kept
        return [parse_prompt(json.loads(line_at(scratch, row))) for row in rows]


def run(config: PromptsConfig, folder: Path, *, with_answers: bool = False) -> None:
    """The `prompts` stage: sources to `prompts.jsonl` and `heldout.jsonl`."""
    files = {source.path: source_files(source.path) for source in config.sources()}
    hashes = {path: [file_hash(file) for file in found] for path, found in files.items() if found}
    settings = {**asdict(config), "source_hashes": hashes, "with_answers": with_answers}
    stage = Stage(folder, "prompts", settings)
    if stage.is_complete:
        return
    with scratch_file(folder) as scratch:
        choice = choose(config, scratch, with_answers=with_answers)
        stage.begin()
        outputs = {PROMPTS_FILE: choice.kept, **({HELDOUT_FILE: choice.heldout} if choice.heldout else {})}
        for name, rows in outputs.items():
            with atomic_path(folder / name) as temporary, temporary.open("wb") as stream:
                stream.writelines(line_at(scratch, row) for row in rows)
    facts = [
        {
            "path": tally.path,
            "read": tally.read,
            "kept": tally.kept,
            "heldout": tally.heldout,
            "dropped": tally.dropped,
        }
        for tally in choice.tallies
    ]
    stage.complete(
        list(outputs),
        rows_read=sum(tally.read for tally in choice.tallies),
        kept=len(choice.kept),
        heldout=len(choice.heldout),
        dropped=dict(sorted(sum((Counter(t.dropped) for t in choice.tallies), Counter[str]()).items())),
        sources=facts,
    )
    say(f"prompts      {len(choice.kept):,} kept, {len(choice.heldout):,} held out")
    if is_main_process():
        Console(stderr=True).print(_table(choice.tallies))


def _table(tallies: Sequence[Tally]) -> Table:
    table = Table("source", "read", "kept", "held out", "dropped")
    for tally in tallies:
        reasons = "\n".join(f"{count:,} {reason}" for reason, count in tally.dropped.items())
        table.add_row(tally.path, *(f"{n:,}" for n in (tally.read, tally.kept, tally.heldout)), reasons)
    return table


def choose(
    config: PromptsConfig, scratch: IO[bytes], *, with_answers: bool = False, key: str = PATHS_KEY
) -> Choice:
    """Reads all sources into `scratch` and chooses from them.

    Args:
        config: sources and rules.
        scratch: an empty file to write and read.
        with_answers: keep the recorded assistant turns.
        key: the setting that lists the sources, for messages.

    Raises:
        ValueError: a source is missing, nothing is left, or too many rows are unusable.
    """
    sources = config.sources()
    tallies = [Tally(path=source.path) for source in sources]
    rows = _read_all(config, scratch, tallies, with_answers=with_answers, key=key)
    _refuse_bad(config, tallies, key)
    if config.near_duplicates:
        rows = _without_near_duplicates(rows, scratch, config.near_duplicates, tallies)
    rows = _mixed(rows, sources, tallies)
    heldout = [row for row in rows if place(f"heldout/{row.id}") < config.heldout_share]
    away = {row.id for row in heldout}
    rows = [row for row in rows if row.id not in away]
    kept = _first(rows, config.limit or len(rows), "over the limit", tallies)
    for row in kept:
        tallies[row.source].kept += 1
    for row in heldout:
        tallies[row.source].heldout += 1
    if config.heldout_share and kept and not heldout:
        raise ValueError(
            f"data.prompts.heldout_share={config.heldout_share} sets none of {len(kept)} prompts aside: "
            f"raise it"
        )
    if not kept:
        why = dict(sum((tally.unusable + tally.left_out for tally in tallies), Counter[str]()))
        raise ValueError(
            f"{key}: no prompt in {', '.join(source.path for source in sources)}"
            f"{f' is left (dropped: {why})' if why else ''}"
        )
    return Choice(kept=kept, heldout=heldout, tallies=tallies)


def place(name: str) -> float:
    """A number in [0, 1) that depends on the name alone.

    >>> round(place("heldout/1d9f4feaa9db000b"), 4)
    0.2823
    """
    return int(hashlib.sha256(name.encode()).hexdigest()[:12], 16) / 16.0**12


def line_at(scratch: IO[bytes], row: Row) -> bytes:
    """The line of a chosen row."""
    scratch.seek(row.start)
    return scratch.readline()


def _read_all(
    config: PromptsConfig, scratch: IO[bytes], tallies: Sequence[Tally], *, with_answers: bool, key: str
) -> list[Row]:
    """The good rows that are no copies, sorted by id."""
    why_unfit = _filters(config)
    rows: dict[str, Row] = {}
    start = 0
    for number, tally in enumerate(tallies):
        for found in read_source(tally.path, config.split, as_prompts=not with_answers, key=key):
            tally.read += 1
            if isinstance(found, Dropped):
                tally.unusable[found.reason] += 1
                tally.first_bad = tally.first_bad or f"{found.where} ({found.reason})"
                continue
            prompt = _named_by_prompt(found) if with_answers else found
            reason = "duplicate" if prompt.id in rows else why_unfit(prompt)
            if reason:
                tally.left_out[reason] += 1
                continue
            rows[prompt.id] = Row(id=prompt.id, source=number, start=start)
            start += scratch.write(json.dumps(asdict(prompt), ensure_ascii=False).encode() + b"\n")
    return [rows[name] for name in sorted(rows)]


def _named_by_prompt(chat: Conversation) -> Conversation:
    """A chat with answers under the id that its prompt has without them."""
    return replace(chat, id=content_id(m for m in chat.messages if m.role != "assistant"))


def _filters(config: PromptsConfig) -> Callable[[Conversation], str]:
    """Gives the reason why a prompt is left out, or an empty string."""
    identify = _language_of(config.languages) if config.languages else None

    def why_unfit(prompt: Conversation) -> str:
        said = user_text(prompt.messages)
        if len(said) < config.min_chars:
            return "too short"
        if config.max_chars and len(said) > config.max_chars:
            return "too long"
        if identify is not None:
            language, probability = identify(said[:LANGUAGE_CHARS])
            if language not in config.languages and probability >= SURE:
                return "other language"
        return ""

    return why_unfit


def _language_of(wanted: Sequence[str]) -> Callable[[str], tuple[str, float]]:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier  # loads its model in a second

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    unknown = set(wanted) - set(identifier.labels)
    if unknown:
        raise ValueError(
            f"data.prompts.languages: {sorted(unknown)[0]} is none of {', '.join(identifier.labels)}"
        )
    classify: Callable[[str], tuple[str, float]] = identifier.classify
    return classify


def user_text(messages: Iterable[Message]) -> str:
    """What the user wrote."""
    return "\n".join(message.content for message in messages if message.role == "user")


def _refuse_bad(config: PromptsConfig, tallies: Sequence[Tally], key: str) -> None:
    num_rows = sum(tally.read for tally in tallies)
    reasons = sum((tally.unusable for tally in tallies), Counter[str]())
    num_bad = reasons.total()
    if num_rows and num_bad / num_rows > config.max_dropped_share:
        counts = ", ".join(f"{reason}: {count}" for reason, count in sorted(reasons.items()))
        first_bad = next(tally.first_bad for tally in tallies if tally.first_bad)
        raise ValueError(
            f"{key}: {num_bad} of {num_rows} rows cannot be used ({counts}), first {first_bad}: "
            f"mend the source{' or raise data.prompts.max_dropped_share' if key == PATHS_KEY else ''}"
        )


def _without_near_duplicates(
    rows: Sequence[Row], scratch: IO[bytes], threshold: float, tallies: Sequence[Tally]
) -> list[Row]:
    from rensa import RMinHash, RMinHashDeduplicator

    seen = RMinHashDeduplicator(threshold, NUM_PERMUTATIONS, True, None, 0)
    kept = []
    for row in rows:
        messages = json.loads(line_at(scratch, row))["messages"]
        said = user_text(Message(**message) for message in messages)
        words = WORD.findall(said.lower()) or [said]  # of signs alone: no word
        signature = RMinHash(NUM_PERMUTATIONS, 0)
        signature.update([" ".join(words[i : i + SHINGLE]) for i in range(max(1, len(words) - SHINGLE + 1))])
        if seen.add(row.id, signature):
            kept.append(row)
        else:
            tallies[row.source].left_out["near duplicate"] += 1
    return kept


def _mixed(rows: Sequence[Row], sources: Sequence[Source], tallies: Sequence[Tally]) -> list[Row]:
    """Limits of single sources, then the largest mix in which weighted sources have their shares."""
    by_source: list[list[Row]] = [[] for _ in sources]
    for row in rows:
        by_source[row.source].append(row)
    for number, source in enumerate(sources):
        mine = by_source[number]
        by_source[number] = _first(mine, source.limit or len(mine), "over its limit", tallies)
    weighted = [number for number, source in enumerate(sources) if source.weight]
    scale = min((len(by_source[n]) / sources[n].weight for n in weighted), default=0.0)
    for number in weighted:
        share = round(scale * sources[number].weight)
        by_source[number] = _first(by_source[number], share, "over its weight", tallies)
    return sorted((row for mine in by_source for row in mine), key=lambda row: row.id)


def _first(rows: Sequence[Row], num: int, reason: str, tallies: Sequence[Tally]) -> list[Row]:
    for row in rows[num:]:
        tallies[row.source].left_out[reason] += 1
    return list(rows[:num])
