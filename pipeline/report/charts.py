"""Line charts by matplotlib, as pictures inside the page."""

from __future__ import annotations

import base64
import io
import itertools
from typing import Any, List, Mapping, Sequence, Tuple

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure

COLOURS = ("#0a7d4f", "#c4453a", "#3566c0", "#b07a00", "#7a4fb0", "#808080")
INK = "#808080"  # readable on a light and on a dark page
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "charts",  # the same bytes each time
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
    ),
}
FEW = 20  # points of a line up to which each is a dot

Points = Sequence[Tuple[float, float]]


def line_chart(
    series: Mapping[str, Points],
    x_label: str,
    y_label: str,
    x_end: float = 1.0,
    diagonal: bool = False,
) -> Markup:
    """An `img` of an SVG with one line per series and a legend.

    series: name -> (x, y) points, y from 0 to 1; diagonal: add a dashed diagonal, for calibration.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 3.8), layout="constrained")
        axes = figure.subplots()
        if diagonal:
            axes.plot((0, 1), (0, 1), color=INK, alpha=0.5, linestyle="--", linewidth=1)
        for colour, (name, points) in zip(itertools.cycle(COLOURS), series.items()):
            marker = "o" if len(points) <= FEW else ""
            across, up = zip(*points) if points else ((), ())
            axes.plot(across, up, color=colour, label=name, marker=marker, markersize=4)
        axes.set(xlabel=x_label, ylabel=y_label, xlim=(0, x_end), ylim=(0, 1))
        figure.legend(loc="outside upper left", ncols=2 if len(series) < 5 else 1)
        svg = io.BytesIO()
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    source = address("svg+xml", svg.getvalue())
    return Markup('<img src="{}" alt="{}, {}">').format(source, y_label, x_label)


def address(kind: str, data: bytes) -> str:
    """The bytes of an image as an address, so that the page needs no other file."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"


def column(lines: Sequence[Mapping[str, Any]], x: str, y: str) -> List[Tuple[float, float]]:
    """Points of two columns of CSV lines, without lines that lack a number."""
    return [
        (float(line[x]), float(line[y]))
        for line in lines
        if not {None, ""} & {line.get(x), line.get(y)}
    ]
