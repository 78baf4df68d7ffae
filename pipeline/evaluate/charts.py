"""The report as one HTML page that needs no other file, by matplotlib and jinja2."""

# pandas has no types. A type checker guesses them from its source, mostly wrongly.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportAssignmentType=false

from __future__ import annotations

import base64
import io
import itertools
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import jinja2
import matplotlib
import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure

from pipeline.evaluate import metrics, report
from pipeline.evaluate.matchers import OURS
from pipeline.evaluate.report import Results
from superglue_sift import drawing

# One colour for each matcher of `report.TITLES` on every chart, then those of further matchers. All
# are readable on a light and on a dark page.
COLOURS = ("#10a070", "#e0524a", "#4a86e8", "#c08a1e", "#8c8c8c")
FURTHER = ("#2aa5b5", "#9a6fe0", "#d264a8", "#7d9a2d", "#a8745a")
INK = "#888888"
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "charts",  # without it the file contains random names
    "axes.grid": True,
    "grid.alpha": 0.25,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
    ),
}
Chart = Tuple[Markup, str]  # a chart and its caption


def colours_of(matchers: Sequence[str]) -> Dict[str, str]:
    """Return the colour of each matcher."""
    further = [name for name in matchers if name not in report.TITLES]
    # a matcher of TITLES keeps its colour whether or not the others are shown
    palette = itertools.chain(COLOURS, itertools.cycle(FURTHER))
    every = dict(zip([*report.TITLES, *further], palette))
    return {name: every[name] for name in matchers}


def line_chart(
    frame: pd.DataFrame, colours: Mapping[str, str], label: str, diagonal: bool = False
) -> Markup:
    """Draw an `img` of an SVG with one line per column, the network last and thicker.

    The index of `frame` is x, and its name the label of the x axis. Words are placed at 0, 1, ...
    `label` is the label of y, which is from 0 to 1. `diagonal` adds a dashed diagonal.
    """
    with matplotlib.rc_context(STYLE):
        # Figure, not pyplot: there is no window, and no figure is kept in memory
        figure = Figure(figsize=(4.6, 3.1))
        # margins by hand: a layout that measures the text takes as long as drawing it
        axes = figure.add_axes((0.14, 0.17, 0.84, 0.8))
        if diagonal:
            axes.plot((0, 1), (0, 1), color=INK, alpha=0.6, linestyle="--", linewidth=1)
        # the network is drawn last, so that its line lies above the others
        for name in sorted(frame, key=lambda each: each == OURS):
            width = 2.6 if name == OURS else 1.4
            axes.plot(frame.index, frame[name], color=colours[name], linewidth=width)
        axes.set(xlabel=frame.index.name, ylabel=label, ylim=(0, 1.02))
        # an SVG without a date, so that equal charts give equal bytes
        svg = io.BytesIO()
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    source = address("svg+xml", svg.getvalue())
    return Markup('<img src="{}" alt="{} over {}">').format(source, label, frame.index.name)


def address(kind: str, data: bytes) -> str:
    """Return the bytes of an image as an address, so that the page needs no other file."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"


def error_charts(results: Results, colours: Mapping[str, str]) -> List[Chart]:
    """Draw the curves whose areas are the AUC metrics, for each estimator and kind of matches."""
    axis = "pose error, degrees" if metrics.is_posed(results.table) else "corner error, px"
    charts = []
    for (_, estimator, refined), curve in metrics.error_curves(results.table).items():
        frame = curve.set_index(curve.columns[0])[list(colours)].rename_axis(axis)
        caption = f"{estimator.upper()}, matches {report.KINDS[refined]}"
        charts.append((line_chart(frame, colours, "fraction of pairs"), caption))
    return charts


def calibration_chart(results: Results, colours: Mapping[str, str]) -> Chart:
    """Draw whether the network's confidence is the probability that a match is correct."""
    # (bins,) one line, which is the network's
    bins = results.calibration.set_index("confidence")[["precision"]].set_axis([OURS], axis=1)
    frame = bins.rename_axis("confidence of a match")
    words = "Calibration: on the dashed line, a match of confidence 0.8 is correct in 80 % of cases"
    return line_chart(frame, colours, "fraction of correct ones", diagonal=True), words


def robustness_charts(results: Results, colours: Mapping[str, str]) -> List[Chart]:
    """Draw found matches and the leading AUC at each level of each condition.

    The lines are the network and the ratio test.
    """
    lead = report.leading(results)
    shown = (("recall", "", "found matches"), ("auc_5", lead, report.heading("auc_5", lead)))
    charts = []
    for name, part in results.robustness.reset_index().groupby("condition", sort=False):
        for metric, estimator, label in shown:
            # one line for each matcher over the levels, which are words at equal distances
            key = (part["metric"] == metric) & (part["estimator"] == estimator) & ~part["refined"]
            frame = part[key].pivot(index="level", columns="matcher", values="value")
            frame = frame.set_axis([f"{level:g}" for level in frame.index]).rename_axis(name)
            # small photographs have no pair at the last levels of zoom
            fewest = part.loc[key, "pairs"].min()
            caption = f"{label}; at least {fewest} pairs at each level"
            charts.append((line_chart(frame, colours, label), caption))
    return charts


def render(results: Results, curves: Optional[Path] = None) -> str:
    """Render the page as HTML text.

    `curves` is the SVG of the learning curve. If the file is missing, the page leaves it out.
    """
    # StrictUndefined: a name that is wrong in the template is an error, not an empty text
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        percent=report.percent,
        points=report.points,
        title=report.title,
        show=lambda table: Markup(table.to_html(border=0)),
    )
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    # charts, each a text of some 20 kB
    colours = colours_of(report.matchers_of(results))
    errors = error_charts(results, colours)
    # The leading estimator comes first, with detected and refined matches. The others follow.
    first = [each for each in errors if each[1].startswith(report.leading(results).upper())]
    posed = metrics.is_posed(results.table)
    return environment.from_string(template).render(
        results=results,
        report=report,
        # JPEG on the page, since it holds all pictures, and PNG in the folder
        pictures=[
            (address("jpeg", drawing.Picture(pixels).encode()), caption)
            for _, caption, pixels in results.pictures
        ],
        learning=address("svg+xml", curves.read_bytes()) if curves and curves.is_file() else "",
        legend=colours,
        charts=[*first, *([] if posed else [calibration_chart(results, colours)])],
        more_charts=[each for each in errors if each not in first],
        robustness=robustness_charts(results, colours) if len(results.robustness) else [],
    )
