"""report.html: the whole measurement on one page that needs no network."""

from collections.abc import Mapping, Sequence
from html import escape

from transformers import PreTrainedTokenizerFast

from slipstream.eval.breakdown import Tau
from slipstream.eval.charts import bars, document, lines
from slipstream.eval.comparison import Comparison
from slipstream.eval.drafters.registry import short_name
from slipstream.eval.player import PlayedPrompt, Turn

NUM_SAMPLES = 3
"""Answers shown in colour."""


def page(
    comparison: Comparison,
    *,
    title: str,
    tokenizer: PreTrainedTokenizerFast,
    extra: Mapping[str, str] | None = None,
) -> str:
    """The page as text; `extra` holds further sections, heading -> HTML."""
    breakdowns = comparison.breakdowns
    first = next(iter(breakdowns.values()))
    sections = {
        "Ways to draft": _table(comparison)
        + bars(
            [("autoregressive", 1.0, 1.0, 1.0)]
            + [_bar(short_name(n), b.overall) for n, b in breakdowns.items()]
        ),
        "Acceptance by depth": "<p class=note>Share of the rounds that came so far whose next draft was "
        "accepted.</p>" + _by_depth(comparison),
        "tau by suite": _cuts({name: b.by_suite for name, b in breakdowns.items()}),
        "tau by category": _cuts({name: b.by_category for name, b in breakdowns.items()}),
        "tau by length of the prompt": _cuts({name: b.by_context for name, b in breakdowns.items()}),
        "tau by position in the answer": _cuts({name: b.by_position for name, b in breakdowns.items()}),
        **(extra or {}),
        "What was drafted": _samples(comparison.played, next(iter(breakdowns)), tokenizer),
    }
    intro = (
        f"{comparison.first.prompts:,} prompts, {first.overall.rounds:,} rounds of the first drafter. tau is "
        f"the mean number of tokens a verification round yields, the target's own included; intervals are "
        f"95 % over prompts."
    )
    return document(title, intro, sections)


def _bar(label: str, tau: Tau) -> tuple[str, float, float, float]:
    return (label, tau.tau, tau.low, tau.high)


def _table(comparison: Comparison) -> str:
    head = ("drafter", "tau", "drafted a round", "tokens/s", "speed-up", "lossless")
    plain = f"{comparison.first.baseline_tokens_per_second:,.1f}"
    rows = [("autoregressive", "1.000", "0", plain, "1.00x", "")]
    for name, report in comparison.reports.items():
        lossless = {True: "yes", False: f"no ({len(report.mismatches)})", None: "sampled"}[report.lossless]
        if report.near_ties:
            lossless += f", {report.near_ties} near-ties"
        rows.append(
            (
                short_name(name),
                f"{report.acceptance_length:.3f}",
                f"{report.drafted / max(report.rounds, 1):.1f}",
                f"{report.tokens_per_second:,.1f}",
                f"{report.speedup:.2f}x",
                lossless,
            )
        )
    return html_table(head, rows)


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _by_depth(comparison: Comparison) -> str:
    return lines(
        {
            short_name(name): [(k, rate) for k, rate in enumerate(report.conditional_K, 1)]
            for name, report in comparison.reports.items()
        },
        x="draft position",
        y="acceptance",
    )


def _cuts(cuts: Mapping[str, Mapping[str, Tau]]) -> str:
    """Bars for one drafter, a table for several."""
    if len(cuts) == 1:
        return bars([_bar(label, tau) for label, tau in next(iter(cuts.values())).items()], start=1.0)
    labels = list(dict.fromkeys(label for cut in cuts.values() for label in cut))
    rows = [
        (label, *(f"{c[label].tau:.3f} ({c[label].low:.2f}-{c[label].high:.2f})" for c in cuts.values()))
        for label in labels
        if all(label in cut for cut in cuts.values())
    ]
    return html_table(("", *map(short_name, cuts)), rows)


def _samples(played: Sequence[PlayedPrompt], name: str, tokenizer: PreTrainedTokenizerFast) -> str:
    legend = (
        '<p class=note><span class="drafted">drafted and accepted</span> '
        '<span class="own">the target&#39;s own</span>, by ' + escape(name) + "</p>"
    )
    by_category: dict[str, PlayedPrompt] = {}
    for prompt in played:
        by_category.setdefault(prompt.category, prompt)
    shown = list(by_category.values())[:NUM_SAMPLES]
    texts = [
        f'<div class="sample">{_coloured(prompt.answers[name][0], tokenizer)}</div><p class=note>'
        f"{escape(prompt.category)}</p>"
        for prompt in shown
    ]
    return legend + "".join(texts)


def _coloured(turn: Turn, tokenizer: PreTrainedTokenizerFast) -> str:
    """The answer, each token in the colour of where it came from."""
    kinds = ["own"]
    for r in turn.rounds:
        kinds += ["drafted"] * r.accepted + ["own"]
    parts, before = [], ""
    for i, kind in enumerate(kinds[: len(turn.token_ids)]):
        text = str(tokenizer.decode(list(turn.token_ids[: i + 1]), skip_special_tokens=False))
        new, before = text[len(before) :], text
        parts.append(f'<span class="{kind}">{escape(new)}</span>')
    return "".join(parts)
