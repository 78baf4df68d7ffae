"""The report as one HTML page that needs no other file, by matplotlib and jinja2."""

# pandas has no types. A type checker guesses them from its source, mostly wrongly.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportAssignmentType=false

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import jinja2
import matplotlib
import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure

from pipeline.bootstrap import MIN_CLUSTERS
from pipeline.evaluate import metrics, report
from pipeline.evaluate.matchers import OURS, RATIO_TEST
from pipeline.evaluate.report import Results, only, title
from superglue_sift import drawing

# One colour for each matcher on every chart, readable on a light and on a dark page
COLOURS = {
    OURS: "#10a070",
    RATIO_TEST: "#e0524a",
    "mutual_nn": "#4a86e8",
    "nn": "#c08a1e",
    "true_matches": "#8c8c8c",
    "superglue_scene": "#2aa5b5",
}
FURTHER = ("#9a6fe0", "#d264a8", "#7d9a2d", "#a8745a")  # colours of other matchers, in their order
INK = "#888888"
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "charts",  # without it the file contains random names
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
    ),
}
Points = Tuple[Sequence[float], Sequence[float]]  # x and y of a curve, from 0 to 1
Chart = Tuple[Markup, str]  # a chart and its caption


def colours_of(matchers: Sequence[str]) -> Dict[str, str]:
    """Return the colour of each matcher."""
    further = [name for name in matchers if name not in COLOURS]
    more = {name: FURTHER[place % len(FURTHER)] for place, name in enumerate(further)}
    return {name: {**COLOURS, **more}[name] for name in matchers}


def line_chart(
    series: Mapping[str, Points],
    colours: Mapping[str, str],
    labels: Tuple[str, str],
    ticks: Optional[Sequence[str]] = None,
    diagonal: bool = False,
) -> Markup:
    """Draw an `img` of an SVG with one line per matcher, the network last and thicker.

    `labels` are the labels of both axes. `ticks` are words for x = 0, 1, ... `diagonal` adds a
    dashed diagonal.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.6, 3.1), layout="constrained")
        # the network is drawn last, so that its line lies above the others
        axes = figure.subplots()
        if diagonal:
            axes.plot((0, 1), (0, 1), color=INK, alpha=0.6, linestyle="--", linewidth=1)
        for name, (across, up) in sorted(series.items(), key=lambda each: each[0] == OURS):
            dots = {"marker": "o", "markersize": 4} if len(across) <= metrics.BINS else {}
            width = 2.6 if name == OURS else 1.4
            axes.plot(across, up, color=colours[name], linewidth=width, **dots)
        if ticks is not None:
            axes.set_xticks(range(len(ticks)), ticks)
        else:
            axes.margins(x=0)
        # an SVG without a date, so that equal charts give equal bytes
        axes.set(xlabel=labels[0], ylabel=labels[1], ylim=(0, 1.02))
        svg = io.BytesIO()
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    source = address("svg+xml", svg.getvalue())
    return Markup('<img src="{}" alt="{} over {}">').format(source, labels[1], labels[0])


def address(kind: str, data: bytes) -> str:
    """Return the bytes of an image as an address, so that the page needs no other file."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"


def error_charts(results: Results, colours: Mapping[str, str]) -> List[Chart]:
    """Draw the curves whose areas are the AUC metrics, for each estimator."""
    keys = only(results.table, metric="error")[["estimator", "refined"]].drop_duplicates()
    charts = []
    for (estimator, refined), curve in zip(
        keys.itertuples(index=False, name=None), metrics.error_curves(results.table).values()
    ):
        unit, *_ = curve.columns
        axis = "pose error, degrees" if unit == "error_deg" else "corner error, px"
        names = [name for name in curve.columns[1:] if name in colours]
        series = {name: (curve[unit].tolist(), curve[name].tolist()) for name in names}
        chart = line_chart(series, colours, (axis, "fraction of pairs"))
        kind = "matches refined by the pixels" if refined else "matches as detected"
        charts.append((chart, f"{report.ESTIMATORS.get(estimator, estimator.upper())}; {kind}"))
    return charts


def calibration_chart(results: Results, colours: Mapping[str, str]) -> List[Chart]:
    """Draw whether the network's confidence is the probability that a match is correct."""
    bins = results.calibration
    series = {OURS: (bins["confidence"].tolist(), bins["precision"].tolist())}
    labels = "confidence of a match", "fraction of correct ones"
    words = "Calibration: on the dashed line, a match of confidence 0.8 is correct in 80 % of cases"
    return [(line_chart(series, colours, labels, diagonal=True), words)]


def robustness_charts(results: Results, colours: Mapping[str, str]) -> List[Chart]:
    """Draw found matches and the leading AUC at each level of each condition.

    The lines are the network and the ratio test.
    """
    recall = report.recall_of(results)
    lead = report.leading(results)
    shown = ((recall, "", "found matches"), ("auc_5", lead, report.heading("auc_5", lead)))
    charts = []
    for name, part in results.robustness.groupby("condition", sort=False):
        levels = sorted(part["level"].unique(), key=float)
        fewest = int(only(part, metric="pairs")["value"].min())
        for metric, estimator, label in shown:
            # one line for each matcher over the levels
            rows = only(part, metric=metric, estimator=estimator, refined=False)
            wide = rows.pivot(index="level", columns="matcher", values="value").loc[levels]
            series = {
                name: (list(range(len(levels))), wide[name].tolist()) for name in metrics.COMPARED
            }
            chart = line_chart(series, colours, (str(name), label), ticks=levels)
            charts.append((chart, f"{label}; at least {fewest} pairs at each level"))
    return charts


def cells_of(results: Results) -> List[Tuple[str, List[str], List[Tuple[str, str, List[Markup]]]]]:
    """Return the tables of the comparison: caption, headings, and (matcher, title, cells) per line.

    A cell is a value with its 95 % interval.
    """
    frame = results.metrics[results.metrics["samples"].notna()]
    groups = [("Matches, in %", frame[frame["metric"].isin(report.SHORT)])]
    for estimator, part in frame[frame["metric"].str.startswith("auc_")].groupby(
        "estimator", sort=False
    ):
        for refined, rows in part.groupby("refined"):
            kind = "matches refined by the pixels" if refined else "matches as detected"
            groups.append((f"AUC {str(estimator).upper()}, {kind}, in %", rows))
    # one line for each matcher, one column for each metric
    tables = []
    for caption, rows in groups:
        keys = list(dict.fromkeys(rows["metric"]))
        heads = [report.SHORT.get(key, "@" + key.partition("_")[2]) for key in keys]
        known = rows.set_index(["matcher", "metric"])
        lines = [
            (name, title(name), [_cell(known, (name, key)) for key in keys])
            for name in report.compared(results)
        ]
        tables.append((caption, heads, lines))
    return tables


def _cell(known: pd.DataFrame, key: Tuple[str, str]) -> Markup:
    if key not in known.index:
        return Markup("-")
    row = known.loc[key]
    low, high = (report.percent(row[end]) for end in ("low", "high"))
    interval = Markup("<br><small>{}&ndash;{}</small>").format(low, high) if low != "-" else ""
    return Markup("{}{}").format(report.percent(row["value"]), interval)


def gains_of(results: Results) -> List[Tuple[str, List[Tuple[str, str, str, str]]]]:
    """Return the differences to the best baseline, then to each further model.

    A group has the name of the other matcher, and (metric, points, interval, verdict) of each line.
    """
    # the metrics that the page compares
    frame = results.differences
    shown = frame["metric"].isin([*report.SHORT, "auc_5", f"within_{metrics.WITHIN}"])
    frame = frame[shown & ~frame["baseline"].isin(list(results.same))]
    best = frame.drop_duplicates(metrics.KEY)
    # the first group has the best baseline of each metric, the others have one model each
    baselines = set(best["baseline"]) | {RATIO_TEST}
    further = [name for name in frame["baseline"].unique() if name not in baselines]
    groups = [("the best baseline", best)]
    groups += [(title(name), only(frame, baseline=name)) for name in further]
    found = []
    for name, rows in groups:
        lines = []
        for row in rows.to_dict("records"):
            words = report.heading(row["metric"], row["estimator"], row["refined"])
            whose = f" ({title(row['baseline'])})" if name == "the best baseline" else ""
            end = report.points(row["value"]), report.span(row), row["verdict"]
            lines.append((words + whose, *end))
        found.append((name, lines))
    return found


def render(results: Results, curves: Optional[Path] = None) -> str:
    """Render the page as HTML text.

    `curves` is the SVG of the learning curve. If the file is missing, the page leaves it out.
    """
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(percent=report.percent, points=report.points, title=title)
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    names = report.compared(results)
    colours = colours_of(names)
    errors = error_charts(results, colours)
    # The leading estimator comes first, with detected and refined matches. The others follow.
    first = [errors[0], *errors[len(errors) // 2 :][:1]] if len(errors) > 1 else errors
    posed = metrics.is_posed(results.table)
    return environment.from_string(template).render(
        results=results,
        report=report,
        verdict=report.verdict(results),
        duels=report.duels(results),
        enough=results.scenes >= MIN_CLUSTERS,
        pictures=[
            (address("jpeg", drawing.Picture(pixels).encode()), caption)
            for _, caption, pixels in results.pictures
        ],
        learning=address("svg+xml", curves.read_bytes()) if curves and curves.is_file() else "",
        legend=[(title(name), colours[name]) for name in names],
        charts=[*first, *([] if posed else calibration_chart(results, colours))],
        more_charts=[each for each in errors if each not in first],
        robustness=robustness_charts(results, colours) if len(results.robustness) else [],
        tables=cells_of(results),
        gains=gains_of(results) if results.scenes >= MIN_CLUSTERS else [],
        pairs=results.table["number"].nunique(),
    )
