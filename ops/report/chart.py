"""Draw the pass-rate curve as a small picture for the asset page, which shows only Markdown."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from contracts.tasks import Split
from ops.report.history import Row

WIDTH, HEIGHT, EDGE = 520, 170, 34
SHOWN = 60
"""Number of iterations in the chart: the latest ones."""
SPLITS = ((Split.HELD_OUT, "#2268c9", "held-out"), (Split.GATE, "#c65a11", "gate"))
INK, LINE = "#7d8899", "#b6bec9"
"""Colors for light and dark pages."""


def pass_rate_picture(rows: Sequence[Row]) -> str:
    """Candidate pass rates by iteration as a data URI of a few KB; "" if nothing was evaluated."""
    shown = [row for row in rows if any(row[split.value] for split, _, _ in SPLITS)][-SHOWN:]
    if not shown:
        return ""
    parts = [label(EDGE - 6, _y(mark) + 4, f"{mark:.0%}", "end") + _rule(_y(mark)) for mark in (0.0, 0.5, 1.0)]
    for number, (split, color, name) in enumerate(SPLITS):
        places = [
            (_x(index, len(shown)), _y(row[split.value]["candidate"]["rate"]))
            for index, row in enumerate(shown)
            if row[split.value] and row[split.value]["candidate"]["rate"] is not None
        ]
        parts.append(polyline(places, color))
        parts.append(label(EDGE + 10 + 80 * number, 14, name, "start", color))
    for index in sorted({0, len(shown) - 1}):
        parts.append(label(_x(index, len(shown)), HEIGHT - 6, shown[index]["iteration"], "middle"))
    picture = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
        f' height="{HEIGHT}">{"".join(parts)}</svg>'
    )
    return "data:image/svg+xml;base64," + base64.b64encode(picture.encode()).decode()


def polyline(places: Sequence[tuple[float, float]], color: str) -> str:
    """SVG of a line with a dot at each place (x, y), in units of the picture."""
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in places)
    return f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>{dots}'


def label(x: float, y: float, text: str, anchor: str, color: str = INK) -> str:
    """SVG of a text. anchor: start, middle or end."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-family="sans-serif" font-size="11"'
        f' fill="{color}">{text}</text>'
    )


def _rule(y: float) -> str:
    return f'<line x1="{EDGE}" x2="{WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}" stroke="{LINE}" stroke-opacity="0.5"/>'


def _x(index: int, count: int) -> float:
    left, right = EDGE + 18, WIDTH - 24
    return (left + right) / 2 if count == 1 else left + (right - left) * index / (count - 1)


def _y(rate: float) -> float:
    return 22 + (HEIGHT - 46) * (1 - rate)
