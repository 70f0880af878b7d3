"""`make bench`: cost of the training step, beside other trainers where their harness is at hand.

Every measurement is a process of its own; the contenders of a case take turns, and a figure is the
median of the rounds. Seconds are those of the process on the CPU, so other work on the machine
disturbs them little. Peers: point --peers (or SLIPSTREAM_PEERS) to a script that takes
`--peer NAME --hidden ...` and prints one line of JSON; without it the step is compared with the
plain implementation in tests/naive.py.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from slipstream.data.files import write_text

PEERS = ("speculators", "specforge")
OURS = [sys.executable, "-c", "from slipstream.scripts.bench_step import main; main()"]
BASE = {"hidden": 256, "heads": 4, "kv-heads": 2, "intermediate": 768, "vocab": 4000, "draft-vocab": 4000}
LARGE = {"hidden": 1024, "heads": 16, "kv-heads": 8, "intermediate": 3072, "vocab": 32000}
DEMO = {"hidden": 576, "heads": 9, "kv-heads": 3, "intermediate": 1536, "vocab": 49152, "seq-len": 1024}


@dataclass(frozen=True)
class Case:
    """One size; `ours` are the ways in which our step runs it."""

    section: str
    name: str
    sizes: dict[str, float]
    ours: dict[str, dict[str, Any]] = field(default_factory=lambda: {"slipstream": {}})
    has_rivals: bool = False


def cases(quick: bool) -> Iterator[Case]:
    """What is measured; `quick` keeps one small size of each kind."""
    frozen = {"slipstream": {}, "slipstream, head frozen": {"freeze-head": True}}
    sparse = {"slipstream, survival 0.8": {"survival": 0.8}}
    both = {**sparse, "slipstream, survival 0.8, head frozen": {"survival": 0.8, "freeze-head": True}}
    sizes: dict[str, dict[str, float]] = {"D=256 V=W=4000 T=512": {**BASE, "seq-len": 512}}
    if not quick:
        sizes |= {
            "D=256 V=W=4000 T=2048": {**BASE, "seq-len": 2048},
            "D=1024 V=32000 W=8000 T=1024": {**LARGE, "draft-vocab": 8000, "seq-len": 1024},
            "D=1024 V=W=32000 T=512": {**LARGE, "draft-vocab": 32000, "seq-len": 512},
        }
        sizes |= {f"D=576 V=49152 W={w} T=1024": {**DEMO, "draft-vocab": w} for w in (8192, 49152)}
    for name, size in sizes.items():
        yield Case("all rows", name, size, frozen, has_rivals=True)
        yield Case("half of the rows", name, {**size, "mask-frac": 0.5}, both, has_rivals=True)
    if not quick:
        part = {"slipstream": {}, **sparse}
        few = {**sizes["D=256 V=W=4000 T=2048"], "mask-frac": 0.4}
        yield Case("40 % of the rows", "D=256 V=W=4000 T=2048", few, part, has_rivals=True)
    total = 1024 if quick else 8192
    for length in (512, total) if quick else (512, 1024, 2048, 4096, 8192):
        documents = {"seq-len": length, "num-documents": total // length}
        yield Case("document length", f"{total // length} x {length} tokens", {**BASE, **documents})
    for depth in (1, 2) if quick else range(1, 9):
        yield Case("unroll steps", f"K={depth}", {**BASE, "seq-len": total // 4, "ttt": depth})
    for share in (1.0, 0.1) if quick else (1.0, 0.75, 0.5, 0.25, 0.1):
        yield Case("supervised share", f"{share:.0%}", {**BASE, "seq-len": total // 4, "mask-frac": share})
    for width in (1000, 8000) if quick else (1000, 4000, 16000, 64000):
        vocab = {"vocab": width, "draft-vocab": width, "seq-len": total // 4}
        yield Case("draft vocabulary", f"W={width}", {**BASE, **vocab})


def flags(sizes: dict[str, Any]) -> list[str]:
    """Command-line words."""
    words = []
    for name, value in sizes.items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


def contenders(case: Case, peers: str, quick: bool) -> dict[str, list[str]]:
    """Command of everyone who runs a case."""
    size = flags(case.sizes)
    commands = {name: [*OURS, *size, *flags(extra)] for name, extra in case.ours.items()}
    if not case.has_rivals:
        return commands
    if peers:
        once = ["--steps", "1", "--threads", "1"]
        for peer in PEERS:
            commands[peer] = [sys.executable, peers, "--peer", peer, *size, *once]
    if quick or (not peers and case.sizes["hidden"] == BASE["hidden"]):
        commands["naive"] = [*OURS, *size, "--naive"]
    return commands


def measure(command: Sequence[str]) -> dict[str, float]:
    """Runs one process; its figures under our names.

    Raises:
        ValueError: it failed; with the end of what it said.
    """
    place = os.pathsep.join([str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")])
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": place}
    done = subprocess.run(command, env={**os.environ, **threads}, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise ValueError(f"{' '.join(command[:4])} failed: {done.stderr.strip()[-300:]}")
    found: dict[str, float] = json.loads(lines[-1])
    if "cpu_s" not in found:
        found = {
            "cpu_s": found["cpu_s_min"],
            "wall_s": found["s_min"],
            "step_mib": found["step_mem_mb"],
            "state_mib": 12 * found["trainable_params"] / 2**20,
        }
    return found


def run(case: Case, commands: dict[str, list[str]], num_rounds: int) -> list[dict[str, Any]]:
    """Medians of each contender, who take turns."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for _ in range(num_rounds):
        for name, command in commands.items():
            found[name].append(measure(command))
    tokens = case.sizes["seq-len"] * case.sizes.get("num-documents", 1)
    rows: list[dict[str, Any]] = []
    for name, rounds in found.items():
        row: dict[str, Any] = {key: statistics.median(x[key] for x in rounds) for key in rounds[0]}
        row |= {"tokens_per_cpu_s": tokens / row["cpu_s"], "tokens_per_wall_s": tokens / row["wall_s"]}
        if "flops" in row:
            row["matmul_share"] = row["flops"] / row["cpu_s"] / row["matmul_rate"]
        rows.append({"section": case.section, "case": case.name, "contender": name, **row})
    rivals = [row for row in rows if not row["contender"].startswith("slipstream")]
    for row in rows[: len(case.ours)] if rivals else []:
        row["speed_ratio"] = min(x["cpu_s"] for x in rivals) / row["cpu_s"]
        row["memory_ratio"] = row["step_mib"] / min(x["step_mib"] for x in rivals)
    return rows


COLUMNS = {
    "CPU s": ("cpu_s", "{:.2f}"),
    "tokens / CPU s": ("tokens_per_cpu_s", "{:.0f}"),
    "tokens / s (wall)": ("tokens_per_wall_s", "{:.0f}"),
    "step MiB": ("step_mib", "{:.0f}"),
    "of it gradients, Adam": ("state_mib", "{:.0f}"),
    "x the fastest rival": ("speed_ratio", "{:.2f}"),
    "of the leanest rival": ("memory_ratio", "{:.0%}"),
    "of the matmul rate": ("matmul_share", "{:.0%}"),
}


def cells(row: dict[str, Any]) -> list[str]:
    """A line of the table."""
    return [style.format(row[key]) if key in row else "" for key, style in COLUMNS.values()]


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The tables as text."""
    lines = []
    for section in dict.fromkeys(row["section"] for row in rows):
        lines += ["", f"### {section}", "", "| | | " + " | ".join(COLUMNS) + " |"]
        lines += ["|---|---|" + "---|" * len(COLUMNS)]
        for row in (row for row in rows if row["section"] == section):
            lines.append(f"| {row['case']} | {row['contender']} | " + " | ".join(cells(row)) + " |")
    return "\n".join([*lines, ""])


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The tables on the terminal."""
    for section in dict.fromkeys(row["section"] for row in rows):
        table = Table("size", "step", *COLUMNS, title=section)
        for row in (row for row in rows if row["section"] == section):
            table.add_row(row["case"], row["contender"], *cells(row))
        Console(width=150).print(table)


def main() -> None:
    """Measures, prints, writes bench.json and bench.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, one round: does it run?")
    parser.add_argument("--rounds", type=int, default=0, help="default 5, with --quick 1")
    parser.add_argument("--section", nargs="*", default=[], help="only these tables")
    parser.add_argument("--peers", default=os.environ.get("SLIPSTREAM_PEERS", ""), help="their harness")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder of the results")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    chosen = [c for c in cases(options.quick) if not options.section or c.section in options.section]
    if not chosen:
        parser.error(f"no such table; known: {sorted({c.section for c in cases(options.quick)})}")
    try:
        for case in track(chosen, "measuring"):
            commands = contenders(case, options.peers, options.quick)
            rows += run(case, commands, options.rounds or (1 if options.quick else 5))
            write_text(options.out / "bench.json", json.dumps(rows, indent=1))
            write_text(options.out / "bench.md", markdown(rows))
    except ValueError as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    show(rows)
    print(f"written to {options.out}/bench.json and bench.md")


if __name__ == "__main__":
    main()
