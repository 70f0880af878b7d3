"""Shows an acceptance report on the terminal."""

from rich.console import Console
from rich.table import Table

from slipstream.eval.acceptance import AcceptanceReport

MAX_MISMATCHES = 5
"""Ids shown of the prompts whose answers differ."""


def print_report(report: AcceptanceReport, console: Console) -> None:
    """Prints the numbers as a whole, for each draft position and for each category."""
    console.print(overview_table(report))
    console.print(position_table(report))
    if any(report.acceptance_length_by_category):
        console.print(category_table(report))


def overview_table(report: AcceptanceReport) -> Table:
    """One number a line."""
    table = Table(title=f"Acceptance at {report.num_draft_tokens} draft tokens", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    rows = {
        "acceptance length (tau, own token included)": f"{report.acceptance_length:.3f}",
        "accepted per round": f"{report.accepted_per_round:.3f}",
        "accepted of drafted": f"{report.acceptance_rate:.1%}",
        "prompts / rounds": f"{report.prompts:,} / {report.rounds:,}",
        "tokens/s": f"{report.tokens_per_second:,.1f}",
        "tokens/s without the head": f"{report.baseline_tokens_per_second:,.1f}",
        "speed-up": f"{report.speedup:.2f}x",
        "lossless": _lossless(report),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _lossless(report: AcceptanceReport) -> str:
    if report.lossless is None:
        return f"not compared ({report.lossless_note})"
    if report.lossless:
        return "yes"
    shown = ", ".join(report.mismatches[:MAX_MISMATCHES])
    more = ", ..." if len(report.mismatches) > MAX_MISMATCHES else ""
    return f"NO: {len(report.mismatches)} answers differ ({shown}{more})"


def position_table(report: AcceptanceReport) -> Table:
    """Both kinds of rate for each draft position."""
    table = Table(title="Acceptance rate by draft position")
    table.add_column("")
    for position in range(report.num_draft_tokens):
        table.add_column(str(position + 1), justify="right")
    table.add_row("of all rounds", *(f"{rate:.3f}" for rate in report.unconditional_K))
    table.add_row("of rounds that came so far", *(f"{rate:.3f}" for rate in report.conditional_K))
    return table


def category_table(report: AcceptanceReport) -> Table:
    """Acceptance length for each category of prompts."""
    table = Table("category", title="Acceptance length by category")
    table.add_column("tau", justify="right")
    for name, length in sorted(report.acceptance_length_by_category.items(), key=lambda pair: -pair[1]):
        table.add_row(name or "(none)", f"{length:.3f}")
    return table
