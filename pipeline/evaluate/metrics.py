"""Metrics of an evaluation: means over the rows of one long table, with intervals and differences.

The table has a row for each value of each pair: number, pair, scene, matcher, estimator, refined,
metric, value. Every metric is a mean of one value per pair, or is read off such means. Pairs of one
photograph or sequence are alike, so an interval resamples scenes with all their pairs. All metrics
of all matchers share the resamples. A difference is taken within each resample, so its interval is
far narrower than the intervals of the two values.
"""

# pandas has no types. A type checker guesses them from its source, mostly wrongly.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportAssignmentType=false

from __future__ import annotations

import math
import re
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from pipeline.bootstrap import MIN_CLUSTERS, Clusters, Estimate, auc_by_pair, mean_finite
from pipeline.evaluate.estimators import POSE_ESTIMATORS
from pipeline.evaluate.matchers import OURS, RATIO_TEST, UNRANKED
from pipeline.evaluate.scoring import Row, Scored

KEY = ["metric", "estimator", "refined"]  # columns that say what a value measures
COLUMNS = ["number", "pair", "scene", "matcher", "estimator", "refined", "metric", "value"]
AUC_PX = (1, 3, 5, 10)
AUC_DEGREES = (5, 10, 20)  # limits of the error of a pose
WITHIN = 5  # px or degrees: the fraction of pairs with a smaller error
RECALLS = ("recall", "matching_score")  # the two kinds of recall
SHARES = ("precision", *RECALLS)  # metrics that are means of one value per pair, in this order
COMPARED = (OURS, RATIO_TEST)  # matchers in robustness.csv
CURVE_POINTS = 512  # number of points of a resampled curve
BINS = 10  # number of ranges of the confidence, for its calibration
# Limits of the error curves, which reach as far as the widest AUC
LIMITS_PX = tuple(round(0.1 * step, 1) for step in range(101))
LIMITS_DEG = tuple(round(0.2 * step, 1) for step in range(101))


def name_of(metric: str, estimator: str = "", refined: bool = False) -> str:
    """Return the name of a metric in files, DVC and MLflow.

    For example, `auc_5` of refined matches by RANSAC is `auc_ransac_aligned_5`. The names say
    `aligned` for refined, so that they stay the same as in earlier versions.
    """
    kind, *limit = re.split(r"_(?=\d+$)", metric)
    return "_".join(filter(None, (kind, estimator, "aligned" if refined else "", *limit)))


def make_table(results: Sequence[Sequence[Row]]) -> pd.DataFrame:
    """Make the long table of the rows of all pairs, in the order of the source."""
    rows = [(number, *row) for number, pair in enumerate(results) for row in pair]
    return pd.DataFrame(rows, columns=COLUMNS)


def is_posed(table: pd.DataFrame) -> bool:
    """Return whether the errors are errors of poses, in degrees."""
    return bool(table["estimator"].isin(list(POSE_ESTIMATORS)).any())


def scenes_of(table: pd.DataFrame) -> Clusters:
    """Return the scenes of all pairs, to be resampled."""
    return Clusters(table.drop_duplicates("number")["scene"].tolist())


def summarize(table: pd.DataFrame, scenes: Optional[Clusters] = None) -> pd.DataFrame:
    """Compute all metrics of a table.

    The result has the columns matcher, metric, estimator, refined, value, pairs and samples.
    `pairs` is the number of pairs in a mean, and NaN for other values. `samples` holds the value on
    each resample of the scenes, and is empty without `scenes`.
    """
    rows: List[Tuple] = []
    by = ["matcher", "estimator", "refined", "metric"]
    for key, values in table.groupby(by, sort=False)["value"]:
        matcher, estimator, refined, metric = key
        found = _measure(metric, values.to_numpy(), scenes, estimator in POSE_ESTIMATORS)
        rows += [(matcher, name, estimator, refined, *value) for name, value in found]
    return pd.DataFrame(rows, columns=["matcher", *KEY, "value", "pairs", "samples"])


def _measure(
    metric: str, values: np.ndarray, scenes: Optional[Clusters], posed: bool
) -> Iterator[Tuple[str, Tuple[float, float, Any]]]:
    """Yield the metrics of one column of the table: name, and (value, pairs, samples)."""

    def mean(each: np.ndarray) -> Tuple[float, float, Any]:
        return scenes.mean(each) if scenes else Estimate(*mean_finite(each), np.zeros(0))

    def alone(value: float) -> Tuple[float, float, Any]:
        return float(value) if math.isfinite(value) else math.nan, math.nan, None

    if metric == "matches":
        yield "pairs", alone(len(values))
        yield metric, alone(values.mean())
    elif metric in SHARES:
        yield metric, mean(values)
        if metric == "recall":  # pairs without true matches have no recall
            yield "recall_pairs", alone(np.isfinite(values).sum())
    elif metric == "error":
        for limit in AUC_DEGREES if posed else AUC_PX:
            yield f"auc_{limit}", mean(auc_by_pair(values, limit))
        yield f"within_{WITHIN}", mean((values <= WITHIN).astype(float))
        # The mean is over the pairs with an estimate, the median over all pairs
        average, estimated = mean_finite(values)
        yield "mean_error", alone(average)
        yield "estimated", alone(estimated)
        yield "median_error", alone(float(np.median(values)))


def compare(
    table: pd.DataFrame, scored: Mapping[str, Sequence[Scored]], thresholds: Mapping[str, float]
) -> Tuple[pd.DataFrame, pd.DataFrame]:
    """Compute all metrics with intervals, and the differences between the network and the others.

    `scored` holds all matches of each pair, by network. `thresholds` has the thresholds of the
    networks and of the ratio test.

    Returns:
        The metrics (see `summarize`) with `low` and `high`, and the differences (see
        `differences`).
    """
    scenes = scenes_of(table)
    metrics = summarize(table, scenes)
    # recall at the precision of the ratio test, which needs the curves over the confidence
    rows: List[Tuple] = []
    for name in [*(name for name in thresholds if name != RATIO_TEST), RATIO_TEST]:
        truth = true_counts(table, name)
        own = None if name == RATIO_TEST else scored[name]
        points = at_ratio_test(metrics, own, truth, scenes)
        rows += [(name, metric, "", False, *point) for metric, point in points]
        if own is not None:
            rows.append((name, "threshold", "", False, thresholds[name], math.nan, None))
    # how well the confidence of the network is calibrated
    bins = calibration(scored[OURS])
    rows.append((OURS, "calibration_error", "", False, calibration_error(bins), math.nan, None))
    # one table, with the matchers in their order of appearance
    metrics = pd.concat([metrics, pd.DataFrame(rows, columns=metrics.columns)], ignore_index=True)
    ranks = {name: place for place, name in enumerate(metrics["matcher"].unique())}
    metrics = metrics.sort_values("matcher", key=lambda names: names.map(ranks), kind="stable")
    metrics = add_intervals(metrics).reset_index(drop=True)
    networks = [name for name in thresholds if name != RATIO_TEST]
    return metrics, differences(metrics, networks, scenes.count)


def add_intervals(metrics: pd.DataFrame) -> pd.DataFrame:
    """Add low and high, the 95 % interval of each mean (percentile bootstrap)."""
    intervals = [
        (math.nan, math.nan) if samples is None else interval(value, samples)
        for value, samples in zip(metrics["value"], metrics["samples"])
    ]
    return metrics.assign(low=[low for low, _ in intervals], high=[high for _, high in intervals])


def interval(value: float, samples: np.ndarray) -> Tuple[float, float]:
    """Return the 95 % interval of a value, NaN without samples."""
    line = Estimate(value, 0, samples).line()
    return tuple(math.nan if line[end] is None else line[end] for end in ("low", "high"))


def differences(metrics: pd.DataFrame, networks: Sequence[str], scenes: int) -> pd.DataFrame:
    """Subtract the best baseline, then the ratio test and each further network, from the network.

    The best baseline has the highest mean on these pairs, which is a choice in its favour.
    `verdict` is "better" or "worse" if the interval excludes 0, and "equal" if it contains 0. With
    fewer than MIN_CLUSTERS scenes it is "too few".
    """
    means = metrics[metrics["pairs"].notna()]
    ours = means[means["matcher"] == OURS]
    names = list(means["matcher"].unique())
    baselines = [name for name in names if name not in (*networks, *UNRANKED)]
    further = [[name] for name in networks if name != OURS]
    # for each metric the rows of both matchers, side by side
    parts = []
    for others in (baselines, [RATIO_TEST], *further):
        found = means[means["matcher"].isin(others)]
        best = found.sort_values("value", ascending=False, kind="stable").drop_duplicates(KEY)
        parts.append(ours.merge(best, on=KEY, suffixes=("", "_other")))
    both = pd.concat(parts, ignore_index=True).drop_duplicates([*KEY, "matcher_other"])
    rows = []
    for row in both.itertuples():
        # the interval of the difference, within each resample
        gain = row.value - row.value_other
        low, high = interval(gain, row.samples - row.samples_other)
        verdict = "better" if low > 0 else "worse" if high < 0 else "equal"
        enough = scenes >= MIN_CLUSTERS and not math.isnan(low)
        key = (row.matcher, row.metric, row.estimator, row.refined, row.matcher_other)
        rows.append((*key, gain, low, high, row.pairs, verdict if enough else "too few"))
    columns = ["matcher", *KEY, "baseline", "value", "low", "high", "pairs", "verdict"]
    return pd.DataFrame(rows, columns=columns)


def same_as_ours(table: pd.DataFrame, networks: Sequence[str]) -> List[str]:
    """Return the further networks with the same matches as the evaluated network.

    This happens if the trained model is the model that the training started from.
    """
    values = {name: part["value"].to_numpy() for name, part in table.groupby("matcher")}
    others = [name for name in networks if name != OURS]
    return [name for name in others if np.array_equal(values[name], values[OURS], equal_nan=True)]


def true_counts(table: pd.DataFrame, matcher: str) -> np.ndarray:
    """Return the number of true matches of each pair, (P,).

    For poses it is the number of keypoints of image 0.
    """
    own = table[table["matcher"] == matcher]
    known = own[own["metric"] == "true_matches"]
    if len(known):
        return known["value"].to_numpy()
    return own[own["metric"] == "keypoints0"]["value"].clip(lower=1).to_numpy()


def steps(
    scored: Sequence[Scored], truth: np.ndarray
) -> Tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Order the matches of all pairs by falling confidence, and tell what each of them changes.

    Returns four arrays (E,): the confidence, the number of the pair, and the changes of that pair's
    precision and recall when the match is added.
    """
    parts = [(np.zeros(0), np.zeros(0, np.int64), np.zeros(0), np.zeros(0))]
    for number, (scores, correct, found) in enumerate(scored):
        order = np.argsort(-scores, kind="stable")
        precision = np.cumsum(correct[order]) / np.arange(1, len(order) + 1)
        recall = np.cumsum(found[order]) / max(truth[number], 1)
        changes = np.diff(precision, prepend=0.0), np.diff(recall, prepend=0.0)
        parts.append((scores[order], np.full(len(order), number), *changes))
    scores, *columns = map(np.concatenate, zip(*parts))
    order = np.argsort(-scores, kind="stable")
    return (scores[order], *(column[order] for column in columns))


def sweep(scored: Sequence[Scored], truth: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """Compute mean precision and mean recall above each confidence that occurs, (T,) each.

    The confidence falls, and the first point lies above all confidences. The mean precision is over
    all pairs, the mean recall over the pairs with true matches.
    """
    confidence, _, *changes = steps(scored, truth)
    # the last match of equal confidence, after which the means count
    last = np.append(np.flatnonzero(np.diff(confidence)), len(confidence) - 1)[: len(confidence)]
    pairs = len(scored), int((truth > 0).sum()) or np.nan
    precision, recall = (
        np.append(0.0, np.cumsum(change)[last]) / count for change, count in zip(changes, pairs)
    )
    return precision, recall


def resampled_curves(
    scenes: Clusters, scored: Sequence[Scored], truth: np.ndarray
) -> List[np.ndarray]:
    """Compute precision and recall on each resample while confidence falls, (R, CURVE_POINTS)
    each."""
    confidence, pair, *changes = steps(scored, truth)
    # (scenes, CURVE_POINTS): the changes of each scene, then (R, CURVE_POINTS): resampled means
    column = np.arange(len(confidence)) * CURVE_POINTS // max(len(confidence), 1)
    curves = []
    for change, weight in zip(changes, (np.ones(len(scored)), (truth > 0).astype(float))):
        sums = np.zeros((scenes.count, CURVE_POINTS))
        np.add.at(sums, (scenes.of_pair[pair], column), change)
        pairs = scenes.weights @ scenes.per_cluster(np.arange(len(scored)), weight)
        with np.errstate(invalid="ignore"):
            curves.append(scenes.weights @ sums.cumsum(axis=1) / pairs[:, None])
    return curves


def recall_at_precision(precision: np.ndarray, recall: np.ndarray, least: ArrayLike) -> np.ndarray:
    """Return the highest recall with a precision of at least `least`, and 0 if there is none.

    precision and recall are (..., T), and least is (...). Exchange the first two arguments to get
    the precision at a recall.
    """
    reached = precision >= np.expand_dims(least, -1) - 1e-12  # float64 sums are rounded
    return np.where(reached, recall, 0.0).max(axis=-1, initial=0.0)


def at_ratio_test(
    metrics: pd.DataFrame,
    scored: Optional[Sequence[Scored]],
    truth: np.ndarray,
    scenes: Optional[Clusters] = None,
) -> List[Tuple[str, Tuple[float, float, Any]]]:
    """Return recall at the ratio test's precision, and the reverse: (value, pairs, samples) by
    name.

    For a network, all its confidences are tried. `scored` holds its matches. If it is None, the
    result is the one point of the ratio test itself. Only the resamples are approximate.
    """
    means = metrics[(metrics["matcher"] == RATIO_TEST) & metrics["metric"].isin(SHARES)]
    names = means["metric"].tolist()  # precision, and recall of any kind
    own = list(means[["value", "pairs", "samples"]].itertuples(index=False, name=None))
    if scored is not None:
        exact = sweep(scored, truth)
        counts = len(scored), int((truth > 0).sum())
        resampled = resampled_curves(scenes, scored, truth) if scenes else None
    points = []
    for axis in (0, 1):  # the axis on which the value of the ratio test is given
        other = 1 - axis
        best = own[other]
        if scored is not None:
            value = float(recall_at_precision(exact[axis], exact[other], own[axis][0]))
            samples: Any = np.zeros(0)
            if resampled:
                samples = recall_at_precision(resampled[axis], resampled[other], own[axis][2])
            best = (value if counts[1] else math.nan, counts[other], samples)
        points.append((f"{names[other]}_at_ratio_{names[axis]}", best))
    return points


def calibration(scored: Sequence[Scored]) -> pd.DataFrame:
    """Compute the fraction of correct matches in BINS equal ranges of the confidence.

    Ranges without a match are left out. The columns are confidence, precision and matches.
    """
    scores = np.concatenate([[], *(each[0] for each in scored)])
    correct = np.concatenate([[], *(each[1] for each in scored)])
    part = np.minimum((scores * BINS).astype(int), BINS - 1)
    frame = pd.DataFrame({"confidence": scores, "precision": correct})
    means = frame.groupby(part).mean()
    return means.assign(matches=frame.groupby(part).size())


def calibration_error(bins: pd.DataFrame) -> float:
    """Return the expected calibration error (Guo et al. 2017).

    It is the mean of |confidence - precision|, weighted by matches.
    """
    gaps = (bins["confidence"] - bins["precision"]).abs() * bins["matches"]
    return float(gaps.sum() / (bins["matches"].sum() or np.nan))


def count_negatives(counts: Sequence[Mapping[str, int]]) -> pd.DataFrame:
    """Summarize the matches on pairs of different photographs by matcher.

    `counts` has the numbers of matches of each pair by matcher. The metrics are the mean, the 95th
    percentile and the number of pairs.
    """
    rows = []
    for matcher in counts[0] if counts else ():
        own = [pair[matcher] for pair in counts]
        values = {"matches": np.mean(own), "matches_p95": np.percentile(own, 95), "pairs": len(own)}
        rows += [(matcher, f"negative_{name}", "", False, each) for name, each in values.items()]
    return pd.DataFrame(rows, columns=["matcher", *KEY, "value"])


def condition(name: str, level: str, table: pd.DataFrame, scored: Sequence[Scored]) -> pd.DataFrame:
    """Compute the metrics of a line of robustness.csv: condition, level, matcher, metric, ...,
    value.

    They are precision, recall, AUC up to 5 and recall at the ratio test's precision, of the network
    and of the ratio test. `scored` holds the matches of the network. Numbers of pairs have no
    matcher.
    """
    found = summarize(table[table["matcher"].isin(COMPARED)])
    points = [
        (matcher, *at_ratio_test(found, own, true_counts(table, matcher))[0])
        for matcher, own in ((OURS, scored), (RATIO_TEST, None))
    ]
    recall = [(matcher, metric, "", False, *point) for matcher, metric, point in points]
    counts = found[found["metric"].isin(["pairs", "recall_pairs"]) & (found["matcher"] == OURS)]
    shown = found[found["metric"].isin([*SHARES, "auc_5"])]
    more = pd.DataFrame(recall, columns=found.columns)
    rows = pd.concat([counts.assign(matcher=""), shown, more], ignore_index=True)
    return rows.drop(columns=["pairs", "samples"]).assign(condition=name, level=level)


def error_curves(table: pd.DataFrame) -> Dict[str, pd.DataFrame]:
    """Compute the fraction of pairs with an error of at most each limit by matcher, per estimator.

    The area below a curve is the AUC.
    """
    limits, unit = (LIMITS_DEG, "error_deg") if is_posed(table) else (LIMITS_PX, "error_px")
    curves = {}
    errors = table[table["metric"] == "error"]
    for (estimator, refined), part in errors.groupby(["estimator", "refined"], sort=False):
        curve = {unit: list(limits)}
        for matcher, values in part.groupby("matcher", sort=False)["value"]:
            ordered = np.sort(values.to_numpy())
            curve[str(matcher)] = np.searchsorted(ordered, limits, side="right") / len(ordered)
        curves[name_of("error", estimator, refined)] = pd.DataFrame(curve)
    return curves
