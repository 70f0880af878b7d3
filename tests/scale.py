"""What the data stages cost for many rows: `python -m tests.scale ROWS FOLDER WORKERS`, a line of JSON.

Chats of four rounds with recorded answers, about 1,200 characters each, go through the stages
prompts, regenerated, tokens and vocab_map; a twentieth of them are copies or nearly so.
"""

import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

from slipstream.data import choosing, recorded, tokenize, vocab_map
from slipstream.data.config import PromptsConfig, TargetConfig, TokenizeConfig
from slipstream.data.target.resolve import resolve_target
from tests.tiny import make_tiny_target

WORDS = "where does the live what eat count from to tell me a story about red green blue cat dog fox"


def write_chats(path: Path, num: int) -> None:
    """Writes the rows; every twentieth repeats the one before, with another ending."""
    rng, words = random.Random(0), WORDS.split()
    with path.open("w") as stream:
        for i in range(num):
            if i % 20 or not i:
                turns = [" ".join(rng.choices(words, k=30)) for _ in range(8)]
            roles = ("user", "assistant") * 4
            ending = "" if i % 20 else " now"
            row = [{"role": r, "content": text + ending} for r, text in zip(roles, turns, strict=True)]
            stream.write(json.dumps({"messages": row}) + "\n")


def measure(num_rows: int, folder: Path, workers: int = 1) -> dict[str, float]:
    """CPU seconds of every stage, rows a CPU second, and the largest memory of all processes."""
    target = resolve_target(TargetConfig(name=str(make_tiny_target(folder / "target"))))
    source = folder / "chats.jsonl"
    write_chats(source, num_rows)
    prompts = PromptsConfig(paths=[str(source)], near_duplicates=0.8, min_chars=10)
    tokens = TokenizeConfig(workers=workers)
    stages: dict[str, Callable[[], object]] = {
        "prompts": lambda: choosing.run(prompts, folder / "prompts", with_answers=True),
        "regenerated": lambda: recorded.run(folder / "prompts", folder / "regenerated"),
        "tokens": lambda: tokenize.run(tokens, target, folder / "regenerated", folder / "tokens", 0.05),
        "vocab_map": lambda: vocab_map.run(200, target, folder / "tokens", folder / "vocab_map"),
    }
    seconds, wall = {}, time.monotonic()
    for name, run in stages.items():
        start = _cpu_seconds()
        run()
        seconds[name] = round(_cpu_seconds() - start, 2)
    own, child = (
        resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return {
        "rows": num_rows,
        **seconds,
        "wall": round(time.monotonic() - wall, 1),
        "rows_per_cpu_second": round(num_rows / sum(seconds.values()), 1),
        "megabytes": round(own + (workers * child if workers > 1 else 0)),
    }


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))))
