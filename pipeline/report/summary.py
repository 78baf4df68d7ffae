"""The verdict of an evaluation, its headline metrics and its note in MLflow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Tuple

from pipeline.bootstrap import MIN_CLUSTERS
from pipeline.report import tables

if TYPE_CHECKING:
    from pipeline.report.document import Content

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


def leading_area(content: Content) -> str:
    """Name of the AUC within 5 px (degrees) of the first estimator."""
    names = (name.partition(".")[2] for name in content.metrics if name.startswith(f"{OURS}.auc_"))
    return next(name for name in names if name.endswith("_5"))


def best_baseline(content: Content, metric: str) -> Optional[Mapping[str, Any]]:
    """The line of differences.csv of a metric, against the best baseline."""
    return next((line for line in content.differences if line["figure"] == metric), None)


def headline(content: Content) -> Dict[str, float]:
    """At most ten metrics with short names, for DVC (summary.json) and MLflow.

    Values of ours and their gains over the best baseline: the leading AUC, the same of aligned
    matches, recall (poses: matching score) at the ratio test's precision. Values of ours alone:
    precision, recall, matches on negative pairs, and the F1 of validation.
    """
    area = leading_area(content)
    recall = "recall" if f"{OURS}.recall" in content.metrics else "matching_score"
    names = {
        "auc_5": area,
        "auc_5_aligned": tables.aligned_counterpart(area),
        f"{recall}_at_p": f"{recall}_at_ratio_precision",
        "precision": "precision",
        recall: recall,
        "unrelated": "unrelated_matches",
    }
    metrics: Dict[str, Optional[float]] = {}
    for short, name in names.items():
        line = best_baseline(content, name)
        metrics[short] = content.metrics.get(f"{OURS}.{name}")
        if line is not None and short != name:
            metrics[f"{short}_gain"] = line["value"]
    metrics["val_f1"] = content.protocol["model"].get("validation_f1")
    return {name: value for name, value in metrics.items() if value is not None}


def result(content: Content) -> str:
    """The leading AUC, for the name of the run: `AUC@5 57.8`."""
    return f"AUC@5 {tables.percent(content.metrics[f'{OURS}.{leading_area(content)}'])}"


def verdict(content: Content) -> List[str]:
    """Two sentences: the comparison with the best baseline, and the quality of the matches."""
    metrics = content.metrics
    area = leading_area(content)
    value = f"{tables.metric_title(area)} {tables.percent(metrics[f'{OURS}.{area}'])} %"
    line = best_baseline(content, area)
    value = (
        f"{compared(content, line)}: {value}, {margin(content, line)}"
        if line is not None
        else value
    )
    aligned = metrics.get(f"{OURS}.{tables.aligned_counterpart(area)}")
    value += (
        f"; with matches aligned by the pixels {tables.percent(aligned)} %"
        if aligned is not None
        else ""
    )
    second = f"{tables.percent(metrics.get(f'{OURS}.precision'))} % of its matches are right"
    if f"{OURS}.recall" in metrics:
        second += f" and {tables.percent(metrics[f'{OURS}.recall'])} % of the true ones are found"
    ours, others = (negative_matches(metrics, name) for name in (OURS, RATIO_TEST))
    if ours and others:
        second += (
            f"; photographs with nothing in common give {ours[0]:.1f} matches (95th percentile"
            f" {ours[1]:.0f}), by the ratio test {others[0]:.1f} ({others[1]:.0f})"
        )
    return [f"{value}.", f"{second}."]


def compared(content: Content, line: Mapping[str, Any]) -> str:
    """`Better than the best baseline (ratio test, mutual)`, or that there are too few
    photographs.
    """
    if line["verdict"] not in VERDICTS:
        return f"Too few {content.unit} to tell ({line.get('clusters', 0)} of {MIN_CLUSTERS})"
    return f"{VERDICTS[line['verdict']]} the best baseline ({tables.title(line['baseline'])})"


def margin(content: Content, line: Mapping[str, Any]) -> str:
    """The difference in points, with its interval where there are enough photographs."""
    value = f"{tables.points(line['value'])} points"
    if line["verdict"] not in VERDICTS:
        return f"{value} from the best baseline ({tables.title(line['baseline'])})"
    low = tables.points(line["low"])
    high = tables.points(line["high"])
    return f"{value} (95 % interval {low} .. {high}, {line.get('clusters', 0)} {content.unit})"


def negative_matches(
    metrics: Mapping[str, Optional[float]], matcher: str
) -> Optional[Tuple[float, float]]:
    """Matches on negative pairs: mean and 95th percentile; None without such pairs."""
    mean, high = (metrics.get(f"{matcher}.unrelated_{name}") for name in ("matches", "matches_p95"))
    return None if mean is None or high is None else (mean, high)


def note(content: Content, folder: str, run_id: str) -> str:
    """Description of an MLflow run in Markdown: verdict, table, two pictures from its artifacts in
    `folder`.
    """
    lines = [" ".join(verdict(content)), note_table(content)]
    notes = " ".join(f"{line.rstrip('.')}." for line in content.notes)
    lines.append(
        f"{content.title}; {notes} Metrics {tables.notes(content.metrics)[0]}; "
        "unrelated: matches for photographs with nothing in common. "
        f"All metrics: `{folder}/matchers.csv`; pictures and curves: `{folder}/index.html`."
    )
    for picture in content.pictures:
        if picture.name in PICTURES:
            place = f"get-artifact?path={folder}/pictures/{picture.name}.png&run_uuid={run_id}"
            lines.append(
                f"**{PICTURES[picture.name]}.** {picture.caption}\n\n![{picture.name}]({place})"
            )
    return "\n\n".join(lines)


def note_table(content: Content) -> str:
    """A line per matcher in Markdown. Cells contain non-breaking spaces, since MLflow gives them no
    margin.
    """
    area = leading_area(content)
    estimator = tables.columns_of(content.metrics)[f"AUC {area[len('auc_') : -len('_5')].upper()}"]
    names = dict.fromkeys((area, tables.aligned_counterpart(area), estimator[-1], *tables.SHORT))
    shown = [name for name in names if f"{OURS}.{name}" in content.metrics]
    heads = {name: tables.SHORT.get(name) or tables.metric_title(name) for name in shown}
    rows = [["", *heads.values(), "unrelated"]]
    for matcher in tables.matchers_in(content.metrics):
        wrong = negative_matches(content.metrics, matcher)
        cells = [tables.percent(content.metrics.get(f"{matcher}.{name}")) for name in shown]
        rows.append([tables.title(matcher), *cells, f"{wrong[0]:.1f}" if wrong else "-"])
    head, *body = [
        f"| {' | '.join(f'{cell}   '.replace(' ', '&nbsp;') for cell in row)} |" for row in rows
    ]
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])
