"""Shows a measurement on the terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Column, Table

from slipstream.eval.acceptance import AcceptanceReport
from slipstream.eval.breakdown import Tau
from slipstream.eval.comparison import Comparison
from slipstream.eval.drafters.registry import short_name
from slipstream.eval.lossless import Proof
from slipstream.eval.page import html_table

MAX_MISMATCHES = 5
"""Ids shown of the prompts whose answers differ."""


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Prints one drafter in full, or several side by side and by suite."""
    if len(comparison.reports) == 1:
        print_report(comparison.first, console)
    else:
        console.print(_side_by_side(comparison))
    breakdowns = comparison.breakdowns
    for cut, taus in {
        "suite": {name: b.by_suite for name, b in breakdowns.items()},
        "category": {name: b.by_category for name, b in breakdowns.items()},
    }.items():
        labels = next(iter(taus.values()))
        if len(labels) > 1:
            title = f"tau by {cut}, with its 95 % interval"
            table = Table(cut, "prompts", *map(short_name, taus), title=title)
            for label, first in labels.items():
                shown = (_interval(by_label[label]) for by_label in taus.values())
                table.add_row(label, str(first.prompts), *shown)
            console.print(table)


def _side_by_side(comparison: Comparison) -> Table:
    first = comparison.first
    title = f"{first.prompts:,} prompts, {first.new_tokens:,} tokens by each"
    columns = ("tau (95 %)", "drafted", "tok/s", "speed-up", "overhead")
    table = Table("drafter", *(Column(c, justify="right") for c in columns), "lossless", title=title)
    plain = [f"{first.baseline_tokens_per_second:,.1f}", "1.00x", "", ""]
    table.add_row("autoregressive", "1.000", "0.0", *plain)
    for name, report in comparison.reports.items():
        table.add_row(
            short_name(name),
            _interval(comparison.breakdowns[name].overall),
            f"{report.drafted / max(report.rounds, 1):.1f}",
            f"{report.tokens_per_second:,.1f}",
            f"{report.speedup:.2f}x",
            f"{comparison.overheads[name]:.1%}",
            "sampled" if report.lossless is None else _lossless(report),
        )
    return table


def _interval(tau: Tau) -> str:
    return f"{tau.tau:.3f} ({tau.low:.2f}-{tau.high:.2f})"


def print_report(report: AcceptanceReport, console: Console) -> None:
    """Prints the numbers as a whole and for each draft position."""
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


def _lossless(report: AcceptanceReport) -> str:
    if report.lossless is None:
        return "not compared (sampled answers differ by chance: see eval.lossless)"
    if report.lossless:
        return f"yes, but for {report.near_ties} near-ties" if report.near_ties else "yes"
    shown = ", ".join(report.mismatches[:MAX_MISMATCHES])
    more = ", ..." if len(report.mismatches) > MAX_MISMATCHES else ""
    return f"NO: {len(report.mismatches)} answers differ ({shown}{more})"


def proof_rows(proofs: Sequence[Proof], console: Console) -> str:
    """Prints the tests of sampled answers; returns the same table as HTML."""
    head = ("drafter", "samples", "accepted drafts", "looks", "smallest p", "largest TV / band", "lossless")
    rows = []
    for proof in proofs:
        widest = max(proof.looks, key=lambda look: look.total_variation / max(look.band, 1e-9))
        rows.append(
            (
                proof.drafter,
                str(proof.samples),
                str(proof.accepted_drafts),
                str(len(proof.looks)),
                f"{min(look.p_value for look in proof.looks):.3g}",
                f"{widest.total_variation:.3f} / {widest.band:.3f}",
                "yes" if proof.lossless else "NO",
            )
        )
    table = Table(*head, title="Sampled answers against plain sampling")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    return html_table(head, rows)
