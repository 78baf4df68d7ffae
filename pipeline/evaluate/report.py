"""Report an evaluation: the verdict, the printed tables, the files, the page, the note in MLflow.

Every table is a slice of the metrics (`metrics.summarize`) or of the long table of all pairs.
The page needs no other file. Its charts are drawn by matplotlib, and its text is `page.html`.
"""

# pandas has no types. A type checker guesses them from its source, mostly wrongly.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportAssignmentType=false
# pyright: reportIndexIssue=false

from __future__ import annotations

import base64
import functools
import io
import itertools
import math
import shutil
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import jinja2
import matplotlib
import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure

from pipeline.evaluate import metrics
from pipeline.evaluate.matchers import INITIAL, OURS, RATIO_TEST
from pipeline.evaluate.metrics import KEY, WITHIN, is_posed, leading, name_of, recall_of
from superglue_sift import drawing
from superglue_sift.files import write_atomic, write_json

SUMMARY = "summary.txt"
TEXT = "report.txt"
PAGE = "index.html"
TITLES = {
    OURS: "SuperGlue",
    RATIO_TEST: "ratio test, mutual",
    "mutual_nn": "mutual NN",
    "nn": "NN",
    "true_matches": "true matches (bound)",
    "shipped": "shipped weights",
    INITIAL: "initial weights",
}
# Names in a sentence
CALLED = {
    RATIO_TEST: "the ratio test",
    "shipped": "the shipped weights",
    INITIAL: "the initial weights",
}
# What the metric of `recall_of` means, in plain words
RECALLED = {"recall": "true matches found", "matching_score": "of keypoints"}
# The clause of each verdict in a sentence about metrics, in the order of the sentence.
CLAUSES = {
    "better": "{} better",
    "worse": "{} worse",
    "equal": "{} equal",
    "no difference found": "no difference found in {}",
}
# Metrics without an estimator, in the order of the columns: heading, and what it means
SHORT = {
    "precision": ("P", "precision"),
    "recall": ("R", "recall"),
    "matching_score": ("MS", "matching score"),
    "recall_at_ratio_precision": ("R@P", "recall at the ratio test's precision"),
    "matching_score_at_ratio_precision": ("MS@P", "MS at the ratio test's precision"),
}
KINDS = {False: "as detected", True: "refined"}  # words for the two kinds of matches
# A value in a file has 4 decimals and at most 4 significant digits. Intervals of some hundred pairs
# are wider than a tenth of a percent. Further digits differ between processors and mean nothing.
# Tables are printed from values with more digits, so that no value is rounded twice.
DIGITS = 4
COUNTS = ("keypoints0", "keypoints1", "matches", "correct", "true_matches", "found")
WIDTH = 100  # columns of the printed tables

# One colour for each matcher of `TITLES` on every chart, then those of further matchers. All
# are readable on a light and on a dark page.
COLOURS = ("#10a070", "#e0524a", "#4a86e8", "#c08a1e", "#8c8c8c", "#2aa5b5", "#a8745a")
FURTHER = ("#9a6fe0", "#d264a8", "#7d9a2d", "#5c73a8")
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
FULL_TRAINING = "make repro PRESET=coco2017-val"  # the shortest one from scratch on COCO
Chart = Tuple[Markup, str]  # a chart and its caption


class Results(NamedTuple):
    """Everything that a report shows.

    Attributes:
        title: where the pairs come from.
        unit: plural noun of the scenes that intervals resample, for example "photographs".
        table: the long table of all pairs.
        values: what each pair contributes to each metric, from `metrics.values_of_pairs`.
        metrics: from `metrics.summarize`, named by (matcher, metric, estimator, refined).
        differences: from `metrics.compare`, named by (metric, estimator, refined, baseline).
        robustness: value and pairs, named by (condition, level, matcher, metric, estimator,
            refined).
        calibration: from `metrics.calibration`.
        bad: (file, reason) of images that could not be read.
        notes: sentences for the report.
        protocol: the content of protocol.json.
        pictures: name, caption and (H, W, 3) uint8 BGR. The first one is for the first screen.
    """

    title: str
    unit: str
    table: pd.DataFrame
    values: pd.DataFrame
    metrics: pd.DataFrame
    differences: pd.DataFrame
    robustness: pd.DataFrame
    calibration: pd.DataFrame
    bad: Sequence[Tuple[str, str]] = ()
    notes: Sequence[str] = ()
    protocol: Mapping[str, Any] = {}
    pictures: Sequence[Tuple[str, str, np.ndarray]] = ()


def title(matcher: str) -> str:
    """Return the name of a matcher in tables and charts."""
    return TITLES.get(matcher, matcher)


def percent(value: float) -> str:
    """Return a fraction in percent: 0.5367 becomes "53.7", and NaN "-"."""
    return "-" if math.isnan(value) else f"{100 * value:.1f}"


def points(value: float) -> str:
    """Return a difference in percentage points: 0.0123 becomes "+1.2". Zero has no minus."""
    return f"{round(100 * value, 1) + 0.0:+.1f}"


def span(row: Mapping[str, Any]) -> str:
    """Return the 95 % interval of a difference, such as "+0.7 .. +2.4"."""
    return "-" if row["verdict"] == "too few" else f"{points(row['low'])} .. {points(row['high'])}"


def start_of(models: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the name of the compared model that the evaluated one was trained from, or "".

    `models` is from protocol.json.
    """
    digest = models.get(OURS, {}).get("initial_weights")
    for name in models:
        if digest and name != OURS and models[name]["sha256"].startswith(digest):
            return name
    return ""


def reference_of(models: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the name of the model that is shown beside the evaluated one, or "".

    It is the one that the evaluated model was trained from, otherwise the first other one.
    """
    return start_of(models) or next((name for name in models if name != OURS), "")


def duels(results: Results, other: str = RATIO_TEST) -> List[Dict[str, Any]]:
    """Compare the network with another matcher: three metrics for the first screen, and the AUC.

    Each row has a label, a detail, the rows `ours` and `theirs` of the metrics (value, low, high),
    and `gain`, the row of their difference.
    """
    what, unit = ("poses", "degrees") if is_posed(results.table) else ("homographies", "px")
    lead = leading(results.table)
    recall = recall_of(results.table)
    # Each row has a label, a detail, a metric and an estimator.
    asked = (
        ("precision", "correct matches", "precision", ""),
        (recall.replace("_", " "), RECALLED[recall], recall, ""),
        (what, f"within {WITHIN} {unit}", f"within_{WITHIN}", lead),
        (what, "AUC@5", "auc_5", lead),
    )
    return [
        {
            "label": label,
            "detail": detail,
            "ours": results.metrics.loc[(OURS, metric, estimator, False)],
            "theirs": results.metrics.loc[(other, metric, estimator, False)],
            "gain": results.differences.loc[(metric, estimator, False, other)],
        }
        for label, detail, metric, estimator in asked
    ]


def verdict(results: Results, other: str = RATIO_TEST) -> str:
    """Return the comparison with another matcher in a sentence of about 15 words.

    Metrics with the same verdict stand together, the better ones first.
    """
    count = results.values.index.nunique()
    least = metrics.MIN_SCENES
    if count < least:
        return f"Too few {results.unit} to judge: {count}, and at least {least} are needed."
    labels: Dict[str, List[str]] = {}
    for duel in duels(results, other)[:3]:
        labels.setdefault(duel["gain"]["verdict"], []).append(duel["label"])
    clauses = [
        clause.format(join_words(labels[verdict]))
        for verdict, clause in CLAUSES.items()
        if verdict in labels
    ]
    return f"Compared with {CALLED.get(other, other)}: {'; '.join(clauses)}."


def more_verdict(results: Results) -> str:
    """Return the comparison of a fine-tuned model with the weights it started from, or ""."""
    start = start_of(results.protocol.get("models", {}))
    is_judged = results.values.index.nunique() >= metrics.MIN_SCENES
    return verdict(results, start) if start and is_judged else ""


def compare_trainings(results: Results) -> List[str]:
    """Say on how much the network and the model beside it were trained, and what trains more.

    There is no line if there is no such model, or if its photographs are not known.
    """
    models = results.protocol.get("models", {})
    other = reference_of(models)
    counts = [models.get(name, {}).get("photographs") for name in (OURS, other)]
    if None in counts:
        return []
    ours, theirs = counts
    name = CALLED.get(other, other)
    steps = f"with {models[OURS]['steps']:,} steps " if models[OURS]["steps"] else ""
    # The photographs of a model include those of the weights that it started from.
    if start_of(models):
        return [f"SuperGlue started from {name}, {steps}on {ours - theirs:,} more photographs."]
    # The steps of a model that started from other weights are only a part of its training.
    steps = "" if models[OURS]["initial_weights"] else steps
    lines = [f"SuperGlue was trained {steps}on {ours:,} photographs, {name} on {theirs:,}."]
    if ours < theirs:
        lines.append(f"A full training on COCO, for a GPU: {FULL_TRAINING}")
    return lines


def join_words(words: Sequence[str]) -> str:
    """Join words as a sentence does: "precision", "precision and recall", "a, b and c"."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def headline(results: Results) -> Dict[str, float]:
    """Return the ten metrics with short names, in percent, for DVC (summary.json) and MLflow.

    Three metrics come with their gain over the best baseline: the leading AUC, the same AUC of
    refined matches, and recall (for poses: matching score) at the ratio test's precision. The
    others come without: the fraction of pairs within WITHIN px, precision, recall, and the number
    of matches on negative pairs.
    """
    lead = leading(results.table)
    recall = recall_of(results.table)
    ours = results.metrics["value"][OURS]
    asked = {
        "auc_5": ("auc_5", lead, False),
        "auc_5_refined": ("auc_5", lead, True),
        f"{recall}_at_p": (f"{recall}_at_ratio_precision", "", False),
        f"within_{WITHIN}": (f"within_{WITHIN}", lead, False),
        "precision": ("precision", "", False),
        recall: (recall, "", False),
        "negative_matches": ("negative_matches", "", False),
    }
    # Poses have no negative pairs, and --no-refine leaves out refined matches.
    values = {}
    # The first difference of each metric is that from the best baseline.
    gains = results.differences["value"].groupby(KEY).first()
    for place, (name, key) in enumerate(asked.items()):
        unit = 1 if name == "negative_matches" else 100
        if key in ours:
            values[name] = round(unit * float(ours[key]), 2)
            if place < 3:
                values[f"{name}_gain"] = round(unit * float(gains[key]), 2) + 0.0
    return values


def matchers_of(results: Results) -> List[str]:
    """Return the matchers in the order of tables and charts."""
    return list(results.table["matcher"].unique())


def text_table(results: Results, columns: Mapping[tuple, Any]) -> pd.DataFrame:
    """Make a table of values in percent, one line per matcher, from columns {key: heading}."""
    values = results.metrics["value"].unstack(KEY)
    table = values.loc[matchers_of(results), list(columns)].map(percent)
    return pd.DataFrame(table.to_numpy(), map(title, table.index), list(columns.values()))


def matches_table(results: Results) -> pd.DataFrame:
    """Make the table of the metrics of matches: their mean number, and the metrics of SHORT."""
    known = results.metrics.index.unique("metric")
    shown = {(name, "", False): short for name, (short, _) in SHORT.items() if name in known}
    table = text_table(results, shown)
    # A mean number is no fraction.
    counts = results.metrics["value"].xs(("matches", "", False), level=KEY)
    table.insert(0, "matches", counts.map("{:.0f}".format).to_numpy())
    return table


def area_tables(results: Results) -> List[pd.DataFrame]:
    """Make a table of the AUC of matches as detected, and one of refined matches.

    A column belongs to (estimator, limit).
    """
    tables = []
    for refined in results.table["refined"].unique():
        # (matchers, estimators x limits)
        heads = {
            key: (key[1].upper(), f"@{key[0][4:]}")
            for key in results.metrics.loc[OURS].index
            if key[0].startswith("auc_") and key[2] == refined
        }
        table = text_table(results, heads)
        names = [f"AUC, {KINDS[refined]}", ""]
        tables.append(table.set_axis(pd.MultiIndex.from_tuples(table, names=names), axis=1))
    return tables


def duels_table(results: Results, other: str = RATIO_TEST) -> pd.DataFrame:
    """Make the table of `duels`: both values, difference, interval and verdict."""
    rows = {
        f"{duel['label']}, {duel['detail']}": (
            percent(duel["ours"]["value"]),
            percent(duel["theirs"]["value"]),
            points(duel["gain"]["value"]),
            span(duel["gain"]),
            duel["gain"]["verdict"],
        )
        for duel in duels(results, other)
    }
    # The only other matcher is what a fine-tuned model was before.
    name = "ratio test" if other == RATIO_TEST else "before"
    heads = ["SuperGlue", name, "difference", "95 % interval", ""]
    table = pd.DataFrame.from_dict(rows, orient="index", columns=heads)
    return table.rename_axis(columns="in %")


def scenes_table(results: Results) -> pd.DataFrame:
    """Make the table of scenes with the AUC@3 of the first estimator."""
    lead = leading(results.table)
    # The values of all pairs are named by their scenes.
    values = results.values.xs(("auc_3", lead, False), axis=1, level=KEY)
    by_scene = values.groupby(level="scene", sort=False)
    means = by_scene.mean().map(percent).rename(columns=title)
    means.insert(0, "pairs", by_scene.size())
    return means.rename_axis(index=None, columns=f"AUC@3 {lead.upper()}")


def remarks(results: Results) -> List[str]:
    """Return the lines below the first tables: their columns, and what the pairs and models are."""
    # Explain only the columns that the table has.
    known = results.metrics.index.unique("metric")
    words = [f"{short}: {meaning}" for name, (short, meaning) in SHORT.items() if name in known]
    lines = ["; ".join(words)]
    # A training may keep the weights that it started from.
    values = results.values
    lines += [
        f"The trained model is the same as {name}: all its values are equal."
        for name in results.protocol.get("models", {})
        if name != OURS and values[name].equals(values[OURS])
    ]
    if results.bad:
        lines.append(f"{len(results.bad)} images could not be read: see bad_images.csv.")
    return [*lines, *results.notes]


def more_remarks(results: Results) -> List[str]:
    """Return the lines below the tables of AUC: their columns, and matches of unrelated pairs."""
    what, unit = ("pose", "degrees") if is_posed(results.table) else ("mean corner", "px")
    area = f"AUC@T: area under the fraction of pairs with a {what} error of at most T {unit}"
    refined = "refined: matches refined by the pixels around them, of every matcher alike"
    lines = [area, *[refined] * int(results.table["refined"].any())]
    # Every match is wrong between two photographs with nothing in common.
    key = "negative_matches", "", False
    if (OURS, *key) in results.metrics.index:
        ours = results.metrics.loc[(OURS, *key)]
        theirs = results.metrics.loc[(RATIO_TEST, *key)]
        lines.append(
            f"Two photographs with nothing in common have {ours['value']:.1f} matches, by the ratio"
            f" test {theirs['value']:.1f} ({ours['pairs']:.0f} pairs)."
        )
    return lines


def show(table: pd.DataFrame) -> str:
    """Return a table as it is printed."""
    return table.to_string(line_width=WIDTH)


def summary(results: Results) -> str:
    """Return the first part of the report, which a command prints at its end."""
    title = f"{results.title}, {len(results.values)} pairs"
    blocks = [
        [verdict(results), title, show(duels_table(results))],
        [show(matches_table(results)), *remarks(results), *compare_trainings(results)],
    ]
    # A fine-tuned model is also compared with the weights it started from.
    sentence = more_verdict(results)
    if sentence:
        start = start_of(results.protocol["models"])
        blocks.insert(1, [sentence, show(duels_table(results, start))])
    return "\n\n".join(map("\n".join, blocks))


def text(results: Results) -> str:
    """Return the whole report as text: the summary, and the tables of AUC."""
    # The tables of AUC stand below each other without a gap, since they have the same columns.
    areas = [*map(show, area_tables(results)), *more_remarks(results)]
    blocks = [summary(results), "\n".join(areas)]
    if results.unit == "sequences":
        blocks.insert(1, show(scenes_table(results)))
    return "\n\n".join(blocks)


def note(results: Results, folder: str) -> str:
    """Return the description of an MLflow run in Markdown: the verdict and the first table.

    `folder` is the folder of the report in the artifacts of the run.
    """
    title = f"{results.title}, {len(results.values)} pairs"
    table = duels_table(results).reset_index(names="in %")
    cells = [table.columns, ["---"] * len(table.columns), *table.itertuples(index=False)]
    rows = "\n".join(f"| {' | '.join(row)} |" for row in cells)
    sentences = " ".join(filter(None, (verdict(results), more_verdict(results))))
    return f"**{sentences}** {title}: `{folder}/{PAGE}`.\n\n{rows}"


def round_number(value: Any) -> Any:
    """Round a number to DIGITS digits. Return anything else unchanged."""
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    return round(float(f"{value:.{DIGITS}g}"), DIGITS)


def tables(results: Results) -> Dict[str, pd.DataFrame]:
    """Return the content of each CSV file by its name, without ".csv"."""

    def join_names(frame: pd.DataFrame) -> pd.DataFrame:
        """Put one name in the place of metric, estimator and refined."""
        flat = frame.reset_index()
        flat["metric"] = [name_of(*key) for key in flat[KEY].itertuples(index=False, name=None)]
        return flat.drop(columns=["estimator", "refined"])

    # Make one line for each pair and matcher, in the order of the table.
    table = join_names(results.table)
    index = ["number", "pair", "scene", "matcher"]
    pairs = table.pivot(index=index, columns="metric", values="value")[table["metric"].unique()]
    pairs = pairs.reset_index().drop(columns="number")
    pairs = pairs.astype({name: "Int64" for name in COUNTS if name in pairs})
    found = {
        "pairs": pairs,
        "intervals": join_names(results.metrics),
        "differences": join_names(results.differences),
        "robustness": join_names(results.robustness) if len(results.robustness) else pd.DataFrame(),
        "bad_images": pd.DataFrame(results.bad, columns=["file", "reason"]),
    }
    curves = {
        name_of(*key): curve.reset_index()
        for key, curve in metrics.error_curves(results.table).items()
    }
    if not is_posed(results.table):
        curves["calibration"] = results.calibration
    return {**found, **{f"curves/{name}": curve for name, curve in curves.items()}}


def write(out: Path, results: Results, page: str) -> None:
    """Write all files, and remove the files of an earlier evaluation."""
    # Write the metrics for DVC and for programs.
    values = {
        f"{matcher}.{name_of(*key)}": None if math.isnan(value) else round_number(value)
        for (matcher, *key), value in results.metrics["value"].items()
    }
    write_json(out / "metrics.json", values, indent=2)
    write_json(out / "summary.json", headline(results), indent=2)
    write_json(out / "protocol.json", results.protocol, indent=2)
    # Remove the curves and pictures of an earlier evaluation.
    for folder in ("curves", "pictures"):
        shutil.rmtree(out / folder, ignore_errors=True)
        (out / folder).mkdir(parents=True)
    for name, frame in tables(results).items():
        content = frame.map(round_number).to_csv(index=False, lineterminator="\n")
        write_atomic(out / f"{name}.csv", content)
    for name, _, pixels in results.pictures:
        drawing.Picture(pixels).save(out / "pictures" / f"{name}.png")
    # Write the report as text and as a page.
    write_atomic(out / SUMMARY, summary(results) + "\n")
    write_atomic(out / TEXT, text(results) + "\n")
    write_atomic(out / PAGE, page)


# --- the page


def colours_of(matchers: Sequence[str]) -> Dict[str, str]:
    """Return the colour of each matcher."""
    # A matcher of TITLES keeps its colour whether or not the others are shown.
    own = dict(zip(TITLES, COLOURS))
    further = itertools.cycle(FURTHER)
    return {name: own.get(name) or next(further) for name in matchers}


def line_chart(
    frame: pd.DataFrame, colours: Mapping[str, str], label: str, diagonal: bool = False
) -> Markup:
    """Draw an `img` of an SVG with one line per column, the network last and thicker.

    The index of `frame` is x, and its name the label of the x axis. Words are placed at 0, 1, ...
    `label` is the label of y, which is from 0 to 1. `diagonal` adds a dashed diagonal.
    """
    with matplotlib.rc_context(STYLE):
        # pyplot would open a window, and would keep each figure in memory.
        figure = Figure(figsize=(4.6, 3.1))
        # Margins are fixed, because a layout that measures the text takes as long as drawing.
        axes = figure.add_axes((0.14, 0.17, 0.84, 0.8))
        if diagonal:
            axes.plot((0, 1), (0, 1), color=INK, alpha=0.6, linestyle="--", linewidth=1)
        # The network is drawn last, so that its line lies above the others.
        for name in sorted(frame, key=lambda each: each == OURS):
            width = 2.6 if name == OURS else 1.4
            axes.plot(frame.index, frame[name], color=colours[name], linewidth=width)
        axes.set(xlabel=frame.index.name, ylabel=label, ylim=(0, 1.02))
        # The SVG has no date, so equal charts give equal bytes.
        svg = io.BytesIO()
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    source = address("svg+xml", svg.getvalue())
    return Markup('<img src="{}" alt="{} over {}">').format(source, label, frame.index.name)


def address(kind: str, data: bytes) -> str:
    """Return the bytes of an image as an address, so that the page needs no other file."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"


def error_charts(results: Results, colours: Mapping[str, str]) -> List[Chart]:
    """Draw the curves whose areas are the AUC metrics, for each estimator and kind of matches."""
    axis = "pose error, degrees" if is_posed(results.table) else "corner error, px"
    charts = []
    for (_, estimator, refined), curve in metrics.error_curves(results.table).items():
        chart = line_chart(curve.rename_axis(axis), colours, "fraction of pairs")
        charts.append((chart, f"{estimator.upper()}, matches {KINDS[refined]}"))
    return charts


def calibration_chart(results: Results, colours: Mapping[str, str]) -> Chart:
    """Draw the fraction of correct matches over the network's confidence."""
    # (bins,): only the network has a line
    bins = results.calibration.set_index("confidence")[["precision"]].set_axis([OURS], axis=1)
    frame = bins.rename_axis("confidence of a match")
    words = "Calibration: on the dashed line, a match of confidence 0.8 is correct in 80 % of cases"
    return line_chart(frame, colours, "fraction of correct ones", diagonal=True), words


def robustness_charts(results: Results, colours: Mapping[str, str]) -> List[Chart]:
    """Draw recall and the leading AUC at each level of each condition.

    The lines are the network and the ratio test.
    """
    lead = leading(results.table)
    shown = (("recall", "", "recall"), ("auc_5", lead, f"AUC@5 {lead.upper()}"))
    charts = []
    for name, part in results.robustness.groupby("condition", sort=False):
        for metric, estimator, label in shown:
            own = part.xs((metric, estimator, False), level=KEY)
            # Each matcher has a line over the levels, which are words at equal distances.
            frame = own["value"].unstack("matcher").sort_index()
            frame = frame.set_axis([f"{level:g}" for _, level in frame.index]).rename_axis(name)
            # Small photographs have no pair at the last levels of zoom.
            caption = f"{label}; at least {own['pairs'].min()} pairs at each level"
            charts.append((line_chart(frame, colours, label), caption))
    return charts


def render(results: Results, curves: Optional[Path] = None) -> str:
    """Render the page as HTML text.

    `curves` is the SVG of the learning curve. If the file is missing, the page leaves it out.
    """
    # Draw the charts, each of which is a text of some 20 kB.
    colours = colours_of(matchers_of(results))
    errors = error_charts(results, colours)
    # The leading estimator comes first, with detected and refined matches. The others follow.
    lead = leading(results.table).upper()
    charts = [each for each in errors if each[1].startswith(lead)]
    more_charts = [each for each in errors if each not in charts]
    if not is_posed(results.table):
        charts.append(calibration_chart(results, colours))
    reference = reference_of(results.protocol["models"])
    # StrictUndefined: a name that is wrong in the template is an error, not an empty text.
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    html = functools.partial(pd.DataFrame.to_html, border=0)
    environment.filters.update(percent=percent, points=points, title=title, html=html)
    environment.filters["called"] = lambda name: CALLED.get(name, name)
    return environment.get_template("page.html").render(
        results=results,
        verdict=verdict(results),
        more_verdict=more_verdict(results),
        duels=duels(results)[:3],
        reference=reference,
        reference_duels=duels(results, reference)[:3] if reference else [],
        trainings=compare_trainings(results),
        # The page has JPEG, which is smaller than the PNG of the folder.
        pictures=[
            (address("jpeg", drawing.Picture(pixels).encode()), caption)
            for _, caption, pixels in results.pictures
        ],
        learning=address("svg+xml", curves.read_bytes()) if curves and curves.is_file() else "",
        colours=colours,
        charts=charts,
        more_charts=more_charts,
        robustness=robustness_charts(results, colours) if len(results.robustness) else [],
        matches_table=matches_table(results),
        remarks=[*remarks(results), *more_remarks(results)],
        area_tables=area_tables(results),
    )
