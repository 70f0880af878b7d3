"""What a serving engine is asked to decode, and what it says; passed as JSON between two processes.

The engine's side runs in the engine's own environment, so nothing here needs more than Python.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULT, STATES = "result.json", "states.safetensors"
ROOM = 64
"""Positions behind the longest answer, so that its last round is drafted in full."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineJob:
    """Prompts that one engine decodes greedily, one after the other."""

    out: str
    """Folder for the result."""
    draft: str
    """Exported head; empty: without speculation."""
    target: str
    """Empty: the export names its target (speculators form)."""
    prompts: Sequence[Sequence[int]]
    chats: Sequence[Sequence[dict[str, str]]] = ()
    """The chat of each prompt, which the engine's tokenizer renders for comparison."""
    num_draft_tokens: int
    max_new_tokens: int
    stop_ids: Sequence[int]
    method: str = "eagle3"
    """vLLM's name of the way to draft."""
    num_traced: int = 0
    """Of so many prompts the captured states and the output of fc are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineAnswer:
    """One decoded prompt."""

    token_ids: Sequence[int]
    drafts: Sequence[Sequence[int]]
    """Proposed tokens of each round; engines may draft once more than they verify."""
    rendered: Sequence[int] = ()
    """The prompt as the engine's tokenizer renders its chat."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineResult:
    """All answers, and what the engine counted."""

    version: str
    answers: Sequence[EngineAnswer]
    num_rounds: int
    accepted_K: Sequence[int]
    """Rounds that accepted the draft at each position."""

    def write(self, job: EngineJob) -> None:
        """Hands the result over."""
        text = json.dumps(dataclasses.asdict(self))
        (Path(job.out) / RESULT).write_text(text, encoding="utf-8")


def rendered(tokenizer: Any, chat: Sequence[dict[str, str]]) -> list[int]:
    """Token ids of a chat up to the next answer; none without a chat."""
    if not chat:
        return []
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    token_ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return token_ids


def write_jobs(path: Path, jobs: Sequence[EngineJob]) -> None:
    """Writes what `read_jobs` reads."""
    path.write_text(json.dumps([dataclasses.asdict(job) for job in jobs]), encoding="utf-8")


def read_jobs(path: Path) -> list[EngineJob]:
    """Jobs for one process, in order."""
    return [EngineJob(**job) for job in json.loads(path.read_text(encoding="utf-8"))]


def read_result(job: EngineJob) -> EngineResult:
    """What the engine wrote for a job."""
    found = json.loads((Path(job.out) / RESULT).read_text(encoding="utf-8"))
    answers = [EngineAnswer(**answer) for answer in found.pop("answers")]
    return EngineResult(answers=answers, **found)
