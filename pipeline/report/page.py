"""The report as one HTML page that needs nothing beside it: no script, no network, pictures inside."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import jinja2
from markupsafe import Markup

from pipeline.report import charts, tables

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Picture:
    """A drawn pair. jpeg: the file's bytes; explanation: why it is hard, or nothing."""

    name: str
    caption: str
    explanation: str
    jpeg: bytes


@dataclass(frozen=True)
class Content:
    """All that an evaluation has to say: the lines of each file it writes, and what the page shows of them."""

    title: str
    figures: Dict[str, Optional[float]]
    intervals: Sequence[Line]
    differences: Sequence[Line]
    curves: Mapping[str, Sequence[Line]]  # by the name of the file
    robustness: Sequence[Line]
    pictures: Sequence[Picture]
    protocol: Mapping[str, object]
    pairs: Sequence[Line] = ()
    scenes: Sequence[Line] = ()
    bad: Sequence[Line] = ()
    notes: List[str] = field(default_factory=list)


def render(content: Content) -> str:
    """The page as HTML text."""
    sections = (
        ("Pairs within an error", error_charts(content.curves)),
        ("Confidence", confidence_charts(content.curves)),
    )
    return template().render(title=content.title, content=content, sections=sections)


def render_overview(title: str, parts: Mapping[str, Content]) -> str:
    """A page above those of several evaluations. parts: by the name of the folder that holds the page of each."""
    return template().render(title=title, parts=parts)


def template() -> jinja2.Template:
    """`page.html`, with the words of the tables as filters."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters.update(
        base64=lambda data: base64.b64encode(data).decode("ascii"),
        by_cell=lambda lines: {(line["matcher"], line["figure"]): line for line in lines},
        figure_title=tables.figure_title,
        as_text=as_text,
        marked=tables.marked,
        matchers_in=tables.matchers_in,
        notes=tables.notes,
        percent=tables.percent,
        points=tables.points,
        select_ours=lambda line: [name.partition(".")[2] for name in line if name.startswith("superglue.")],
        title_of=tables.title,
    )
    environment.globals.update(least_pairs=tables.LEAST_PAIRS, few=tables.FEW)
    return environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))


def as_text(differences: Sequence[Line]) -> List[str]:
    """What is better, what is worse, what these pairs cannot tell; beside the baselines, and each further model."""
    seen: Dict[str, str] = {}  # figure -> whom its first line is about
    groups: Dict[Tuple[str, str], List[str]] = {}
    for line in differences:
        figure, baseline = str(line["figure"]), str(line["baseline"])
        beside = "the best baseline" if figure not in seen else tables.title(baseline)
        seen.setdefault(figure, baseline)
        groups.setdefault((beside, str(line["verdict"])), []).append(tables.figure_title(figure))
    words = {
        "better": "Better than {} in",
        "worse": "Worse than {} in",
        "undecided": "These pairs cannot tell beside {} in",
    }
    order = list(words)
    ranked = sorted(groups, key=lambda key: (key[0] != "the best baseline", key[0], order.index(key[1])))
    return [
        f"{words[verdict].format(beside)}: {', '.join(groups[beside, verdict])}."
        for beside, verdict in ranked
    ]


Chart = Tuple[Markup, str]  # and its caption
AXES = {  # first column of a curve -> its axis, and what was estimated
    "error_px": ("corner error in pixels", "Homography from {}"),
    "error_deg": ("pose error in degrees", "Relative pose from the essential matrix"),
}


def error_charts(curves: Mapping[str, Sequence[Line]]) -> List[Chart]:
    """The curves whose areas the AUC are."""
    found = []
    for name, lines in curves.items():
        if not name.startswith("error_") or not lines:
            continue
        axis, *matchers = lines[0]
        series = {tables.title(matcher): charts.column(lines, axis, matcher) for matcher in matchers}
        label, title = AXES[axis]
        chart = charts.line_chart(series, label, "share of pairs", (0, float(lines[-1][axis])))
        caption = f"{title.format(name[len('error_') :].upper())}: share of pairs within an error"
        found.append((Markup(chart), caption))
    return found


def confidence_charts(curves: Mapping[str, Sequence[Line]]) -> List[Chart]:
    """Precision beside recall, both over the threshold, and calibration; nothing where neither was asked."""
    if "precision_recall" not in curves:
        return []
    thresholds, swept = curves["precision_recall"], curves["precision_at_recall"]
    networks = [name for name in swept[0] if name != "recall"] if swept else []
    series = {tables.title(name): charts.column(swept, "recall", name) for name in networks}
    for line in curves["operating_points"]:
        if line["matcher"] not in networks:
            series[tables.title(str(line["matcher"]))] = charts.column([line], "recall", "precision")
    first = charts.line_chart(series, "recall", "precision", (0, 1))
    series = {name: charts.column(thresholds, "threshold", name) for name in ("precision", "recall")}
    second = charts.line_chart(series, "smallest confidence of a match", "share", (0, 1))
    points = {"ours": charts.column(curves["calibration"], "confidence", "precision")}
    third = charts.line_chart(points, "confidence of a match", "share of right ones", (0, 1), diagonal=True)
    captions = (
        "Precision at each recall over all confidences of ours; a baseline is one point",
        "Precision and recall of ours over the confidence threshold (a pair without matches counts as 0)",
        "Calibration: on the dashed line, confidence is the share of right matches",
    )
    return [(Markup(chart), caption) for chart, caption in zip((first, second, third), captions)]
