"""Draw the charts of the report by matplotlib, as SVG."""

# pandas has no types. A type checker guesses them from its source, mostly wrongly.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportAssignmentType=false
# pyright: reportIndexIssue=false

from __future__ import annotations

import base64
import io
import itertools
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import matplotlib
import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure

from pipeline.evaluate import metrics
from pipeline.evaluate.matchers import BOUND, OURS, RATIO_TEST, SHIPPED
from pipeline.evaluate.metrics import KEY

# Names of matchers in tables and charts. Further matchers have the names that the user gave.
TITLES = {
    OURS: "SuperGlue",
    RATIO_TEST: "ratio test, mutual",
    "mutual_nn": "mutual NN",
    "nn": "NN",
    BOUND: "true matches (bound)",
    SHIPPED: "shipped weights",
}
KINDS = {False: "as detected", True: "refined"}  # Words for the two kinds of matches
# One color for each matcher of `TITLES` on every chart, then those of further matchers. All of
# them are readable on a light and on a dark page.
COLORS = ("#10a070", "#e0524a", "#4a86e8", "#c08a1e", "#8c8c8c", "#2aa5b5", "#a8745a")
FURTHER_COLORS = ("#9a6fe0", "#d264a8", "#7d9a2d", "#5c73a8")
INK = "#888888"
STYLE: Any = {
    "svg.fonttype": "none",  # Text stays text, which a browser can find and copy
    "svg.hashsalt": "charts",  # Without it the names in the file are random
    "axes.grid": True,
    "grid.alpha": 0.25,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
    ),
}
Chart = Tuple[Markup, str]  # A chart as an HTML element, and its caption


def get_title(matcher: str) -> str:
    """Return the name of a matcher in tables and charts."""
    return TITLES.get(matcher, matcher)


def assign_colors(matchers: Sequence[str]) -> Dict[str, str]:
    """Return the color of each matcher."""
    # A matcher of TITLES keeps its color whether or not the others are shown.
    fixed_colors = dict(zip(TITLES, COLORS))
    further_colors = itertools.cycle(FURTHER_COLORS)
    return {name: fixed_colors.get(name) or next(further_colors) for name in matchers}


def draw_line_chart(
    lines: Mapping[str, pd.Series],
    colors: Mapping[str, str],
    x_label: str,
    y_label: str,
    diagonal: bool = False,
    points: Optional[Mapping[str, Tuple[float, float]]] = None,
) -> bytes:
    """Draw a line for each matcher, and return the chart as SVG.

    Args:
        lines: the values of y, from 0 to 1, with x as their index, by matcher. An index of words
            has them at the positions 0, 1, ...
        colors: the color of each matcher, from `assign_colors`.
        x_label, y_label: the labels of the axes.
        diagonal: whether to add a dashed diagonal.
        points: a point (x, y) that is marked on the line of each matcher. The chart then also has
            a legend, so that it can stand alone.
    """
    with matplotlib.rc_context(STYLE):
        # pyplot would open a window, and would keep each figure in memory.
        figure = Figure(figsize=(4.6, 3.1))
        # Margins are fixed, because a layout that measures the text takes as long as drawing.
        axes = figure.add_axes((0.14, 0.17, 0.84, 0.8))
        if diagonal:
            axes.plot((0, 1), (0, 1), color=INK, alpha=0.6, linestyle="--", linewidth=1)
        # The network is drawn last, so that its line lies above the others.
        for name in sorted(lines, key=lambda matcher: matcher == OURS):
            width = 2.6 if name == OURS else 1.4
            line = lines[name]
            label = get_title(name)
            axes.plot(line.index, line.to_numpy(), color=colors[name], linewidth=width, label=label)
            if points:
                axes.plot(*points[name], marker="o", color=colors[name], markersize=8)
        if points:
            axes.legend(loc="lower center", frameon=False)
        axes.set(xlabel=x_label, ylabel=y_label, ylim=(0, 1.02))
        # The SVG has no date, so equal charts give equal bytes.
        svg = io.BytesIO()
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    return svg.getvalue()


def make_data_uri(kind: str, data: bytes) -> str:
    """Return the bytes of an image as a data URI, so that the page needs no other file.

    `kind` is the subtype of the image's MIME type, such as "png" or "svg+xml".
    """
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"


def make_image(svg: bytes, description: str) -> Markup:
    """Return an SVG as an HTML element `img` with a description for readers who cannot see it."""
    return Markup('<img src="{}" alt="{}">').format(make_data_uri("svg+xml", svg), description)


def draw_precision_recall_chart(
    precision_recall: pd.DataFrame, summary: pd.DataFrame, recall: str, colors: Mapping[str, str]
) -> bytes:
    """Draw precision over recall as the threshold of a matcher changes, as SVG.

    A point marks the threshold that counts in all other metrics.

    Args:
        precision_recall: `Results.precision_recall`.
        summary: `Results.metrics`, which has the points.
        recall: the metric of recall.
        colors: the color of each matcher, from `assign_colors`.
    """
    lines = {
        name: curve.set_index("recall")["precision"]
        for name, curve in precision_recall.groupby(level="matcher")
    }
    values = summary["value"].xs(("", False), level=KEY[1:])
    points = {name: (values[name, recall], values[name, "precision"]) for name in lines}
    return draw_line_chart(lines, colors, recall.replace("_", " "), "precision", points=points)


def draw_error_charts(table: pd.DataFrame, colors: Mapping[str, str]) -> Dict[tuple, Chart]:
    """Draw the curves whose areas are the AUC metrics, by (estimator, refined).

    Args:
        table: the long table of all pairs.
        colors: the color of each matcher, from `assign_colors`.
    """
    axis = "pose error, degrees" if metrics.has_pose_errors(table) else "corner error, px"
    charts = {}
    for (_, estimator, refined), curve in metrics.compute_error_curves(table).items():
        caption = f"{estimator.upper()}, matches {KINDS[refined]}"
        svg = draw_line_chart(curve, colors, axis, "fraction of pairs")
        charts[estimator, refined] = make_image(svg, f"fraction of pairs over {axis}"), caption
    return charts


def draw_calibration_chart(calibration: pd.DataFrame, colors: Mapping[str, str]) -> Chart:
    """Draw the fraction of correct matches over the network's confidence."""
    line = calibration.set_index("confidence")["precision"]
    labels = "confidence of a match", "fraction of correct ones"
    caption = (
        "Calibration: on the dashed line, a match of confidence 0.8 is correct in 80 % of cases"
    )
    svg = draw_line_chart({OURS: line}, colors, *labels, diagonal=True)
    return make_image(svg, f"{labels[1]} over {labels[0]}"), caption


def draw_robustness_charts(
    robustness: pd.DataFrame, leading: str, colors: Mapping[str, str]
) -> List[Chart]:
    """Draw recall and the leading AUC of the network and the ratio test at each level.

    Args:
        robustness: `Results.robustness`.
        leading: the name of the leading estimator.
        colors: the color of each matcher, from `assign_colors`.
    """
    charted_metrics = (("recall", "", "recall"), ("auc_5", leading, f"AUC@5 {leading.upper()}"))
    charts = []
    for name, part in robustness.groupby("condition", sort=False):
        for metric, estimator, label in charted_metrics:
            means = part.xs((metric, estimator, False), level=KEY)
            # Each matcher has a line over the levels, which are words at equal distances.
            frame = means["value"].unstack("matcher").sort_index()
            frame.index = [f"{level:g}" for _, level in frame.index]
            # Small photographs have no pair at the last levels of zoom.
            caption = f"{label}; at least {means['pairs'].min()} pairs at each level"
            svg = draw_line_chart(frame, colors, name, label)
            charts.append((make_image(svg, f"{label} over {name}"), caption))
    return charts
