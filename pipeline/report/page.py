"""The report as one HTML page that needs nothing beside it: no script, no network, pictures inside."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from html import escape
from typing import Dict, List, Mapping, Optional, Sequence

from pipeline.report import charts, tables
from pipeline.report.document import definitions, document, paragraphs, table

Line = Mapping[str, object]


@dataclass(frozen=True)
class Picture:
    """A drawn pair. jpeg: the file's bytes; explanation: why it is hard, or nothing."""

    name: str
    caption: str
    explanation: str
    jpeg: bytes


@dataclass(frozen=True)
class Content:
    """What the page shows: the lines of the CSV files, as written beside it."""

    title: str
    figures: Dict[str, Optional[float]]
    intervals: Sequence[Line]
    differences: Sequence[Line]
    errors: Mapping[str, Sequence[Line]]  # by estimator
    thresholds: Sequence[Line]
    calibration: Sequence[Line]
    robustness: Sequence[Line]
    pictures: Sequence[Picture]
    protocol: Mapping[str, object]
    notes: List[str] = field(default_factory=list)
    unit: str = "the mean corner error up to 1, 3, 5 and 10 px"  # what the AUC is of


def render(content: Content) -> str:
    """The page as HTML text."""
    sections = [
        ("Summary", summary(content)),
        ("Comparison", comparison(content) + difference_table(content.differences)),
        ("Pairs within an error", error_charts(content)),
        ("Confidence", confidence_charts(content)),
        ("Where it wins and where it loses", robustness_table(content.robustness)),
        ("Pairs", "".join(picture(one) for one in content.pictures)),
        ("How these figures were made", definitions(content.protocol)),
    ]
    body = "\n".join(f"<section><h2>{name}</h2>\n{text}</section>" for name, text in sections if text)
    return document(content.title, body)


def summary(content: Content) -> str:
    """In words: what is better, what is worse, what these pairs cannot tell."""
    names = {"better": [], "worse": [], "undecided": []}
    for line in content.differences:
        names[str(line["verdict"])].append(tables.figure_title(str(line["figure"])))
    words = {
        "better": "Better than the best baseline in",
        "worse": "Worse in",
        "undecided": "These pairs cannot tell in",
    }
    lines = [f"{words[verdict]}: {', '.join(found)}." for verdict, found in names.items() if found]
    return paragraphs([*content.notes, *lines])


def comparison(content: Content) -> str:
    """One row per matcher, each figure with its interval below it."""
    found = {(line["matcher"], line["figure"]): line for line in content.intervals}
    columns = list(dict.fromkeys(str(line["figure"]) for line in content.intervals))
    matchers = tables.matchers_in(content.figures)
    rows = []
    for matcher in matchers:
        cells = [interval_cell(found.get((matcher, column))) for column in columns]
        rows.append([escape(tables.title(matcher)), str(content.figures[f"{matcher}.pairs"]), *cells])
    marks = ["ours" if matcher == "superglue" else "" for matcher in matchers]
    note = f"Percent, with 95 % intervals over pairs. AUC of {content.unit}."
    head = ["", "pairs", *map(tables.figure_title, columns)]
    return table(head, rows, marks) + paragraphs([note, *tables.recall_notes(content.figures)])


def interval_cell(line: Optional[Line]) -> str:
    """53.7 with 51.2-56.0 below it."""
    if line is None or line["value"] is None:
        return "-"
    span = (
        "" if line["low"] is None else f"{tables.percent(line['low'])}&ndash;{tables.percent(line['high'])}"
    )
    return f"{tables.percent(line['value'])}<br><small>{span}</small>"


def difference_table(lines: Sequence[Line]) -> str:
    """Ours minus the best baseline, pair by pair."""
    rows = []
    for line in lines:
        value, low, high = (line[name] for name in ("value", "low", "high"))
        shown = "-" if value is None else f"{100 * value:+.1f}"
        span = "-" if low is None else f"{100 * low:+.1f} .. {100 * high:+.1f}"
        word = str(line["verdict"])
        rows.append(
            [
                tables.figure_title(str(line["figure"])),
                shown,
                span,
                f'<span class="{word}">{word}</span>',
                baseline(line),
            ]
        )
    return table(["ours minus the best baseline", "points", "95 % interval", "", "baseline"], rows)


def baseline(line: Line) -> str:
    """The baseline's name for people."""
    return escape(tables.title(str(line["baseline"])))


def figure(chart: str, caption: str) -> str:
    """A chart with its caption."""
    return f"<figure>{chart}<figcaption>{escape(caption)}</figcaption></figure>"


AXES = {  # first column of a curve -> its axis, and what was estimated
    "error_px": ("corner error in pixels", "Homography from"),
    "error_deg": ("pose error in degrees", "Relative pose from"),
}


def error_charts(content: Content) -> str:
    """The curves whose areas the AUC are."""
    parts = []
    for estimator, lines in content.errors.items():
        if not lines:
            continue
        axis, *names = lines[0]
        series = {tables.title(name): charts.column(lines, axis, name) for name in names}
        label, title = AXES[axis]
        chart = charts.line_chart(series, label, "share of pairs", (0, float(lines[-1][axis])))
        parts.append(figure(chart, f"{title} {estimator.upper()}: share of pairs within an error"))
    return f'<div class="charts">{"".join(parts)}</div>' if parts else ""


def confidence_charts(content: Content) -> str:
    """Precision and recall over the threshold, and calibration; nothing where neither was asked."""
    if not content.thresholds:
        return ""
    series = {name: charts.column(content.thresholds, "threshold", name) for name in ("precision", "recall")}
    first = charts.line_chart(series, "smallest confidence of a match", "share", (0, 1))
    points = {"ours": charts.column(content.calibration, "confidence", "precision")}
    second = charts.line_chart(points, "confidence of a match", "share of right ones", (0, 1), diagonal=True)
    return (
        '<div class="charts">'
        + figure(
            first,
            "Precision and recall of ours over the confidence threshold (a pair without matches counts as 0)",
        )
        + figure(second, "Calibration: on the dashed line, confidence is the share of right matches")
        + "</div>"
    )


def robustness_table(lines: Sequence[Line]) -> str:
    """Figures of ours and of the ratio test by how hard the pairs are."""
    if not lines:
        return ""
    names = [name for name in lines[0] if name.startswith("superglue.")]
    rows = []
    for line in lines:
        cells = [duel(line[name], line[name.replace("superglue.", "ratio_test.")]) for name in names]
        asked = line.get("recall_pairs", line["pairs"])
        if "superglue.recall" in names and asked != line["pairs"]:
            cells[names.index("superglue.recall")] += f"<br><small>{asked} with true matches</small>"
        rows.append([f"{escape(condition(line))} {escape(str(line['level']))}", str(line["pairs"]), *cells])
    head = ["condition", "pairs", *[tables.figure_title(name.partition(".")[2]) for name in names]]
    note = "Percent, ours | ratio test; green where ours is ahead by a point or more, red where it is behind."
    return table(head, rows) + paragraphs([note])


def condition(line: Line) -> str:
    """rotation_deg -> rotation (deg); other names as they are."""
    return str(line["condition"]).replace("_deg", " (deg)")


def duel(ours: Optional[float], theirs: Optional[float]) -> str:
    """Two figures side by side, coloured by who is ahead."""
    text = f"{tables.percent(ours)} | {tables.percent(theirs)}"
    if ours is None or theirs is None or abs(ours - theirs) < 0.01:
        return text
    return f'<span class="{"better" if ours > theirs else "worse"}">{text}</span>'


def picture(one: Picture) -> str:
    """One drawn pair."""
    data = base64.b64encode(one.jpeg).decode("ascii")
    why = f"<br>{escape(one.explanation)}" if one.explanation else ""
    return (
        f'<figure class="pair"><img alt="{escape(one.caption)}" loading="lazy" src="data:image/jpeg;base64,{data}">'
        f"<figcaption><b>{escape(one.name)}</b>: {escape(one.caption)}{why}</figcaption></figure>\n"
    )
