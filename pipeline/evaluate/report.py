"""The report of an evaluation: its verdict, the printed tables, the files, the note in MLflow.

Every table is a slice of the metrics (`metrics.summarize`) or of the long table of all pairs. Only
here and in `metrics.name_of` do the names of metrics leave the program. `charts` makes the page.
"""

# pandas has no types. A type checker guesses them from its source, mostly wrongly.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportAssignmentType=false

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence, Tuple

import numpy as np
import pandas as pd

from pipeline.bootstrap import MIN_CLUSTERS, plain
from pipeline.evaluate import metrics
from pipeline.evaluate.matchers import OURS, RATIO_TEST
from pipeline.evaluate.metrics import KEY, RECALLS, WITHIN, is_posed, name_of
from pipeline.files import write_atomic, write_json
from superglue_sift import drawing

TEXT = "report.txt"
PAGE = "index.html"
TITLES = {
    OURS: "SuperGlue (ours)",
    "superglue_scene": "SuperGlue, scenes",
    "nn": "nearest neighbour",
    "mutual_nn": "mutual nearest neighbour",
    RATIO_TEST: "ratio test, mutual",
    "true_matches": "true matches (bound)",
}
SHORT = {  # headings of the metrics without an estimator, in the order of the columns
    "precision": "P",
    "recall": "R",
    "matching_score": "MS",
    "recall_at_ratio_precision": "R@P",
    "matching_score_at_ratio_precision": "MS@P",
}
WORDS = {
    "precision": "P: precision, correct matches",
    "recall": "R: recall, found matches",
    "matching_score": "MS: matching score, keypoints with a correct match",
    "recall_at_ratio_precision": "R@P: recall at the ratio test's precision",
    "matching_score_at_ratio_precision": "MS@P: MS at its precision",
}
ESTIMATORS = {
    "ransac": "RANSAC: cv2.findHomography with UsacParams, 3 px, then least squares",
    "dlt": "DLT: least squares over all matches, weighted by their confidence",
    "surest": "SUREST: least squares over the most confident matches",
    "pose": "POSE: cv2.findEssentialMat",
    "refined": "REFINED: PoseLib's LO-RANSAC",
}
DETECTED = "as detected"
REFINED = "aligned"  # word for refined matches, as in the names of metrics
# A value in a file has 4 decimals and at most 4 significant digits. Intervals of some hundred pairs
# are wider than a tenth of a percent. Further digits differ between processors and mean nothing.
# Tables are printed from values with more digits, so that no value is rounded twice.
DIGITS = 4
# Names of metrics that are whole numbers
COUNTS = r"(recall_|negative_)?pairs|keypoints[01]|correct|true_matches|found|estimated(_.*)?"
MIN_PAIRS = 20  # tables mark metrics with fewer pairs than this


class Results(NamedTuple):
    """Everything that a report shows.

    Attributes:
        title: where the pairs come from.
        unit: what intervals resample, for example photographs.
        scenes: the number of these units.
        table: the long table of all pairs.
        metrics, differences: from `metrics.compare`.
        robustness: rows of `metrics.condition`.
        calibration: from `metrics.calibration`.
        bad: (file, reason) of images that could not be read.
        notes: sentences for the report.
        protocol: the content of protocol.json.
        pictures: name, caption and (H, W, 3) uint8 BGR. The first one is for the first screen.
        same: further matchers whose matches are the same as those of the network.
    """

    title: str
    unit: str
    scenes: int
    table: pd.DataFrame
    metrics: pd.DataFrame
    differences: pd.DataFrame
    robustness: pd.DataFrame
    calibration: pd.DataFrame
    bad: Sequence[Tuple[str, str]] = ()
    notes: Sequence[str] = ()
    protocol: Mapping[str, Any] = {}
    pictures: Sequence[Tuple[str, str, np.ndarray]] = ()
    same: Sequence[str] = ()


def only(frame: pd.DataFrame, **wanted: Any) -> pd.DataFrame:
    """Return the rows that have these values in these columns."""
    for column, value in wanted.items():
        frame = frame[frame[column] == value]
    return frame


def title(matcher: str) -> str:
    """Return the name of a matcher in tables and charts."""
    return TITLES.get(matcher, matcher)


def percent(value: float) -> str:
    """Return a fraction in percent: 0.5367 becomes "53.7", and NaN "-"."""
    return "-" if math.isnan(value) else f"{100 * value:.1f}"


def points(value: float) -> str:
    """Return a difference in percentage points: 0.0123 becomes "+1.2", NaN "-". Zero has no
    minus."""
    return "-" if math.isnan(value) else f"{round(100 * value, 1) + 0.0:+.1f}"


def span(row: Mapping[str, Any]) -> str:
    """Return the 95 % interval of a difference, such as "+0.7 .. +2.4"."""
    return f"{points(row['low'])} .. {points(row['high'])}"


def heading(metric: str, estimator: str = "", refined: bool = False) -> str:
    """Return the heading of a metric, such as "R@P" or "AUC@5 RANSAC aligned"."""
    if not estimator:
        return SHORT.get(metric, metric)
    kind, _, limit = metric.partition("_")
    kind = {"auc": f"AUC@{limit}", "within": f"within {limit}"}.get(kind, metric)
    return f"{kind} {estimator.upper()}" + f" {REFINED}" * refined


def leading(results: Results) -> str:
    """Return the first estimator, which decides the verdict and the pictures."""
    return str(only(results.metrics, metric="auc_5")["estimator"].iloc[0])


def recall_of(results: Results) -> str:
    """Return the kind of recall: "recall" for pairs with a homography, else "matching_score"."""
    return next(name for name in RECALLS if len(only(results.metrics, metric=name)))


def duels(results: Results) -> List[Dict[str, Any]]:
    """Compare the network with the ratio test: three metrics for the first screen, and the AUC.

    Each row has a label, a detail, the rows `ours` and `theirs` of the metrics (value, low, high),
    and `gain`, the row of their difference.
    """
    what, unit = ("poses", "degrees") if is_posed(results.table) else ("homographies", "px")
    lead = leading(results)
    recall = recall_of(results)
    found = "of the true matches" if recall == "recall" else "of the keypoints"
    # label, detail, metric and estimator of each row
    asked = (
        ("correct matches", "of the matches", "precision", ""),
        ("found matches", found, recall, ""),
        (what, f"error of at most {WITHIN} {unit}", f"within_{WITHIN}", lead),
        (f"AUC of {what}", f"up to {WITHIN} {unit}", "auc_5", lead),
    )
    rows = []
    for label, detail, metric, estimator in asked:
        # the row of each matcher, and their difference
        key = {"metric": metric, "estimator": estimator, "refined": False}
        both = only(results.metrics, **key).set_index("matcher")
        gain = only(results.differences, baseline=RATIO_TEST, **key).iloc[0]
        ours = both.loc[OURS]
        theirs = both.loc[RATIO_TEST]
        row = {"label": label, "detail": detail, "ours": ours, "theirs": theirs, "gain": gain}
        rows.append(row)
    return rows


def verdict(results: Results) -> str:
    """Say the comparison with the ratio test in at most 15 words."""
    if results.scenes < MIN_CLUSTERS:
        counts = f"{results.scenes}, and at least {MIN_CLUSTERS} are needed"
        return f"Too few {results.unit} to judge: {counts}."
    # what is better, worse and equal, in words
    said: Dict[str, List[str]] = {"better": [], "worse": [], "equal": []}
    for duel in duels(results)[:3]:
        said[duel["gain"]["verdict"]].append(duel["label"])
    parts = [
        (word, " and ".join(filter(None, [", ".join(of[:-1]), of[-1]])))
        for word, of in said.items()
        if of
    ]
    first = {"better": "Better than", "worse": "Worse than", "equal": "Equal to"}
    words = [f"{word} in {of}" for word, of in parts[1:]]
    start = f"{first[parts[0][0]]} the ratio test in {parts[0][1]}"
    return "; ".join([start, *words]) + "."


def headline(results: Results) -> Dict[str, float]:
    """Return the ten metrics with short names, in percent, for DVC (summary.json) and MLflow.

    Three metrics come with their gain over the best baseline: the leading AUC, the same AUC of
    refined matches, and recall (for poses: matching score) at the ratio test's precision. The
    others come without: the fraction of pairs within WITHIN px, precision, recall, and the number
    of matches on negative pairs.
    """
    lead = leading(results)
    recall = recall_of(results)
    ours = only(results.metrics, matcher=OURS).set_index(KEY)["value"]
    gains = results.differences.drop_duplicates(KEY).set_index(KEY)["value"]
    # the three metrics that come with their gain over the best baseline
    asked = {
        "auc_5": ("auc_5", lead, False),
        "auc_5_aligned": ("auc_5", lead, True),
        f"{recall}_at_p": (f"{recall}_at_ratio_precision", "", False),
    }
    values = {}
    for name, key in asked.items():
        values[name] = ours.get(key)
        values[f"{name}_gain"] = gains.get(key)
    # the metrics without a gain
    values[f"within_{WITHIN}"] = ours.get((f"within_{WITHIN}", lead, False))
    for name in ("precision", recall, "negative_matches"):
        values[name] = ours.get((name, "", False))
    known = {name: float(each) for name, each in values.items() if each is not None}
    return {name: in_percent(name, value) for name, value in known.items()}


def result(results: Results) -> str:
    """Return the leading AUC for the name of the run in MLflow, such as "AUC@5 57.8"."""
    return f"AUC@5 {percent(duels(results)[3]['ours']['value'])}"


def compared(results: Results) -> List[str]:
    """Return the matchers in tables and charts: all but further models that equal the network."""
    return [name for name in results.table["matcher"].unique() if name not in results.same]


def matches_table(results: Results) -> pd.DataFrame:
    """Make a table of text with one line per matcher: pairs, matches, and the metrics of SHORT."""
    frame = only(results.metrics, estimator="")
    wide = frame.pivot(index="matcher", columns="metric", values="value").loc[compared(results)]
    shown = {"pairs": wide["pairs"].map("{:.0f}".format), "matches": wide["matches"].round()}
    shown["matches"] = shown["matches"].map("{:.0f}".format)
    shown.update({SHORT[name]: wide[name].map(percent) for name in SHORT if name in wide})
    return pd.DataFrame(shown).rename(title)


def area_table(results: Results) -> pd.DataFrame:
    """Make a table of text with the AUC of all estimators.

    A line belongs to (detected or refined, matcher), a column to (estimator, limit).
    """
    frame = results.metrics[results.metrics["metric"].str.startswith("auc_")]
    frame = frame[frame["matcher"].isin(compared(results))]
    kinds = np.where(frame["refined"], REFINED, DETECTED)
    labels = "AUC " + frame["estimator"].str.upper()
    limits = "@" + frame["metric"].str.partition("_")[2]
    frame = frame.assign(kind=kinds, estimator=labels, limit=limits)
    by = ["kind", "matcher"]
    wide = frame.pivot(index=by, columns=["estimator", "limit"], values="value")
    lines = pd.MultiIndex.from_frame(frame[by].drop_duplicates())
    columns = pd.MultiIndex.from_frame(frame[["estimator", "limit"]].drop_duplicates())
    return wide.loc[lines, columns].map(percent)


def align(rows: Sequence[Sequence[str]]) -> List[str]:
    """Align the columns of text, the first to the left and the others to the right."""
    first, *widths = (max(map(len, column)) for column in zip(*rows))
    return [
        "  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths)]).rstrip() for row in rows
    ]


def duel_cells(results: Results) -> List[List[str]]:
    """Return the rows of `duels` as text: label, both values, difference, interval, verdict."""
    rows = []
    for duel in duels(results):
        gain = duel["gain"]
        values = percent(duel["ours"]["value"]), percent(duel["theirs"]["value"])
        end = ["-", ""] if gain["verdict"] == "too few" else [span(gain), gain["verdict"]]
        label = f"{duel['label']}, {duel['detail']}"
        rows.append([label, *values, points(gain["value"]), *end])
    return rows


def scene_lines(results: Results) -> List[str]:
    """Return one line per scene with the AUC@3 of the first estimator (for poses: AUC@5)."""
    limit = "auc_5" if is_posed(results.table) else "auc_3"
    lead = leading(results)
    rows = []
    matchers = compared(results)
    few = False
    for scene, part in results.table.groupby("scene", sort=False):
        found = only(metrics.summarize(part), metric=limit, estimator=lead, refined=False)
        values = found.set_index("matcher")["value"]
        pairs = part["number"].nunique()
        few = few or pairs < MIN_PAIRS
        star = "*" * (pairs < MIN_PAIRS)
        rows.append([str(scene), f"{pairs}{star}", *(percent(values[each]) for each in matchers)])
    head = [heading(limit, lead), "pairs", *map(title, matchers)]
    return [*align([head, *rows]), *[f"* fewer than {MIN_PAIRS} pairs"] * few]


def area_lines(results: Results) -> List[str]:
    """Return the lines of `area_table`, three estimators side by side, within 100 columns."""
    wide = area_table(results)
    lines = []
    names = list(dict.fromkeys(wide.columns.get_level_values(0)))
    for start in range(0, len(names), 3):
        part = wide[names[start : start + 3]]
        kinds = part.groupby(level="kind", sort=False)
        rows = []
        for kind, values in kinds:
            rows.append([kind if len(kinds) > 1 else "", *(limit for _, limit in part.columns)])
            rows += [[title(matcher), *row] for (_, matcher), *row in values.itertuples()]
        text = align(rows)
        # the name of each estimator stands above its first column
        above = ""
        for name in names[start : start + 3]:
            place = list(part.columns.get_level_values(0)).index(name)
            above = above.ljust(_column_start(text[0], place)) + f"{name} "
        lines += ["", above.rstrip(), *text]
    return lines


def _column_start(line: str, place: int) -> int:
    """Return the column at which limit number `place` begins in a line of limits."""
    return [at for at, letter in enumerate(line) if letter == "@"][place]


def legend(results: Results) -> List[str]:
    """Explain the columns, and which matches and pairs they count."""
    known = set(results.metrics["metric"])
    lines = ["; ".join(words for name, words in WORDS.items() if name in known)]
    what, unit = ("pose", "degrees") if is_posed(results.table) else ("mean corner", "px")
    lines.append(f"AUC@T: area under the fraction of pairs with a {what} error of at most T {unit}")
    if results.metrics["refined"].any():
        lines.append(
            f"{REFINED}: matches refined by the pixels around them, of every matcher alike"
        )
    # only the estimators that were used
    used = set(results.metrics["estimator"])
    lines += [words for estimator, words in ESTIMATORS.items() if estimator in used]
    limits = only(results.metrics, metric="threshold").set_index("matcher")["value"]
    text = ", ".join(f"{title(name)} {limit:g}" for name, limit in limits.items())
    lines.append(f"smallest confidence of a network's matches: {text}")
    # pairs without a true match have no recall
    counts = only(results.metrics, metric="recall_pairs", matcher=OURS)["value"]
    pairs = results.table["number"].nunique()
    if len(counts) and counts.iloc[0] != pairs:
        lines.append(
            f"recall is over {counts.iloc[0]:.0f} of {pairs} pairs: the others have no true match"
        )
    return lines


def negative_line(results: Results) -> str:
    """Say how many matches two photographs with nothing in common have, all of them wrong."""
    found = results.metrics.set_index(["metric", "matcher"])["value"]
    if "negative_matches" not in found:
        return ""
    mean = found["negative_matches"]
    pairs = found["negative_pairs"][OURS]
    return (
        f"Two photographs with nothing in common have {mean[OURS]:.1f} matches, by the ratio test"
        f" {mean[RATIO_TEST]:.1f} ({pairs:.0f} pairs)."
    )


def same_line(results: Results) -> str:
    """Say that other models equal the trained one, if any do."""
    names = ", ".join(results.same)
    return f"The trained model is the same as {names}: its matches are equal." if names else ""


def text(results: Results) -> str:
    """Return the report as it is printed."""
    sequences = results.unit == "sequences"
    cells = duel_cells(results)
    short = 3 if results.metrics["refined"].any() else 2  # the page has the whole legend
    head = ["in %", "SuperGlue", "ratio test", "difference", "95 % interval", ""]
    title_line = f"{results.title}, {results.table['number'].nunique()} pairs"
    sections = [
        [verdict(results), title_line, *align([head, *cells])],
        scene_lines(results) if sequences else [],
        [*align(_rows_of(matches_table(results))), *area_lines(results), *legend(results)[:short]],
        list(filter(None, [negative_line(results), same_line(results), *results.notes])),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section)


def _rows_of(frame: pd.DataFrame) -> List[List[str]]:
    """Return the cells of a table of text, with its headings."""
    return [["", *frame.columns], *([str(name), *row] for name, *row in frame.itertuples())]


def note(results: Results, folder: str) -> str:
    """Return the description of an MLflow run in Markdown: the verdict and a table of four lines.

    `folder` is the folder of the report in the artifacts of the run.
    """
    rows = ["| in % | SuperGlue | ratio test | difference (95 % interval) |", "|---|---|---|---|"]
    for label, *cells in duel_cells(results):
        change = f"{cells[2]} ({cells[3]}) {cells[4]}" if cells[4] else cells[2]
        rows.append(f"| {' | '.join([label, *cells[:2], change])} |")
    pairs = results.table["number"].nunique()
    first = f"**{verdict(results)}** {results.title}, {pairs} pairs: `{folder}/{PAGE}`."
    return "\n\n".join([first, "\n".join(rows)])


def shorten(value: Any) -> Any:
    """Round a number to DIGITS digits. Return anything else unchanged."""
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    return round(float(f"{value:.{DIGITS}g}"), DIGITS)


def in_percent(name: str, value: float) -> float:
    """Return a value of summary.json in percent with two decimals. A number of matches stays."""
    return round(value if name == "negative_matches" else 100 * value, 2) + 0.0


def write(out: Path, results: Results, page: str) -> None:
    """Write all files, and remove the files of an earlier evaluation."""
    # metrics, for DVC and for programs
    values = {}
    for row in results.metrics.itertuples():
        name = f"{row.matcher}.{name_of(row.metric, row.estimator, row.refined)}"
        values[name] = int(row.value) if is_count(row.metric) else plain(shorten(row.value))
    write_json(out / "metrics.json", values, indent=2)
    short = headline(results)
    write_json(out / "summary.json", short, indent=2)
    write_json(out / "protocol.json", results.protocol, indent=2)
    # remove the curves and pictures of an earlier evaluation
    for folder in ("curves", "pictures"):
        shutil.rmtree(out / folder, ignore_errors=True)
        (out / folder).mkdir(parents=True)
    for name, frame in tables(results).items():
        text_of_file = frame.map(shorten).to_csv(index=False, lineterminator="\n")
        write_atomic(out / f"{name}.csv", text_of_file)
    for name, _, pixels in results.pictures:
        drawing.Picture(pixels).save(out / "pictures" / f"{name}.png")
    # the report as text and as a page
    write_atomic(out / TEXT, text(results) + "\n")
    write_atomic(out / PAGE, page)


def is_count(name: str) -> bool:
    """Return whether a metric of this name is a whole number."""
    return re.fullmatch(COUNTS, str(name)) is not None


def whole_numbers(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the table with its counts as whole numbers, also if some are missing."""
    return frame.astype({name: "Int64" for name in frame.columns if is_count(name)})


def widen(frame: pd.DataFrame, index: List[str]) -> pd.DataFrame:
    """Return a table with a column for each metric, in their order of appearance."""
    columns = _names(frame)
    wide = frame.assign(name=columns).pivot(index=index, columns="name", values="value")
    wide = wide[list(dict.fromkeys(columns))].reset_index()
    return frame[index].drop_duplicates().merge(wide, on=index)


def tables(results: Results) -> Dict[str, pd.DataFrame]:
    """Return the content of each CSV file by its name."""
    pairs = widen(results.table, ["number", "pair", "scene", "matcher"]).drop(columns="number")
    pairs["matches"] = pairs["matches"].astype(int)
    by_scene = [
        metrics.summarize(part).assign(scene=scene)
        for scene, part in results.table.groupby("scene", sort=False)
    ]
    named = results.metrics.assign(metric=_names(results.metrics), scenes=results.scenes)
    gains = results.differences.assign(metric=_names(results.differences), scenes=results.scenes)
    ends = ["value", "low", "high", "pairs", "scenes"]
    robustness = results.robustness
    if len(robustness):
        # The columns are named <matcher>.<metric>. Numbers of pairs have no matcher.
        start = robustness["matcher"].where(
            robustness["matcher"] == "", robustness["matcher"] + "."
        )
        robustness = robustness.assign(
            metric=start + _names(robustness), estimator="", refined=False
        )
        robustness = widen(robustness, ["condition", "level"])
    # all files: rows of one kind, without those that belong elsewhere
    curves = metrics.error_curves(results.table)
    found = {
        "pairs": pairs,
        "matchers": widen(results.metrics, ["matcher"]),
        "scenes": widen(pd.concat(by_scene), ["scene", "matcher"]),
        "intervals": named[named["pairs"].notna()][["matcher", "metric", *ends]],
        "differences": gains[["metric", "baseline", *ends, "verdict"]],
        "robustness": robustness,
        "bad_images": pd.DataFrame(results.bad, columns=["file", "reason"]),
    }
    found = {name: whole_numbers(frame) for name, frame in found.items()}
    found.update({f"curves/{name}": curve for name, curve in curves.items()})
    if not is_posed(results.table):
        found["curves/calibration"] = results.calibration
    return found


def _names(frame: pd.DataFrame) -> List[str]:
    """Return the name of the metric of each row."""
    return [name_of(*key) for key in frame[KEY].itertuples(index=False, name=None)]
