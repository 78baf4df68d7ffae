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
from pipeline.evaluate.scoring import MatchOutcomes, Row

KEY = ["metric", "estimator", "refined"]  # The columns that say what a value measures
COLUMNS = ["number", "pair", "scene", "matcher", "estimator", "refined", "metric", "value"]
AUC_PX = (1, 3, 5, 10)
AUC_DEGREES = (5, 10, 20)  # Limits of the error of a pose
WITHIN = 5  # px or degrees, the limit of the fraction of pairs with a small error
# Metrics whose values are in the table itself
TABLE_METRICS = ("matches", "precision", "recall", "matching_score")
DIGITS = 6  # Decimals of the ends of intervals, beyond which sums of float32 are noise
RESAMPLES = 2000
SEED = 0
ENDS = (0.025, 0.975)  # Quantiles of the resamples that end the 95 % interval
# Scenes that a verdict needs. Five scenes agree by chance with probability 2 ** (1 - 5) = 0.06.
MIN_SCENES = 6
EQUAL = 0.02  # A difference is called equal if its whole interval is within this limit
POINTS = 512  # Number of thresholds that a resample tries
BINS = 10  # Number of ranges of the confidence, for its calibration


def name_metric(metric: str, estimator: str = "", refined: bool = False) -> str:
    """Return the name of a metric in files, DVC and MLflow.

    For example, `auc_5` of refined matches by RANSAC is `auc_ransac_refined_5`. The arguments are
    the values of the columns KEY.
    """
    kind, *limit = re.split(r"_(?=\d+$)", metric)
    return "_".join(filter(None, (kind, estimator, "refined" if refined else "", *limit)))


def make_table(results: Sequence[Sequence[Row]]) -> pd.DataFrame:
    """Make the long table from the rows of each pair, in the order of the source."""
    rows = [(number, *row) for number, pair in enumerate(results) for row in pair]
    return pd.DataFrame(rows, columns=COLUMNS)


def has_pose_errors(table: pd.DataFrame) -> bool:
    """Return whether the errors are those of poses, in degrees, and not of corners, in px."""
    return bool(table["estimator"].isin(list(POSE_ESTIMATORS)).any())


def get_leading_estimator(table: pd.DataFrame) -> str:
    """Return the first estimator of the table, which decides the verdict and the pictures."""
    return str(table.loc[table["metric"] == "error", "estimator"].iloc[0])


def choose_recall_metric(table: pd.DataFrame) -> str:
    """Return the metric of recall: "recall" for pairs with a homography, else "matching_score"."""
    return "matching_score" if has_pose_errors(table) else "recall"


def compute_pair_values(
    table: pd.DataFrame, outcomes: Mapping[str, Sequence[MatchOutcomes]]
) -> pd.DataFrame:
    """Compute what each pair contributes to each metric. A metric is the mean of a column.

    Args:
        table: the long table of all pairs.
        outcomes: the outcomes of all matches of each pair, by network.

    Returns:
        A row for each pair, which is named by its scene, and a column for each (matcher, metric,
        estimator, refined).
    """
    limits = AUC_DEGREES if has_pose_errors(table) else AUC_PX
    columns: Dict[tuple, Sequence[float]] = {}
    for (matcher, *key), part in table.groupby(["matcher", *KEY], sort=False):
        metric, *estimated = key
        values = part["value"].to_numpy()
        if metric == "error":
            for limit in limits:
                columns[(matcher, f"auc_{limit}", *estimated)] = compute_pair_aucs(values, limit)
            columns[(matcher, f"within_{WITHIN}", *estimated)] = (values <= WITHIN).astype(float)
        elif metric in TABLE_METRICS:
            columns[(matcher, *key)] = values
    # The recall of a network at the precision of the ratio test needs all matches of the network.
    recall = choose_recall_metric(table)
    key = f"{recall}_at_ratio_precision", "", False
    min_precision = float(np.mean(columns[RATIO_TEST, "precision", "", False]))
    # The ratio test itself has one operating point.
    columns[(RATIO_TEST, *key)] = columns[RATIO_TEST, recall, "", False]
    for matcher, pairs in outcomes.items():
        threshold = find_threshold(pairs, min_precision)
        columns[(matcher, *key)] = compute_precision_recall(pairs, np.array([threshold]))[1][:, 0]
    # Make the frame (pairs, columns), with the matchers in their order of appearance.
    frame = pd.DataFrame(columns, table.drop_duplicates("number")["scene"])
    return frame.rename_axis(columns=["matcher", *KEY])[list(table["matcher"].unique())]


def compute_pair_aucs(errors: Sequence[float], threshold: float) -> np.ndarray:
    """Compute what each pair contributes to the AUC up to the error `threshold`.

    The AUC is the area under the fraction of pairs within an error. This area is the mean of the
    contributions. A contribution is 1 without an error, and 0 from the threshold on.

    Args:
        errors: the error of each of P pairs. A pair without an estimate has inf or NaN, and counts
            as a failure.
        threshold: in the unit of the errors, px or degrees.

    Returns:
        (P,) float64, from 0 to 1.
    """
    # Unlike `maximum`, `fmax` gives 0 for NaN.
    return np.fmax(0.0, 1.0 - np.asarray(errors, np.float64) / threshold)


def find_threshold(outcomes: Sequence[MatchOutcomes], min_precision: float) -> float:
    """Find the lowest confidence above which the pairs have this mean precision or more.

    Args:
        outcomes: the outcomes of all matches of each pair. The precision of a pair without matches
            is 0.
        min_precision: the mean precision that is needed, 0 to 1.

    Returns:
        The confidence, or infinity if no confidence is enough.
    """
    steps = []
    for scores, is_correct, *_ in outcomes:
        # Change of precision as matches are added by confidence.
        order = np.argsort(-scores, kind="stable")
        precision = np.cumsum(is_correct[order]) / np.arange(1, len(order) + 1)
        steps.append((scores[order], np.diff(precision, prepend=0.0)))
    confidence, change = map(np.concatenate, zip(*steps))
    # Matches of equal confidence, also of different pairs, are added together.
    mean = pd.Series(change).groupby(-confidence).sum().cumsum() / len(outcomes)
    sufficient = mean[mean >= min_precision - 1e-12]  # Sums of float64 are rounded
    return -sufficient.index[-1] if len(sufficient) else math.inf


def compute_precision_recall(
    outcomes: Sequence[MatchOutcomes], thresholds: np.ndarray
) -> np.ndarray:
    """Compute precision and recall of each of P pairs at each of T thresholds (T,), (2, P, T)."""
    parts = []
    for scores, is_correct, is_true, true_count in outcomes:
        # (T, K): which of the K matches count at each threshold
        counts = scores >= thresholds[:, None]
        # (T,): numbers of matches
        match_counts = counts.sum(1)
        correct_counts = (counts & is_correct).sum(1)
        recalled_counts = (counts & is_true).sum(1)
        precision = correct_counts / np.maximum(match_counts, 1)
        parts.append((precision, recalled_counts / (true_count or np.nan)))
    return np.array(parts).swapaxes(0, 1)


def compute_precision_recall_curve(outcomes: Sequence[MatchOutcomes]) -> pd.DataFrame:
    """Compute mean precision and recall over the threshold of a matcher.

    Args:
        outcomes: the outcomes of all matches of each pair.

    Returns:
        The columns threshold, precision and recall. The thresholds are at most POINTS quantiles of
        the confidences.
    """
    confidences = np.concatenate([[1.0], *(scores for scores, *_ in outcomes)])
    thresholds = np.unique(np.quantile(confidences, np.linspace(0, 1, POINTS)))
    precision, recall = compute_precision_recall(outcomes, thresholds)
    means = {
        "threshold": thresholds,
        "precision": precision.mean(0),
        "recall": pd.DataFrame(recall).mean(),  # Without pairs whose recall is undefined
    }
    return pd.DataFrame(means)


def bootstrap_scenes(
    values: pd.DataFrame, outcomes: Mapping[str, Sequence[MatchOutcomes]] = MappingProxyType({})
) -> pd.DataFrame:
    """Bootstrap over scenes: column means of R resamples, (R, columns).

    Args:
        values: the values of all pairs, from `compute_pair_values`.
        outcomes: what `compute_pair_values` got.

    Returns:
        RESAMPLES rows, or none if there is a single scene.
    """
    by_scene = values.groupby(level="scene", sort=False)
    # (R, scenes): how often each resample draws each scene
    count = by_scene.ngroups
    random = np.random.default_rng(SEED)
    drawn = random.integers(max(count, 1), size=(RESAMPLES if count > 1 else 0, count))
    weights = np.array([np.bincount(scenes, minlength=count) for scenes in drawn], np.float64)
    weights = weights.reshape(len(drawn), count)
    # (R, scenes) @ (scenes, columns): divide the sums of the values by their numbers, without NaN.
    with np.errstate(invalid="ignore"):
        means = (weights @ by_scene.sum().to_numpy()) / (weights @ by_scene.count().to_numpy())
    samples = pd.DataFrame(means, columns=values.columns)
    # Each resample has its own threshold for the last column of a network, the recall at the ratio
    # test's precision.
    for matcher, pairs in outcomes.items():
        confidences = np.concatenate([[1.0], *(scores for scores, *_ in pairs)])
        thresholds = np.quantile(confidences, np.linspace(0, 1, POINTS))
        precision, recall = (
            bootstrap_scenes(pd.DataFrame(curve, values.index))
            for curve in compute_precision_recall(pairs, thresholds)
        )
        is_precise = precision.ge(samples[RATIO_TEST, "precision", "", False], axis=0)
        samples[(matcher, *values[matcher].columns[-1])] = (recall * is_precise).max(axis=1)
    return samples


def summarize(values: pd.DataFrame, samples: pd.DataFrame) -> pd.DataFrame:
    """Compute value, low, high and number of pairs of each metric.

    Low and high are the ends of the 95 % interval by the percentile bootstrap (Efron and Tibshirani
    1993, chapter 13). They are NaN for a single scene. Pairs without a value are not counted, for
    example a pair without true matches for the recall.

    Args:
        values: the values of all pairs, from `compute_pair_values`.
        samples: their means on each resample, from `bootstrap_scenes`.
    """
    low, high = samples.quantile(ENDS).round(DIGITS).to_numpy()
    return pd.DataFrame({"value": values.mean(), "low": low, "high": high, "pairs": values.count()})


def compare(values: pd.DataFrame, samples: pd.DataFrame, networks: Sequence[str]) -> pd.DataFrame:
    """Subtract the best baseline, the ratio test and each further network from the network.

    The best baseline has the highest mean on these pairs, which is a choice in its favor.

    Args:
        values: the values of all pairs, from `compute_pair_values`.
        samples: their means on each resample, from `bootstrap_scenes`.
        networks: the names of the networks, the evaluated one among them.

    Returns:
        Value, low, high and verdict (from `judge`) of each difference. A row belongs to (metric,
        estimator, refined, baseline). The first row of a metric has the best baseline.
    """
    means = values.mean()
    # Networks and the bound are no baselines.
    names = values.columns.unique("matcher")
    baselines = [name for name in names if name not in (*networks, BOUND)]
    further = [name for name in networks if name != OURS]
    rows = {}
    for key in values[OURS].columns.drop("matches", level="metric"):
        best = max(baselines, key=lambda name: means.get((name, *key), -math.inf))
        for baseline in dict.fromkeys([best, RATIO_TEST, *further]):
            if (baseline, *key) not in means:
                continue
            # Subtract within each resample, and take the interval of the differences.
            gain = samples[(OURS, *key)] - samples[(baseline, *key)]
            low, high = gain.quantile(ENDS).round(DIGITS)
            value = means[(OURS, *key)] - means[(baseline, *key)]
            rows[(*key, baseline)] = value, low, high, judge(low, high, values.index.nunique())
    names = pd.MultiIndex.from_tuples(rows, names=[*KEY, "baseline"])
    return pd.DataFrame(list(rows.values()), names, ["value", "low", "high", "verdict"])


def judge(low: float, high: float, scenes: int) -> str:
    """Judge a difference by its interval.

    Args:
        low, high: the ends of the 95 % interval, NaN without one.
        scenes: number of scenes that were resampled.

    Returns:
        "better" or "worse" if the interval excludes 0. "equal" if the interval has 0 and lies
        within -EQUAL .. +EQUAL. "no difference found" if it has 0 and is wider. "too few" if there
        are fewer than MIN_SCENES scenes, or no interval.
    """
    if scenes < MIN_SCENES or math.isnan(low):
        return "too few"
    if low > 0:
        return "better"
    if high < 0:
        return "worse"
    return "equal" if max(-low, high) <= EQUAL else "no difference found"


def compute_calibration(outcomes: Sequence[MatchOutcomes]) -> pd.DataFrame:
    """Compute the fraction of correct matches in BINS equal ranges of the confidence.

    Args:
        outcomes: the outcomes of all matches of each pair.

    Returns:
        The columns confidence and precision (means) and matches (a number), with a row for each
        range that has a match.
    """
    # Join the matches (E,) of all pairs, and find the range of each match.
    scores = np.concatenate([scores for scores, *_ in outcomes])
    is_correct = np.concatenate([is_correct for _, is_correct, *_ in outcomes])
    bins = np.minimum((scores * BINS).astype(int), BINS - 1)
    frame = pd.DataFrame({"confidence": scores, "precision": is_correct, "matches": 1})
    return frame.groupby(bins).agg({"confidence": "mean", "precision": "mean", "matches": "sum"})


def compute_error_curves(table: pd.DataFrame) -> Dict[tuple, pd.DataFrame]:
    """Compute the curve of each estimator: the fraction of pairs whose error is at most a limit.

    Returns:
        The curves by their keys ("error", estimator, refined). A curve has a row for each limit in
        px or degrees, which is its index, and a column for each matcher. The area below it is the
        AUC.
    """
    # The limits rise in a hundred steps to the widest AUC, 10 px or 20 degrees.
    steps = np.arange(101)
    limits, unit = (steps / 5, "error_deg") if has_pose_errors(table) else (steps / 10, "error_px")
    curves = {}
    for key, part in table[table["metric"] == "error"].groupby(KEY, sort=False):
        # Errors are (pairs, matchers), and fractions (limits, matchers).
        errors = part.pivot(index="number", columns="matcher", values="value")
        errors = errors[part["matcher"].unique()]
        fractions = [(errors <= limit).mean() for limit in limits]
        curves[key] = pd.DataFrame(fractions, pd.Index(limits, name=unit))
    return curves
