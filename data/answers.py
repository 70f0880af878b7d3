"""The append-only log of regenerated answers, and of the jobs that were given up."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.data.backends.remote import Failure, Outcome
from slipstream.data.conversations import read_answers
from slipstream.data.files import append_jsonl, atomic_path, read_jsonl

ANSWERS_FILE, FAILED_FILE = "answers.jsonl", "failed.jsonl"


class AnswerLog:
    """Keyed by id: what is in it is never asked for or written again."""

    def __init__(self, folder: Path, *, limit: int) -> None:
        """Reads what an earlier run left; more than `limit` failures of this run stop it."""
        self.folder = folder
        self._answers, self._failed = folder / ANSWERS_FILE, folder / FAILED_FILE
        self._answers.touch()
        self._limit = limit
        self._failures: dict[str, dict[str, Any]] = {}
        if self._failed.exists():
            self._failures = {row["id"]: row for row in read_jsonl(self._failed) if row["is_final"]}
        self.done = {answer.id for answer in read_answers(self._answers)} | self._failures.keys()
        self.num_bytes = self._answers.stat().st_size

    def write(self, outcomes: Sequence[Outcome]) -> None:
        """Appends what is not there yet.

        Raises:
            ValueError: too many jobs failed.
        """
        rows = [row for row in outcomes if not isinstance(row, Failure) and row["id"] not in self.done]
        failed = [
            {"id": f.job.id, "prompt_id": f.job.prompt.id, "reason": f.reason, "is_final": f.is_final}
            for f in outcomes
            if isinstance(f, Failure) and f.job.id not in self.done
        ]
        if rows:
            append_jsonl(self._answers, rows)
            self.num_bytes = self._answers.stat().st_size
        if failed:
            append_jsonl(self._failed, failed)
            self._failures |= {str(row["id"]): row for row in failed}
        self.done |= {row["id"] for row in (*rows, *failed)}
        if sum(not row["is_final"] for row in self._failures.values()) > self._limit:
            raise ValueError(
                f"data.regenerate: the engine fails to answer ({self.reasons()}), more than "
                f"data.regenerate.max_failed_share allows: see to it and run the same command again to go on"
            )

    def close(self) -> None:
        """Leaves in the list of failures those that count."""
        if self._failures:
            with atomic_path(self._failed) as temporary:
                append_jsonl(temporary, self._failures.values())
        else:
            self._failed.unlink(missing_ok=True)

    def reasons(self) -> dict[str, int]:
        """Failures by reason."""
        return dict(Counter(str(row["reason"]) for row in self._failures.values()))

    def files(self) -> list[str]:
        """Names of the files there are."""
        return [file.name for file in (self._answers, self._failed) if file.exists()]
