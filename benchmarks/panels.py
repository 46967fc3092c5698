"""A grid of small curves as one SVG file: a column for each algorithm, a row for each measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ops.report.chart import INK, LINE, label, polyline

WIDTH, HEIGHT, LEFT, TOP, GAP = 150, 120, 46, 34, 14
RUN, CONTROL = "#2268c9", "#c65a11"


@dataclass(frozen=True)
class Panel:
    """Curves of one algorithm by one measure: rates from 0 to 1, the base policy's first."""

    runs: Sequence[Sequence[float]]
    """One curve a seed."""
    controls: Sequence[Sequence[float]]


def draw_panels(panels: Mapping[str, Mapping[str, Panel]]) -> str:
    """SVG document. panels: column -> row -> curves. All rows of a column have the same names."""
    rows = list(next(iter(panels.values())))
    width, height = LEFT + len(panels) * (WIDTH + GAP), TOP + len(rows) * (HEIGHT + GAP) + 20
    parts = [label(LEFT, 14, "trained", "start", RUN), label(LEFT + 60, 14, "control", "start", CONTROL)]
    parts.append(label(LEFT + 130, 14, "one line a seed; x: iterations; y: held-out tasks solved", "start"))
    for column, (name, measures) in enumerate(panels.items()):
        left = LEFT + column * (WIDTH + GAP)
        parts.append(label(left + WIDTH / 2, TOP - 4, name, "middle"))
        for row, measure in enumerate(rows):
            parts.append(_panel(measures[measure], left, TOP + row * (HEIGHT + GAP)))
            if column == 0:
                parts.append(_scale(measure, TOP + row * (HEIGHT + GAP)))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f'<rect width="{width}" height="{height}" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _panel(panel: Panel, left: float, top: float) -> str:
    frame = (
        f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="{LINE}"'
        ' stroke-opacity="0.6"/>'
    )
    curves = [
        polyline([_place(index, len(curve), rate, left, top) for index, rate in enumerate(curve)], color)
        for color, found in ((CONTROL, panel.controls), (RUN, panel.runs))
        for curve in found
    ]
    return frame + "".join(curves)


def _place(index: int, count: int, rate: float, left: float, top: float) -> tuple[float, float]:
    inner = WIDTH - 16
    return left + 8 + (inner * index / (count - 1) if count > 1 else inner / 2), top + HEIGHT * (1 - rate)


def _scale(name: str, top: float) -> str:
    marks = "".join(label(LEFT - 6, top + HEIGHT * (1 - rate) + 4, f"{rate:.0%}", "end") for rate in (0.0, 0.5, 1.0))
    turned = f'transform="rotate(-90 10 {top + HEIGHT / 2})"'
    return marks + label(10, top + HEIGHT / 2, name, "middle", INK).replace("<text ", f"<text {turned} ", 1)
