"""Line charts as SVG text, which need no library in the page."""

from __future__ import annotations

from html import escape
from typing import Any, List, Mapping, Sequence, Tuple

import numpy as np
from markupsafe import Markup

WIDTH, HEIGHT = 560, 340  # of the drawing; the page scales it
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 12, 46
COLOURS = ("#0a7d4f", "#c4453a", "#3566c0", "#b07a00", "#7a4fb0", "#555555")

Points = Sequence[Tuple[float, float]]


def line_chart(
    series: Mapping[str, Points],
    x_label: str,
    y_label: str,
    x_range: Tuple[float, float],
    y_range: Tuple[float, float] = (0.0, 1.0),
    diagonal: bool = False,
) -> Markup:
    """An SVG element with one line per series and a legend; points outside the ranges are clipped to the frame.

    series: name -> (x, y) points, drawn in order; diagonal: add a thin diagonal, for calibration.
    """

    def place(x: float, y: float) -> Tuple[float, float]:
        across, up = np.interp(x, x_range, (LEFT, WIDTH - RIGHT)), np.interp(y, y_range, (HEIGHT - BOTTOM, TOP))
        return float(across), float(up)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_label)}, {escape(x_label)}">']
    parts += axes(x_range, y_range, place)
    if diagonal:
        (x0, y0), (x1, y1) = place(x_range[0], y_range[0]), place(x_range[1], y_range[1])
        parts.append(f'<line class="diagonal" x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"/>')
    for colour, points in zip(COLOURS, series.values()):
        path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(points) <= 20:
            dots = (place(x, y) for x, y in points)
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in dots]
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    rotated = f'transform="translate(14 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)"'
    parts.append(f'<text {rotated} text-anchor="middle">{escape(y_label)}</text></svg>')
    keys = (f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for colour, name in zip(COLOURS, series))
    # outside the SVG, so that a narrow screen wraps the legend
    return Markup("\n".join(parts) + f'<p class="legend">{"".join(keys)}</p>')


def axes(x_range: Tuple[float, float], y_range: Tuple[float, float], place) -> List[str]:
    """Grid lines and their numbers: five steps along each axis."""
    parts = []
    for step in range(6):
        x = x_range[0] + (x_range[1] - x_range[0]) * step / 5
        y = y_range[0] + (y_range[1] - y_range[0]) * step / 5
        (across, bottom), (left, up) = place(x, y_range[0]), place(x_range[0], y)
        parts.append(f'<line class="grid" x1="{across:.1f}" y1="{TOP}" x2="{across:.1f}" y2="{bottom:.1f}"/>')
        parts.append(f'<line class="grid" x1="{left:.1f}" y1="{up:.1f}" x2="{WIDTH - RIGHT}" y2="{up:.1f}"/>')
        parts.append(f'<text x="{across:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{x:g}</text>')
        parts.append(f'<text x="{left - 6:.1f}" y="{up + 4:.1f}" text-anchor="end">{y:.2g}</text>')
    return parts


def column(lines: Sequence[Mapping[str, Any]], x: str, y: str) -> List[Tuple[float, float]]:
    """Points of two columns of CSV lines, without lines that lack a number."""
    return [(float(line[x]), float(line[y])) for line in lines if not {None, ""} & {line.get(x), line.get(y)}]
