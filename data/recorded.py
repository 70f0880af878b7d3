"""The `regenerated` stage without a target: answers that the prompts' files hold already."""

import json
from pathlib import Path
from typing import Any

from slipstream.data.answers import ANSWERS_FILE
from slipstream.data.config import RECORDED
from slipstream.data.conversations import PROMPTS_FILE
from slipstream.data.files import Stage, atomic_path, index_jsonl, stage_fingerprint
from slipstream.data.progress import say


def run(prompts_folder: Path, folder: Path) -> None:
    """Copies the chats of `prompts_folder` to `folder`, row by row."""
    settings = {"prompts": stage_fingerprint(prompts_folder), "backend": RECORDED}
    stage = Stage(folder, "regenerated", settings)
    if stage.is_complete:
        return
    say(
        "warning: data.regenerate.backend=recorded trains on answers that the target did not write; a head "
        "drafts best what it has seen the target write: use hf unless these are the target's own greedy logs"
    )
    stage.begin()
    num_answers = 0
    with atomic_path(folder / ANSWERS_FILE) as temporary, temporary.open("wb") as stream:
        for row, _ in index_jsonl(prompts_folder / PROMPTS_FILE, _answer_row):
            stream.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            num_answers += 1
    stage.complete([ANSWERS_FILE], answers=num_answers)
    say(f"regenerated  {num_answers:,} recorded answers")


def _answer_row(prompt: Any) -> dict[str, Any]:
    return {
        "id": f"{prompt['id']}-0",
        "prompt_id": prompt["id"],
        "category": prompt["category"],
        "messages": prompt["messages"],
        "tools": prompt.get("tools", []),
        "turns": [],
    }
