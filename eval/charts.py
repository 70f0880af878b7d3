"""Small charts as SVG text, and the page they stand on: it needs neither network nor script."""

import math
from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#2f6fdb", "#d9692a", "#2a9d63", "#9a4fc4", "#b8912b", "#c23b5a", "#3aa6b9", "#6b7280")
WIDTH, ROW, LEFT, RIGHT, TOP = 760, 26, 210, 130, 10
HEIGHT, HEAD, BOTTOM, MARGIN = 310, 26, 46, 56
NUM_TICKS = 4
MAX_MARKED = 16
"""Lines of more points are drawn without marks, and the axis with ticks at round steps."""
STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --paper: #fff; --soft: #eef1f5; --line: #c9d0da; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #dfe5ee; --paper: #14181f; --soft: #222936; --line: #445; } }
body { font: 15px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 860px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
td, th { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right; }
td:first-child, th:first-child { text-align: left; }
svg { width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
svg .interval { stroke: var(--ink); stroke-width: 2; } svg .grid { stroke: var(--line); stroke-width: .5; }
svg .axis { opacity: .7; }
.sample { background: var(--soft); padding: .8rem; border-radius: 6px; white-space: pre-wrap; }
.drafted { background: #8fd3a8; color: #10301c; border-radius: 2px; }
.own { background: #f3cf8a; color: #3a2a06; border-radius: 2px; }
.note { opacity: .75; }
"""


def document(title: str, intro: str, sections: Mapping[str, str]) -> str:
    """A whole page; `sections` are heading -> HTML."""
    body = "".join(f"<h2>{escape(name)}</h2>{content}" for name, content in sections.items())
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1><p>{intro}</p>{body}</body></html>\n"
    )


def bars(rows: Sequence[tuple[str, float, float, float]], *, start: float = 0.0) -> str:
    """Horizontal bars with their intervals: (label, value, low, high) from the top down."""
    end = max([high for *_, high in rows] + [start + 1e-9])
    scale = (WIDTH - LEFT - RIGHT) / (end - start)

    def at(value: float) -> float:
        return LEFT + (max(value, start) - start) * scale

    parts = []
    for i, (label, value, low, high) in enumerate(rows):
        y = TOP + i * ROW
        parts.append(f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(label)}</text>')
        parts.append(
            f'<rect x="{LEFT}" y="{y + 4}" width="{at(value) - LEFT:.1f}" height="14" rx="2" '
            f'fill="{COLOURS[i % len(COLOURS)]}"/>'
        )
        if high > low:
            parts.append(f'<path d="M{at(low):.1f} {y + 11}H{at(high):.1f}" class="interval"/>')
        shown = f"{value:.3f}" + (f" ({low:.2f}-{high:.2f})" if high > low else "")
        parts.append(f'<text x="{at(max(high, value)) + 6:.1f}" y="{y + 15}">{shown}</text>')
    return _svg(parts, TOP * 2 + len(rows) * ROW)


def lines(series: Mapping[str, Sequence[tuple[float, float]]], *, x: str, y: str, start: float = 0.0) -> str:
    """Lines with points, one for each name; `x` and `y` name the axes, that of `y` begins at `start`."""
    points = [point for line in series.values() for point in line]
    x_low, x_high = min(p[0] for p in points), max(p[0] for p in points)
    y_low, y_high = min(start, *(p[1] for p in points)), max(p[1] for p in points)
    wide, high = WIDTH - MARGIN - LEFT, HEIGHT - BOTTOM - HEAD

    def place(point: tuple[float, float]) -> tuple[float, float]:
        return (
            MARGIN + (point[0] - x_low) / max(x_high - x_low, 1e-9) * wide,
            HEAD + high - (point[1] - y_low) / max(y_high - y_low, 1e-9) * high,
        )

    parts = []
    for i in range(NUM_TICKS + 1):
        value = y_low + (y_high - y_low) * i / NUM_TICKS
        at_y = place((x_low, value))[1]
        parts.append(f'<path d="M{MARGIN} {at_y:.1f}h{wide}" class="grid"/>')
        parts.append(f'<text x="{MARGIN - 6}" y="{at_y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for value in _x_ticks(sorted({point[0] for point in points})):
        at_x = place((value, y_low))[0]
        parts.append(f'<text x="{at_x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value:g}</text>')
    for i, (name, line) in enumerate(series.items()):
        colour, at = COLOURS[i % len(COLOURS)], [place(point) for point in line]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in at)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        marked = at if len(at) <= MAX_MARKED else []
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in marked]
        label_y = HEAD + 14 + i * 18
        parts.append(
            f'<rect x="{WIDTH - LEFT + 14}" y="{label_y - 9}" width="10" height="10" fill="{colour}"/>'
        )
        parts.append(f'<text x="{WIDTH - LEFT + 30}" y="{label_y}">{escape(name)}</text>')
    middle = MARGIN + wide / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x)}</text>')
    parts.append(f'<text x="{MARGIN - 40}" y="{HEAD - 10}" class="axis">{escape(y)}</text>')
    return _svg(parts, HEIGHT)


def _x_ticks(values: Sequence[float]) -> Sequence[float]:
    """Where the axis is marked.

    >>> _x_ticks([1, 2, 5]), _x_ticks(range(10, 1000, 10))
    ([1, 2, 5], [250.0, 500.0, 750.0])
    """
    if len(values) <= MAX_MARKED:
        return values
    rough = (values[-1] - values[0]) / NUM_TICKS
    step = 10 ** math.floor(math.log10(rough))
    step *= min(factor for factor in (1, 2.5, 5, 10) if factor * step >= rough)
    return [step * i for i in range(math.ceil(values[0] / step), math.floor(values[-1] / step) + 1)]


def _svg(parts: Sequence[str], height: int) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg>'
