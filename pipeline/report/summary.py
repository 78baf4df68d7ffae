"""The verdict of an evaluation, its headline metrics and its note in MLflow."""

from __future__ import annotations

from typing import Dict, List, Optional

from pipeline.bootstrap import MIN_CLUSTERS
from pipeline.report import tables
from pipeline.report.document import Content
from pipeline.report.rows import Measure, Row, title

OURS = "superglue"
RATIO_TEST = "ratio_test"
# names of two pictures
GAIN_MEDIAN = "gain-median"
GAIN_MOST = "gain-most"
PICTURES = {
    GAIN_MEDIAN: "A typical pair: the median of what ours gains over the ratio test",
    GAIN_MOST: "The pair where ours gains most over the ratio test",
}
VERDICTS = {
    "better": "Better than",
    "worse": "Worse than",
    "equal": "Equal, within the 95 % interval, to",
}


def leading_area(content: Content) -> Measure:
    """The AUC within 5 px (degrees) of the first estimator."""
    return next(m for m in content.table[OURS] if m.metric == "auc" and m.limit == 5)


def best_baseline(content: Content, measure: Measure) -> Optional[Row]:
    """The difference of ours from the best baseline."""
    return next((row for row in content.differences if row.measure == measure), None)


def headline(content: Content) -> Dict[str, float]:
    """At most ten metrics with short names, for DVC (summary.json) and MLflow.

    Values of ours and their gains over the best baseline: the leading AUC, the same of aligned
    matches, recall (poses: matching score) at the ratio test's precision. Values of ours alone:
    precision, recall, matches on negative pairs, and the F1 of validation.
    """
    area = leading_area(content)
    ours = content.table[OURS]
    recall = "recall" if Measure("recall") in ours else "matching_score"
    compared = {
        "auc_5": area,
        "auc_5_aligned": area._replace(aligned=True),
        f"{recall}_at_p": Measure(f"{recall}_at_ratio_precision"),
    }
    values: Dict[str, Optional[float]] = {}
    for name, measure in compared.items():
        row = best_baseline(content, measure)
        values[name] = ours.get(measure)
        values[f"{name}_gain"] = row.value if row else None
    values.update({name: ours.get(Measure(name)) for name in ("precision", recall)})
    values["negative_matches"] = ours.get(tables.NEGATIVES[0])
    values["val_f1"] = content.protocol["model"].get("validation_f1")
    return {name: value for name, value in values.items() if value is not None}


def result(content: Content) -> str:
    """The leading AUC, for the name of the run: `AUC@5 57.8`."""
    return f"AUC@5 {tables.percent(content.table[OURS][leading_area(content)])}"


def verdict(content: Content) -> List[str]:
    """Two sentences: the comparison with the best baseline, and the quality of the matches."""
    ours = content.table[OURS]
    area = leading_area(content)
    first = f"{area.title} {tables.percent(ours[area])} %"
    row = best_baseline(content, area)
    if row is not None:
        first = compare(content, row, first)
    aligned = ours.get(area._replace(aligned=True))
    if aligned is not None:
        first += f"; with matches aligned by the pixels {tables.percent(aligned)} %"
    second = f"{tables.percent(ours.get(Measure('precision')))} % of its matches are right"
    if Measure("recall") in ours:
        second += f" and {tables.percent(ours[Measure('recall')])} % of the true ones are found"
    found = tables.negative_matches(content.table)
    if OURS in found:
        wrong = found[OURS]
        theirs = found[RATIO_TEST]
        second += (
            f"; photographs with nothing in common give {wrong[0]:.1f} matches (95th percentile"
            f" {wrong[1]:.0f}), by the ratio test {theirs[0]:.1f} ({theirs[1]:.0f})"
        )
    return [f"{first}.", f"{second}."]


def compare(content: Content, row: Row, value: str) -> str:
    """Whether ours is better than the best baseline, its `value`, and by how many points."""
    other = f"the best baseline ({title(row.baseline)})"
    gain = f"{value}, {tables.points(row.value)} points"
    if row.verdict not in VERDICTS:
        number = f"{content.clusters} of {MIN_CLUSTERS}"
        return f"Too few {content.unit} to tell ({number}): {gain} from {other}"
    interval = f"95 % interval {tables.span(row)}, {content.clusters} {content.unit}"
    return f"{VERDICTS[row.verdict]} {other}: {gain} ({interval})"


def text(content: Content) -> str:
    """The tables of a report, as they are printed."""
    sections = [
        f"{content.title}, {content.table[OURS][tables.PAIRS]} pairs",
        "\n".join(verdict(content)),
        tables.by_scene(content.scenes) if content.unit == "sequences" else "",
        tables.comparison(content.table),
        tables.differences(content.differences),
        tables.negatives(content.table),
        "\n".join(content.notes),
    ]
    return "\n\n".join(filter(None, sections))


def note(content: Content) -> str:
    """Description of an MLflow run: a Markdown table of at most four matchers, ours first."""
    ours = content.table[OURS]
    words = ("precision", "recall", "matching_score")
    shown = [each for each in (leading_area(content), *map(Measure, words)) if each in ours]
    found = tables.negative_matches(content.table)
    head = [
        f"{content.title}, in %",
        *map(tables.heading, shown),
        *(["wrong matches"] * bool(found)),
    ]
    rows = [head, ["---"] * len(head)]
    for matcher in [*dict.fromkeys([OURS, RATIO_TEST, *content.table])][:4]:
        values = content.table[matcher]
        negative = [f"{found[matcher][0]:.1f}" if matcher in found else "-"] * bool(found)
        rows.append([title(matcher), *(tables.percent(values.get(m)) for m in shown), *negative])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
