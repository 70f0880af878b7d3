"""Finished measurements side by side: `scripts/compare.py RUN RUN ...`, each a run or evaluation folder."""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from slipstream.data.files import read_json
from slipstream.scripts.cli import BAD, fail

REPORT = "acceptance.json"


def reports(folder: Path) -> list[Path]:
    """Every acceptance.json of a run, or of one of its evaluation folders.

    Raises:
        ValueError: there is none.
    """
    found = (
        [folder / REPORT] if (folder / REPORT).is_file() else sorted(folder.glob(f"evaluation/*/{REPORT}"))
    )
    if not found:
        raise ValueError(f"{folder} holds no {REPORT}: run scripts/evaluate.py first")
    return found


def compare(folders: list[Path], console: Console) -> None:
    """Prints one line for each drafter of each measurement, and tau by category."""
    columns = ("tau", "95 %", "accept/draft", "tokens/s", "speed-up")
    table = Table("measurement", "drafter", *(Column(c, justify="right") for c in columns), "lossless")
    categories: dict[str, dict[str, float]] = {}
    for path in [path for folder in folders for path in reports(folder)]:
        content = read_json(path)
        for name, report in content.get("drafters", {"head": content}).items():
            label = f"{path.parent}"
            table.add_row(label, name, *_cells(report))
            for category, tau in report["acceptance_length_by_category"].items():
                categories.setdefault(category, {})[f"{label} {name}"] = tau
    console.print(table)
    names = list(dict.fromkeys(name for taus in categories.values() for name in taus))
    by_category = Table("category", *names, title="tau by category")
    for category, taus in sorted(categories.items()):
        by_category.add_row(category, *(f"{taus[n]:.3f}" if n in taus else "" for n in names))
    console.print(by_category)


def _cells(report: dict[str, Any]) -> list[str]:
    overall = report.get("overall")
    return [
        f"{report['acceptance_length']:.3f}",
        f"{overall['low']:.3f}-{overall['high']:.3f}" if overall else "",
        f"{report['acceptance_rate']:.1%}",
        f"{report['tokens_per_second']:,.1f}",
        f"{report['speedup']:.2f}x",
        {True: "yes", False: "NO", None: "sampled"}[report["lossless"]],
    ]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Acceptance of several runs side by side.")
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run_dir of a run, or an evaluation folder"
    )
    try:
        compare(parser.parse_args().runs, Console())
    except BAD as error:
        fail(error)


if __name__ == "__main__":
    main()
