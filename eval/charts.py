"""Small charts as SVG text, for a page that needs neither network nor script."""

from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#2f6fdb", "#d9692a", "#2a9d63", "#9a4fc4", "#b8912b", "#c23b5a", "#3aa6b9", "#6b7280")
WIDTH, ROW, LEFT, RIGHT, TOP = 760, 26, 210, 130, 10
HEIGHT, HEAD, BOTTOM, MARGIN = 310, 26, 46, 56
NUM_TICKS = 4


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


def lines(series: Mapping[str, Sequence[tuple[float, float]]], *, x: str, y: str) -> str:
    """Lines with points, one for each name; `x` and `y` name the axes."""
    points = [point for line in series.values() for point in line]
    x_low, x_high = min(p[0] for p in points), max(p[0] for p in points)
    y_low, y_high = min(0.0, *(p[1] for p in points)), max(p[1] for p in points)
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
    for value in sorted({point[0] for point in points}):
        at_x = place((value, y_low))[0]
        parts.append(f'<text x="{at_x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value:g}</text>')
    for i, (name, line) in enumerate(series.items()):
        colour, at = COLOURS[i % len(COLOURS)], [place(point) for point in line]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in at)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in at]
        label_y = HEAD + 14 + i * 18
        parts.append(
            f'<rect x="{WIDTH - LEFT + 14}" y="{label_y - 9}" width="10" height="10" fill="{colour}"/>'
        )
        parts.append(f'<text x="{WIDTH - LEFT + 30}" y="{label_y}">{escape(name)}</text>')
    middle = MARGIN + wide / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x)}</text>')
    parts.append(f'<text x="{MARGIN - 40}" y="{HEAD - 10}" class="axis">{escape(y)}</text>')
    return _svg(parts, HEIGHT)


def _svg(parts: Sequence[str], height: int) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg>'
