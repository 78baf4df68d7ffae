"""Compute metrics, which are means over the rows of one long table, with intervals and differences.

The table has a row for each value of each pair: number, pair, scene, matcher, estimator, refined,
metric, value. Every metric is a mean of one value per pair. Pairs of one photograph or sequence are
alike, so an interval resamples scenes with all their pairs. All metrics of all matchers share the
resamples. A difference is taken within each resample, so its interval is far narrower than the
intervals of the two values.
"""

# pandas has no types. A type checker guesses them from its source, mostly wrongly.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportAssignmentType=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import math
import re
from types import MappingProxyType
from typing import Dict, Mapping, Sequence

import numpy as np
import pandas as pd

from pipeline.evaluate.estimators import POSE_ESTIMATORS
from pipeline.evaluate.matchers import BOUND, OURS, RATIO_TEST
from pipeline.evaluate.scoring import Row, Scored

KEY = ["metric", "estimator", "refined"]  # columns that say what a value measures
COLUMNS = ["number", "pair", "scene", "matcher", "estimator", "refined", "metric", "value"]
AUC_PX = (1, 3, 5, 10)
AUC_DEGREES = (5, 10, 20)  # limits of the error of a pose
WITHIN = 5  # px or degrees: the fraction of pairs with a smaller error
# Metrics whose values are in the table itself.
SHARES = ("matches", "precision", "recall", "matching_score")
DIGITS = 6  # decimals of the ends of intervals; beyond them float32 sums are noise
RESAMPLES = 2000
SEED = 0
ENDS = (0.025, 0.975)  # quantiles of the resamples that are the 95 % interval
# Scenes for a verdict. Five agree by chance with probability 2 ** (1 - 5) = 0.06.
MIN_SCENES = 6
EQUAL = 0.02  # a difference whose whole interval is smaller than this is called equal
POINTS = 512  # number of thresholds that a resample tries
BINS = 10  # number of ranges of the confidence, for its calibration


def name_of(metric: str, estimator: str = "", refined: bool = False) -> str:
    """Return the name of a metric in files, DVC and MLflow.

    For example, `auc_5` of refined matches by RANSAC is `auc_ransac_refined_5`.
    """
    kind, *limit = re.split(r"_(?=\d+$)", metric)
    return "_".join(filter(None, (kind, estimator, "refined" if refined else "", *limit)))


def make_table(results: Sequence[Sequence[Row]]) -> pd.DataFrame:
    """Make the long table of the rows of all pairs, in the order of the source."""
    rows = [(number, *row) for number, pair in enumerate(results) for row in pair]
    return pd.DataFrame(rows, columns=COLUMNS)


def is_posed(table: pd.DataFrame) -> bool:
    """Return whether the errors are pose errors, in degrees, and not corner errors, in px."""
    return bool(table["estimator"].isin(list(POSE_ESTIMATORS)).any())


def leading(table: pd.DataFrame) -> str:
    """Return the first of --estimators, which decides the verdict and the pictures."""
    return str(table.loc[table["metric"] == "error", "estimator"].iloc[0])


def recall_of(table: pd.DataFrame) -> str:
    """Return the metric of recall: "recall" for pairs with a homography, else "matching_score"."""
    return "matching_score" if is_posed(table) else "recall"


def values_of_pairs(table: pd.DataFrame, scored: Mapping[str, Sequence[Scored]]) -> pd.DataFrame:
    """Return what each pair contributes to each metric. A metric is the mean of a column.

    A row belongs to a pair and is named by its scene. A column belongs to (matcher, metric,
    estimator, refined). `scored` holds all matches of each pair, by network.
    """
    limits = AUC_DEGREES if is_posed(table) else AUC_PX
    columns: Dict[tuple, Sequence[float]] = {}
    for (matcher, *key), part in table.groupby(["matcher", *KEY], sort=False):
        metric, *estimated = key
        values = part["value"].to_numpy()
        if metric == "error":  # from 1 for no error to 0 from the limit on
            for limit in limits:
                columns[(matcher, f"auc_{limit}", *estimated)] = auc_by_pair(values, limit)
            columns[(matcher, f"within_{WITHIN}", *estimated)] = (values <= WITHIN).astype(float)
        elif metric in SHARES:
            columns[(matcher, *key)] = values
    # The recall of a network at the precision of the ratio test needs all matches of the network.
    recall = recall_of(table)
    asked = f"{recall}_at_ratio_precision", "", False
    least = np.mean(columns[RATIO_TEST, "precision", "", False])
    # The ratio test itself has one operating point.
    columns[(RATIO_TEST, *asked)] = columns[RATIO_TEST, recall, "", False]
    for matcher, pairs in scored.items():
        limit = threshold_at_precision(pairs, float(least))
        columns[(matcher, *asked)] = rates(pairs, np.array([limit]))[1][:, 0]
    # Make the frame (pairs, columns), with the matchers in their order of appearance.
    frame = pd.DataFrame(columns, table.drop_duplicates("number")["scene"])
    return frame.rename_axis(columns=["matcher", *KEY])[list(table["matcher"].unique())]


def auc_by_pair(errors: Sequence[float], threshold: float) -> np.ndarray:
    """Return what each pair contributes to the AUC up to `threshold`.

    The AUC is the area under the fraction of pairs within an error. It is the mean of the
    contributions, which are from 0 to 1. `errors` has one error per pair. A pair without an
    estimate has inf (or NaN), and counts as a failure.
    """
    return np.fmax(0.0, 1.0 - np.asarray(errors, np.float64) / threshold)  # 0 for NaN, too


def threshold_at_precision(scored: Sequence[Scored], least: float) -> float:
    """Return the lowest confidence above which the mean precision of the pairs is at least `least`.

    It is infinite if there is none. The precision of a pair without matches is 0.
    """
    steps = []
    for scores, correct, *_ in scored:
        # Each match, from the most confident on, changes the precision of its pair by some amount.
        order = np.argsort(-scores, kind="stable")
        precision = np.cumsum(correct[order]) / np.arange(1, len(order) + 1)
        steps.append((scores[order], np.diff(precision, prepend=0.0)))
    confidence, change = map(np.concatenate, zip(*steps))
    # Matches of equal confidence, also of different pairs, are added together.
    mean = pd.Series(change).groupby(-confidence).sum().cumsum() / len(scored)
    reached = mean[mean >= least - 1e-12]  # float64 sums are rounded
    return -reached.index[-1] if len(reached) else math.inf


def rates(scored: Sequence[Scored], thresholds: np.ndarray) -> np.ndarray:
    """Return precision and recall of each of P pairs at each of T thresholds, (2, P, T)."""
    parts = []
    for scores, correct, found, truth in scored:
        # (T, K): which matches count, then (T,): how many of them do, are correct, and are found
        above = scores >= thresholds[:, None]
        counts, right, hits = (each.sum(1) for each in (above, above & correct, above & found))
        parts.append((right / np.maximum(counts, 1), hits / (truth or np.nan)))
    return np.array(parts).swapaxes(0, 1)


def resample(
    values: pd.DataFrame, scored: Mapping[str, Sequence[Scored]] = MappingProxyType({})
) -> pd.DataFrame:
    """Compute the mean of each column on each resample of the scenes, (R, columns).

    `values` comes from `values_of_pairs`, which got the same `scored`. There is no resample of a
    single scene.
    """
    by_scene = values.groupby(level="scene", sort=False)
    # (R, scenes): how often each resample draws each scene
    count = by_scene.ngroups
    random = np.random.default_rng(SEED)
    drawn = random.integers(max(count, 1), size=(RESAMPLES if count > 1 else 0, count))
    weights = np.array([np.bincount(each, minlength=count) for each in drawn], np.float64)
    weights = weights.reshape(len(drawn), count)
    # (R, scenes) @ (scenes, columns): divide sums by numbers of values, without NaN
    with np.errstate(invalid="ignore"):
        means = (weights @ by_scene.sum().to_numpy()) / (weights @ by_scene.count().to_numpy())
    samples = pd.DataFrame(means, columns=values.columns)
    # Each resample has its own threshold for the last column of a network, the recall at the ratio
    # test's precision.
    for matcher, pairs in scored.items():
        every = np.concatenate([[1.0], *(scores for scores, *_ in pairs)])
        curves = rates(pairs, np.quantile(every, np.linspace(0, 1, POINTS)))
        precision, recall = (resample(pd.DataFrame(each, values.index)) for each in curves)
        reached = precision.ge(samples[RATIO_TEST, "precision", "", False], axis=0)
        samples[(matcher, *values[matcher].columns[-1])] = (recall * reached).max(axis=1)
    return samples


def summarize(values: pd.DataFrame, samples: pd.DataFrame) -> pd.DataFrame:
    """Compute value, low, high and number of pairs of each metric.

    Low and high are the 95 % interval by the percentile bootstrap (Efron and Tibshirani 1993,
    chapter 13). They are NaN for a single scene. Pairs without a value, such as the recall of a
    pair without true matches, are not counted.
    """
    low, high = samples.quantile(ENDS).round(DIGITS).to_numpy()
    return pd.DataFrame({"value": values.mean(), "low": low, "high": high, "pairs": values.count()})


def compare(values: pd.DataFrame, samples: pd.DataFrame, networks: Sequence[str]) -> pd.DataFrame:
    """Subtract the best baseline, then the ratio test and each further network, from the network.

    The best baseline has the highest mean on these pairs, which is a choice in its favour.
    `verdict` is from `judge`. The rows are named (metric, estimator, refined, baseline), and the
    first row of a metric has the best baseline.
    """
    means = values.mean()
    # Networks and the bound are no baselines.
    names = values.columns.unique("matcher")
    baselines = [name for name in names if name not in (*networks, BOUND)]
    further = [name for name in networks if name != OURS]
    rows = {}
    for key in values[OURS].columns.drop("matches", level="metric"):
        best = max(baselines, key=lambda name: means.get((name, *key), -math.inf))
        for other in dict.fromkeys([best, RATIO_TEST, *further]):
            if (other, *key) not in means:
                continue
            # Subtract within each resample, and take the interval of the differences.
            gain = samples[(OURS, *key)] - samples[(other, *key)]
            low, high = gain.quantile(ENDS).round(DIGITS)
            value = means[(OURS, *key)] - means[(other, *key)]
            rows[(*key, other)] = value, low, high, judge(low, high, values.index.nunique())
    names = pd.MultiIndex.from_tuples(rows, names=[*KEY, "baseline"])
    return pd.DataFrame(list(rows.values()), names, ["value", "low", "high", "verdict"])


def judge(low: float, high: float, scenes: int) -> str:
    """Judge a difference by its interval, which comes from this number of scenes.

    Returns:
        "better" or "worse" if the interval excludes 0. An interval with 0 is "equal" if it lies
        within -EQUAL .. +EQUAL. A wider one shows no difference either way, and is "no difference
        found". With fewer than MIN_SCENES scenes, or without an interval, "too few".
    """
    if scenes < MIN_SCENES or math.isnan(low):
        return "too few"
    if low > 0:
        return "better"
    if high < 0:
        return "worse"
    return "equal" if max(-low, high) <= EQUAL else "no difference found"


def calibration(scored: Sequence[Scored]) -> pd.DataFrame:
    """Compute the fraction of correct matches in BINS equal ranges of the confidence.

    Ranges without a match are left out. The columns are confidence, precision and matches.
    """
    # Join the matches (E,) of all pairs, and find the range of each.
    scores = np.concatenate([each[0] for each in scored])
    correct = np.concatenate([each[1] for each in scored])
    part = np.minimum((scores * BINS).astype(int), BINS - 1)
    frame = pd.DataFrame({"confidence": scores, "precision": correct, "matches": 1})
    return frame.groupby(part).agg({"confidence": "mean", "precision": "mean", "matches": "sum"})


def error_curves(table: pd.DataFrame) -> Dict[tuple, pd.DataFrame]:
    """Compute the curve of each estimator: the fraction of pairs whose error is at most a limit.

    A key is ("error", estimator, refined). A curve has a row for each limit, which is its index,
    and a column for each matcher. The area below it is the AUC.
    """
    # The limits rise in a hundred steps to the widest AUC, 10 px or 20 degrees.
    steps = np.arange(101)
    limits, unit = (steps / 5, "error_deg") if is_posed(table) else (steps / 10, "error_px")
    curves = {}
    for key, part in table[table["metric"] == "error"].groupby(KEY, sort=False):
        # Errors are (pairs, matchers), and fractions (limits, matchers).
        errors = part.pivot(index="number", columns="matcher", values="value")
        errors = errors[part["matcher"].unique()]
        fractions = [(errors <= limit).mean() for limit in limits]
        curves[key] = pd.DataFrame(fractions, pd.Index(limits, name=unit))
    return curves
