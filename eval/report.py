"""Shows an acceptance report on the terminal."""

from rich.console import Console
from rich.table import Column, Table

from slipstream.eval.acceptance import AcceptanceReport

MAX_MISMATCHES = 5
"""Ids shown of the prompts whose answers differ."""


def print_report(report: AcceptanceReport, console: Console) -> None:
    """Prints the numbers as a whole, for each draft position and for each category."""
    overview = {
        "acceptance length (tau, own token included)": f"{report.acceptance_length:.3f}",
        "accepted per round": f"{report.accepted_per_round:.3f}",
        "accepted of drafted": f"{report.acceptance_rate:.1%}",
        "prompts / rounds": f"{report.prompts:,} / {report.rounds:,}",
        "tokens/s": f"{report.tokens_per_second:,.1f}",
        "tokens/s without the head": f"{report.baseline_tokens_per_second:,.1f}",
        "speed-up": f"{report.speedup:.2f}x",
        "lossless": _lossless(report),
    }
    title = f"Acceptance at {report.num_draft_tokens} draft tokens"
    table = Table("", Column(justify="right"), title=title, show_header=False)
    for name, value in overview.items():
        table.add_row(name, value)
    console.print(table)

    positions = [str(position) for position in range(1, report.num_draft_tokens + 1)]
    table = Table("", *positions, title="Acceptance rate by draft position")
    table.add_row("of all rounds", *(f"{rate:.3f}" for rate in report.unconditional_K))
    table.add_row("of rounds that came so far", *(f"{rate:.3f}" for rate in report.conditional_K))
    console.print(table)

    if any(report.acceptance_length_by_category):
        table = Table("category", "tau", title="Acceptance length by category")
        for name, length in sorted(report.acceptance_length_by_category.items(), key=lambda pair: -pair[1]):
            table.add_row(name or "(none)", f"{length:.3f}")
        console.print(table)


def _lossless(report: AcceptanceReport) -> str:
    if report.lossless is None:
        return "not compared (sampled answers differ by chance; the verifier has its own test)"
    if report.lossless:
        return "yes"
    shown = ", ".join(report.mismatches[:MAX_MISMATCHES])
    more = ", ..." if len(report.mismatches) > MAX_MISMATCHES else ""
    return f"NO: {len(report.mismatches)} answers differ ({shown}{more})"
