"""Report an evaluation: headlines, printed tables, files, the page, the note in MLflow.

Only `write_files` writes files; the other functions return text or tables. Every table is a slice
of the metrics (`metrics.summarize`) or of the long table of all pairs. The page needs no other
file. Its text is `page.html`, and `charts` draws its charts.
"""

# pandas has no types. A type checker guesses them from its source, mostly wrongly.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportAssignmentType=false
# pyright: reportIndexIssue=false

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import jinja2
import numpy as np
import pandas as pd

from pipeline.evaluate import PAGE, SUMMARY, TEXT, charts, metrics
from pipeline.evaluate.matchers import OURS, RATIO_TEST
from pipeline.evaluate.metrics import (
    KEY,
    WITHIN,
    choose_recall_metric,
    get_leading_estimator,
    has_pose_errors,
    name_metric,
)
from superglue_sift import drawing
from superglue_sift.files import write_atomically, write_json

PROTOCOL = "protocol.json"
# What the metric of `choose_recall_metric` means, in plain words
RECALL_MEANINGS = {"recall": "true matches found", "matching_score": "of keypoints"}
# Metrics without an estimator, in the order of the columns: the heading, and its meaning
HEADINGS = {
    "precision": ("P", "precision"),
    "recall": ("R", "recall"),
    "matching_score": ("MS", "matching score"),
    "recall_at_ratio_precision": ("R@P", "recall at the ratio test's precision"),
    "matching_score_at_ratio_precision": ("MS@P", "MS at the ratio test's precision"),
}
# A value in a file has 4 decimals and at most 4 significant digits. The interval of some hundred
# pairs is wider than a tenth of a percent, so further digits mean nothing, and they differ between
# processors. The printed tables are made from the full values, so that no value is rounded twice.
DIGITS = 4
COUNTS = ("keypoints0", "keypoints1", "matches", "correct", "true_matches", "found")
WIDTH = 100  # Columns of the printed tables

KEPT = "Training kept the initial weights: no later step was better in validation."


class Results(NamedTuple):
    """Everything that a report shows.

    Attributes:
        title: where the pairs come from.
        unit: the plural noun for what intervals resample, for example "photographs".
        table: the long table of all pairs.
        values: what each pair contributes to each metric, from `metrics.compute_pair_values`.
        metrics: the table of `metrics.summarize`, with a row for each (matcher, metric, estimator,
            refined).
        differences: the table of `metrics.compare`, with a row for each (metric, estimator,
            refined, baseline).
        robustness: mean value and number of pairs, with a row for each (condition, level, matcher,
            metric, estimator, refined).
        calibration: the table of `metrics.compute_calibration`.
        precision_recall: the tables of `metrics.compute_precision_recall_curve`, of the network and
            the ratio test, by matcher.
        bad_images: (scene, reason) of each scene whose images could not be used.
        notes: sentences for the report.
        protocol: the content of protocol.json.
        pictures: name, caption and pixels (H, W, 3) uint8 BGR of each picture. The first picture is
            shown on the first screen.
    """

    title: str
    unit: str
    table: pd.DataFrame
    values: pd.DataFrame
    metrics: pd.DataFrame
    differences: pd.DataFrame
    robustness: pd.DataFrame
    calibration: pd.DataFrame
    precision_recall: pd.DataFrame
    bad_images: Sequence[Tuple[str, str]] = ()
    notes: Sequence[str] = ()
    protocol: Mapping[str, Any] = {}
    pictures: Sequence[Tuple[str, str, np.ndarray]] = ()


def format_percent(value: float) -> str:
    """Return a fraction in percent: 0.5367 becomes "53.7", and NaN "-"."""
    return "-" if math.isnan(value) else f"{100 * value:.1f}"


def format_points(value: float) -> str:
    """Return a difference in percentage points: 0.0123 becomes "+1.2". Zero has no minus."""
    return f"{round(100 * value, 1) + 0.0:+.1f}"


def format_interval(row: Mapping[str, Any]) -> str:
    """Return the 95 % interval of a difference, such as "+0.7 .. +2.4".

    `row` is a row of `Results.differences`.
    """
    if row["verdict"] == "too few":
        return "-"
    return f"{format_points(row['low'])} .. {format_points(row['high'])}"


def compare_matchers(results: Results) -> List[Dict[str, Any]]:
    """Compare the network with the ratio test: three metrics for the first screen, and the AUC.

    Returns:
        A dict for each of the four metrics. `label` and `detail` are its words. `ours` and
        `baseline` are its rows (value, low, high) of the two matchers, and `gain` is the row of
        their difference.
    """
    what, unit = ("poses", "degrees") if has_pose_errors(results.table) else ("homographies", "px")
    leading = get_leading_estimator(results.table)
    recall = choose_recall_metric(results.table)
    # Each row has a label, a detail, a metric and an estimator.
    rows = (
        ("precision", "correct matches", "precision", ""),
        (recall.replace("_", " "), RECALL_MEANINGS[recall], recall, ""),
        (what, f"within {WITHIN} {unit}", f"within_{WITHIN}", leading),
        (what, "AUC@5", "auc_5", leading),
    )
    return [
        {
            "label": label,
            "detail": detail,
            "ours": results.metrics.loc[(OURS, metric, estimator, False)],
            "baseline": results.metrics.loc[(RATIO_TEST, metric, estimator, False)],
            "gain": results.differences.loc[(metric, estimator, False, RATIO_TEST)],
        }
        for label, detail, metric, estimator in rows
    ]


def make_headlines(results: Results) -> List[str]:
    """Return the first lines of the report: three verdicts in one line.

    If training kept the initial weights, a line before says so.
    """
    count = results.values.index.nunique()
    verdicts = [f"{row['label']} {row['gain']['verdict']}" for row in compare_matchers(results)[:3]]
    line = f"Against the ratio test: {', '.join(verdicts)}."
    if count < metrics.MIN_SCENES:
        line = f"Too few {results.unit} for a verdict: {count} of at least {metrics.MIN_SCENES}."
    has_kept = results.protocol["models"][OURS]["step"] == 0
    return [*[KEPT] * has_kept, line]


def select_headline(results: Results) -> Dict[str, float]:
    """Return the ten metrics with short names, in percent, for DVC (summary.json) and MLflow.

    Three metrics come with their gain over the best baseline: the leading AUC, the same AUC of
    refined matches, and recall (for poses: matching score) at the ratio test's precision. The
    others come without: the fraction of pairs within WITHIN px, precision, recall, and the number
    of matches on negative pairs.
    """
    leading = get_leading_estimator(results.table)
    recall = choose_recall_metric(results.table)
    ours = results.metrics["value"][OURS]
    keys = {
        "auc_5": ("auc_5", leading, False),
        "auc_5_refined": ("auc_5", leading, True),
        f"{recall}_at_p": (f"{recall}_at_ratio_precision", "", False),
        f"within_{WITHIN}": (f"within_{WITHIN}", leading, False),
        "precision": ("precision", "", False),
        recall: (recall, "", False),
        "negative_matches": ("negative_matches", "", False),
    }
    # Poses have no negative pairs, and --no-refine leaves out refined matches.
    values = {}
    # The first difference of each metric is that from the best baseline.
    gains = results.differences["value"].groupby(KEY).first()
    for index, (name, key) in enumerate(keys.items()):
        unit = 1 if name == "negative_matches" else 100
        if key in ours:
            values[name] = round(unit * float(ours[key]), 2)
            if index < 3:
                values[f"{name}_gain"] = round(unit * float(gains[key]), 2) + 0.0
    return values


def list_matchers(results: Results) -> List[str]:
    """Return the matchers in the order of tables and charts."""
    return list(results.table["matcher"].unique())


def make_percent_table(results: Results, columns: Mapping[tuple, Any]) -> pd.DataFrame:
    """Make a table of metrics in percent, with a row for each matcher.

    `columns` has the heading of each column by its key (metric, estimator, refined).
    """
    values = results.metrics["value"].unstack(KEY)
    table = values.loc[list_matchers(results), list(columns)].map(format_percent)
    return pd.DataFrame(
        table.to_numpy(), map(charts.get_title, table.index), list(columns.values())
    )


def make_matches_table(results: Results) -> pd.DataFrame:
    """Make the table of the mean number of matches and of the metrics of HEADINGS."""
    names = results.metrics.index.unique("metric")
    columns = {
        (name, "", False): heading for name, (heading, _) in HEADINGS.items() if name in names
    }
    table = make_percent_table(results, columns)
    # A mean count is not a percentage.
    counts = results.metrics["value"].xs(("matches", "", False), level=KEY)
    table.insert(0, "matches", counts.map("{:.0f}".format).to_numpy())
    return table


def make_auc_tables(results: Results) -> List[pd.DataFrame]:
    """Make a table of the AUC of matches as detected, and one of refined matches.

    A column belongs to (estimator, limit).
    """
    tables = []
    for refined in results.table["refined"].unique():
        # (matchers, estimators x limits)
        columns = {
            key: (key[1].upper(), f"@{key[0][4:]}")
            for key in results.metrics.loc[OURS].index
            if key[0].startswith("auc_") and key[2] == refined
        }
        table = make_percent_table(results, columns)
        names = [f"AUC, {charts.KINDS[refined]}", ""]
        tables.append(table.set_axis(pd.MultiIndex.from_tuples(table, names=names), axis=1))
    return tables


def make_comparison_table(results: Results) -> pd.DataFrame:
    """Make the table of `compare_matchers`: both values, difference, interval and verdict."""
    rows = {
        f"{row['label']}, {row['detail']}": (
            format_percent(row["ours"]["value"]),
            format_percent(row["baseline"]["value"]),
            format_points(row["gain"]["value"]),
            format_interval(row["gain"]),
            row["gain"]["verdict"],
        )
        for row in compare_matchers(results)
    }
    headings = ["SuperGlue", "ratio test", "difference", "95 % interval", ""]
    table = pd.DataFrame.from_dict(rows, orient="index", columns=headings)
    return table.rename_axis(columns="in %")


def make_scenes_table(results: Results) -> pd.DataFrame:
    """Make the table of the AUC@3 of the leading estimator, with a row for each scene."""
    leading = get_leading_estimator(results.table)
    values = results.values.xs(("auc_3", leading, False), axis=1, level=KEY)
    by_scene = values.groupby(level="scene", sort=False)
    means = by_scene.mean().map(format_percent).rename(columns=charts.get_title)
    means.insert(0, "pairs", by_scene.size())
    return means.rename_axis(index=None, columns=f"AUC@3 {leading.upper()}")


def make_remarks(results: Results) -> List[str]:
    """Return the lines below the first tables: their columns, and what the pairs and models are."""
    # Explain only the columns that the table has.
    names = results.metrics.index.unique("metric")
    words = [
        f"{heading}: {meaning}" for name, (heading, meaning) in HEADINGS.items() if name in names
    ]
    lines = ["; ".join(words)]
    if results.bad_images:
        lines.append(f"{len(results.bad_images)} images could not be read: see bad_images.csv.")
    return [*lines, *results.notes]


def make_auc_remarks(results: Results) -> List[str]:
    """Return the lines below the tables of AUC: their columns, and matches of unrelated pairs."""
    what, unit = ("pose", "degrees") if has_pose_errors(results.table) else ("mean corner", "px")
    area = f"AUC@T: area under the fraction of pairs with a {what} error of at most T {unit}"
    refined = "refined: matches refined by the pixels around them, of every matcher alike"
    lines = [area, *[refined] * int(results.table["refined"].any())]
    # Every match is wrong between two photographs with nothing in common.
    key = "negative_matches", "", False
    if (OURS, *key) in results.metrics.index:
        ours = results.metrics.loc[(OURS, *key)]
        ratio_test = results.metrics.loc[(RATIO_TEST, *key)]
        lines.append(
            f"Two photographs with nothing in common have {ours['value']:.1f} matches, by the ratio"
            f" test {ratio_test['value']:.1f} ({ours['pairs']:.0f} pairs)."
        )
    return lines


def format_table(table: pd.DataFrame) -> str:
    """Return the text of a table, with lines of at most WIDTH columns."""
    return table.to_string(line_width=WIDTH)


def make_summary(results: Results) -> str:
    """Return the first part of the report, which the command prints at its end."""
    title = f"{results.title}, {len(results.values)} pairs"
    blocks = [
        [*make_headlines(results), title, format_table(make_comparison_table(results))],
        [format_table(make_matches_table(results)), *make_remarks(results)],
    ]
    return "\n\n".join(map("\n".join, blocks))


def make_text(results: Results) -> str:
    """Return the whole report as text: the summary, and the tables of AUC."""
    # The tables of AUC stand below each other without a gap, since they have the same columns.
    auc_lines = [*map(format_table, make_auc_tables(results)), *make_auc_remarks(results)]
    blocks = [make_summary(results), "\n".join(auc_lines)]
    if results.unit == "sequences":
        blocks.insert(1, format_table(make_scenes_table(results)))
    return "\n\n".join(blocks)


def make_note(results: Results, folder: str) -> str:
    """Return the description of an MLflow run in Markdown: the headlines and the first table.

    `folder` is the path of the report in the artifacts of the run.
    """
    title = f"{results.title}, {len(results.values)} pairs"
    table = make_comparison_table(results).reset_index(names="in %")
    cells = [table.columns, ["---"] * len(table.columns), *table.itertuples(index=False)]
    rows = "\n".join(f"| {' | '.join(row)} |" for row in cells)
    return f"**{' '.join(make_headlines(results))}** {title}: `{folder}/{PAGE}`.\n\n{rows}"


def round_number(value: Any) -> Any:
    """Round a number to DIGITS digits. Return anything else unchanged."""
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    return round(float(f"{value:.{DIGITS}g}"), DIGITS)


def make_csv_tables(results: Results) -> Dict[str, pd.DataFrame]:
    """Return the content of each CSV file by its name, without ".csv"."""

    def join_names(frame: pd.DataFrame) -> pd.DataFrame:
        """Replace the columns metric, estimator and refined by one name."""
        table = frame.reset_index()
        keys = table[KEY].itertuples(index=False, name=None)
        table["metric"] = [name_metric(*key) for key in keys]
        return table.drop(columns=["estimator", "refined"])

    # Make one line for each pair and matcher, in the order of the table.
    table = join_names(results.table)
    index = ["number", "pair", "scene", "matcher"]
    pairs = table.pivot(index=index, columns="metric", values="value")[table["metric"].unique()]
    pairs = pairs.reset_index().drop(columns="number")
    pairs = pairs.astype({name: "Int64" for name in COUNTS if name in pairs})
    csv_tables = {
        "pairs": pairs,
        "intervals": join_names(results.metrics),
        "differences": join_names(results.differences),
        "robustness": join_names(results.robustness) if len(results.robustness) else pd.DataFrame(),
        "bad_images": pd.DataFrame(results.bad_images, columns=["file", "reason"]),
    }
    curves = {
        name_metric(*key): curve.reset_index()
        for key, curve in metrics.compute_error_curves(results.table).items()
    }
    curves["precision_recall"] = results.precision_recall.reset_index("matcher")
    if not has_pose_errors(results.table):
        curves["calibration"] = results.calibration
    return {**csv_tables, **{f"curves/{name}": curve for name, curve in curves.items()}}


def write_files(out: Path, results: Results, curves: Optional[Path] = None) -> None:
    """Write all files of the report. Remove the curves and pictures of an earlier report.

    Args:
        out: the folder of the report.
        results: the results of the evaluation.
        curves: the SVG of the learning curve for the page.
    """
    # The folder may be one of the user, with curves and pictures of other things.
    is_report = (out / PROTOCOL).is_file()
    for path in (*out.glob("curves/*.*"), *out.glob("pictures/*.png")) if is_report else ():
        path.unlink()
    for folder in ("curves", "pictures"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    # Write the metrics for DVC and for programs.
    values = {
        f"{matcher}.{name_metric(*key)}": None if math.isnan(value) else round_number(value)
        for (matcher, *key), value in results.metrics["value"].items()
    }
    write_json(out / "metrics.json", values, indent=2)
    write_json(out / "summary.json", select_headline(results), indent=2)
    write_json(out / PROTOCOL, results.protocol, indent=2)
    for name, frame in make_csv_tables(results).items():
        content = frame.map(round_number).to_csv(index=False, lineterminator="\n")
        write_atomically(out / f"{name}.csv", content)
    for name, _, pixels in results.pictures:
        drawing.Picture(pixels).save(out / "pictures" / f"{name}.png")
    chart = charts.draw_precision_recall_chart(
        results.precision_recall,
        results.metrics,
        choose_recall_metric(results.table),
        charts.assign_colors(list_matchers(results)),
    )
    write_atomically(out / "curves" / "precision_recall.svg", chart)
    # Write the report as text and as a page.
    write_atomically(out / SUMMARY, make_summary(results) + "\n")
    write_atomically(out / TEXT, make_text(results) + "\n")
    write_atomically(out / PAGE, render_page(results, chart, curves))


# --- the page


def render_page(results: Results, precision_recall: bytes, curves: Optional[Path] = None) -> str:
    """Render the page as HTML text.

    Args:
        results: the results of the evaluation.
        precision_recall: the SVG of `draw_precision_recall_chart`.
        curves: the SVG of the learning curve. If the file is missing, the page leaves it out.
    """
    colors = charts.assign_colors(list_matchers(results))
    leading = get_leading_estimator(results.table)
    # The leading estimator comes first, with detected and refined matches. The others follow.
    error_charts = charts.draw_error_charts(results.table, colors)
    caption = (
        "Precision over recall. The point is the threshold of all other metrics. At the left, most"
        " pairs have no match, and their precision is 0."
    )
    first_charts = [(charts.make_image(precision_recall, "precision over recall"), caption)]
    first_charts += [chart for (name, _), chart in error_charts.items() if name == leading]
    if not has_pose_errors(results.table):
        first_charts.append(charts.draw_calibration_chart(results.calibration, colors))
    robustness_charts = []
    if len(results.robustness):
        robustness_charts = charts.draw_robustness_charts(results.robustness, leading, colors)
    learning_curve = ""
    if curves and curves.is_file():
        learning_curve = charts.make_data_uri("svg+xml", curves.read_bytes())
    # StrictUndefined: a name that is wrong in the template is an error, not an empty text.
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    html = functools.partial(pd.DataFrame.to_html, border=0)
    environment.filters.update(
        percent=format_percent, points=format_points, title=charts.get_title, html=html
    )
    return environment.get_template("page.html").render(
        results=results,
        headlines=make_headlines(results),
        comparisons=compare_matchers(results)[:3],
        # The page has JPEG, which is smaller than the PNG of the folder.
        pictures=[
            (charts.make_data_uri("jpeg", drawing.Picture(pixels).encode()), caption)
            for _, caption, pixels in results.pictures
        ],
        learning=learning_curve,
        colors=colors,
        charts=first_charts,
        more_charts=[chart for (name, _), chart in error_charts.items() if name != leading],
        robustness=robustness_charts,
        matches_table=make_matches_table(results),
        remarks=[*make_remarks(results), *make_auc_remarks(results)],
        auc_tables=make_auc_tables(results),
    )
