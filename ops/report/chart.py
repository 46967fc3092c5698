"""Draw curves over iterations as small pictures for the asset page, which shows only Markdown."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from contracts.tasks import Split
from ops.report.history import Row

WIDTH, HEIGHT, EDGE = 520, 170, 34
SHOWN = 60
"""Number of iterations in the chart: the latest ones."""
SPLITS = ((Split.HELD_OUT, "#2268c9", "held-out"), (Split.GATE, "#c65a11", "gate"))
Curve = tuple[str, str, Sequence[float | None]]
"""Name, color, and a value for each iteration."""
INK, LINE = "#7d8899", "#b6bec9"
"""Colors for light and dark pages."""


def pass_rate_picture(rows: Sequence[Row]) -> str:
    """Candidate pass rates by iteration as a data URI of a few KB; "" if nothing was evaluated."""
    shown = [row for row in rows if any(row[split.value] for split, _, _ in SPLITS)]
    curves = [
        (name, color, [row[split.value]["candidate"]["rate"] if row[split.value] else None for row in shown])
        for split, color, name in SPLITS
    ]
    return picture(shown, curves, (0.0, 1.0), "{:.0%}")


def reward_picture(rows: Sequence[Row]) -> str:
    """Mean training reward by iteration; "" if nothing was graded."""
    shown = [row for row in rows if row["train"] and row["train"]["reward"] is not None]
    return _ranged(shown, "reward mean", [row["train"]["reward"] for row in shown])


def loss_picture(rows: Sequence[Row]) -> str:
    """Mean loss of the optimizer steps by iteration; "" if there was none."""
    shown = [row for row in rows if row["training"] and "loss" in row["training"]]
    return _ranged(shown, "loss", [row["training"]["loss"] for row in shown])


def _ranged(rows: Sequence[Row], name: str, values: Sequence[float]) -> str:
    """Picture of one curve between its extremes."""
    if not values:
        return ""
    low, high = min(values[-SHOWN:]), max(values[-SHOWN:])
    return picture(rows, [(name, SPLITS[0][1], values)], (low, high if high > low else low + 1.0), "{:.3g}")


def picture(rows: Sequence[Row], curves: Sequence[Curve], span: tuple[float, float], form: str) -> str:
    """Curves over the latest iterations, in their order. span: lowest and highest value. form: format of a value."""
    shown = rows[-SHOWN:]
    if not shown:
        return ""
    low, high = span
    parts = [
        label(EDGE - 6, _y(part) + 4, form.format(low + part * (high - low)), "end") + _rule(_y(part))
        for part in (0.0, 0.5, 1.0)
    ]
    for number, (name, color, values) in enumerate(curves):
        places = [
            (_x(index, len(shown)), _y((value - low) / (high - low)))
            for index, value in enumerate(values[-SHOWN:])
            if value is not None
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
