"""Metrics of the results of pairs: means, their intervals, and ours compared with the baselines.

Every metric is a mean of one value per pair, or is read off such means. Pairs of one photograph or
sequence are alike, so the bootstrap resamples photographs (sequences) with all their pairs. All
metrics of all matchers share the resamples: a difference is taken within each resample, so its
interval is far narrower than those of its two sides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from pipeline.bootstrap import (
    DIGITS,
    MIN_CLUSTERS,
    Clusters,
    Estimate,
    Line,
    auc_by_pair,
    mean_finite,
    plain,
    rounded,
)
from pipeline.evaluate import poses
from pipeline.evaluate.conditions import BINS
from pipeline.evaluate.confidence import (
    Sweep,
    calibration,
    calibration_error,
    recall_at_precision,
    steps,
    sweep,
)
from pipeline.evaluate.matchers import OURS, RATIO_TEST, UNRANKED
from pipeline.evaluate.scoring import (
    PairResult,
    Row,
    ScoredMatches,
    aligned_name,
    estimators_of,
    matchers_of,
)

AUC_PX = (1, 3, 5, 10)
AUC_DEGREES = (5, 10, 20)  # of a pose
COMPARED = (OURS, RATIO_TEST)  # in tables by difficulty of the pairs
CURVE_POINTS = 512  # of a resampled curve

Metrics = Dict[str, Optional[float]]


def recall_curve(errors: Sequence[float], limits: Sequence[float]) -> np.ndarray:
    """Fraction of pairs with an error of at most each limit. errors: (P,), limits: (L,); returns
    (L,).
    """
    ordered = np.sort(np.asarray(errors, np.float64))  # NaN comes last: no estimate
    return np.searchsorted(ordered, limits, side="right") / (ordered.size or np.nan)


def resampled_curves(
    clusters: Clusters, scored: Sequence[ScoredMatches]
) -> Tuple[np.ndarray, np.ndarray]:
    """Precision and recall on each resample while confidence falls, (R, CURVE_POINTS) each."""
    confidence, pair, *increments = steps(scored)
    column = np.arange(len(confidence)) * CURVE_POINTS // max(len(confidence), 1)
    counted = (
        np.ones(len(scored)),
        np.array([matches.truth > 0 for matches in scored], np.float64),
    )
    curves = []
    for increment, weight in zip(increments, counted):
        sums = np.zeros((clusters.count, CURVE_POINTS))
        np.add.at(sums, (clusters.of_pair[pair], column), increment)
        pairs = clusters.weights @ clusters.per_cluster(np.arange(len(scored)), weight)
        with np.errstate(invalid="ignore"):
            curves.append(clusters.weights @ sums.cumsum(axis=1) / pairs[:, None])
    return curves[0], curves[1]


def values_of(rows: Sequence[Row]) -> Dict[str, np.ndarray]:
    """One value per pair of each metric, (P,) float64; NaN where it is undefined (recall without
    true matches).
    """
    values = {"precision": np.array([row.counts.precision for row in rows], np.float64)}
    if recall_name(rows) == "matching_score":
        values["matching_score"] = np.array([row.matching_score for row in rows], np.float64)
    else:
        values["recall"] = np.array([row.counts.recall for row in rows], np.float64)
    for name in estimators_of(rows):
        errors = [row.errors[name] for row in rows]
        for limit in AUC_DEGREES if poses.is_pose(name) else AUC_PX:
            values[f"auc_{name}_{limit}"] = auc_by_pair(errors, limit)
    return values


def recall_name(rows: Sequence[Row]) -> str:
    """Name of the metric used as recall: the matching score where true matches are unknown."""
    return "matching_score" if poses.NAME in estimators_of(rows) else "recall"


def summarize(rows: Sequence[Row], means: Optional[Mapping[str, Estimate]] = None) -> Metrics:
    """Metrics of one matcher's rows; `recall_pairs` and `estimated_*` count the pairs of means that
    leave some out.

    The median error is over all pairs, None when half of them have no estimate; the mean over
    `estimated_*` pairs.
    means: of `values_of` and more, where they are computed already.
    """
    if means is None:
        means = {
            name: Estimate(*mean_finite(values), np.zeros(0))
            for name, values in values_of(rows).items()
        }
    metrics: Dict[str, float] = {
        "pairs": len(rows),
        "matches": mean_finite([row.counts.matches for row in rows])[0],
    }
    for name, mean in means.items():
        if not name.startswith("auc_"):
            metrics[name] = mean.value
        if name == "recall":
            metrics["recall_pairs"] = mean.pairs
    for estimator in estimators_of(rows):
        areas = (name for name in means if name.rpartition("_")[0] == f"auc_{estimator}")
        metrics.update({name: means[name].value for name in areas})
        errors = [row.errors[estimator] for row in rows]
        metrics[f"mean_error_{estimator}"], metrics[f"estimated_{estimator}"] = mean_finite(errors)
        metrics[f"median_error_{estimator}"] = float(np.median(errors)) if errors else math.nan
    return rounded(metrics)


@dataclass(frozen=True)
class Comparison:
    """All metrics. intervals: a line per matcher and metric; differences: ours minus the others."""

    metrics: Metrics
    intervals: List[Line]
    differences: List[Line]
    sweeps: Dict[str, Sweep]
    calibration: List[Line]
    clusters: int


def compare(results: Sequence[PairResult], thresholds: Mapping[str, float]) -> Comparison:
    """Compute all metrics of an evaluation. thresholds: of the networks and of the ratio test.

    The precision and recall of the ratio test are the operating points of the networks.
    """
    networks = [name for name in thresholds if name != RATIO_TEST]
    rows = {name: [result.rows[name] for result in results] for name in results[0].rows}
    scored = {name: [result.scored[name] for result in results] for name in results[0].scored}
    clusters = Clusters([row.scene for row in rows[OURS]])
    estimates = {
        name: {metric: clusters.mean(values) for metric, values in values_of(matcher_rows).items()}
        for name, matcher_rows in rows.items()
    }
    sweeps = {name: sweep(matches) for name, matches in scored.items()}
    recall = recall_name(rows[OURS])
    for name in [*networks, RATIO_TEST] if OURS in sweeps else []:
        swept = sweeps.get(name) if name in networks else None
        points = operating_points(
            estimates[RATIO_TEST], recall, swept, scored.get(name, ()), clusters
        )
        first = {metric: estimates[name][metric] for metric in ("precision", recall)}
        estimates[name] = {**first, **points, **estimates[name]}
    metrics: Metrics = {}
    for name, matcher_rows in rows.items():
        summary = summarize(matcher_rows, estimates[name])
        metrics.update({f"{name}.{metric}": value for metric, value in summary.items()})
        if name in networks:
            metrics[f"{name}.threshold"] = plain(thresholds[name])
    bins = calibration(scored.get(OURS, ()))
    if scored:
        metrics[f"{OURS}.calibration_error"] = plain(calibration_error(bins))
    intervals = [
        {"matcher": name, "figure": metric, **estimate.line(), "clusters": clusters.count}
        for name, by_metric in estimates.items()
        for metric, estimate in by_metric.items()
    ]
    lines = differences(estimates, networks, clusters.count)
    return Comparison(
        metrics, intervals, lines, sweeps, [rounded(line) for line in bins], clusters.count
    )


def operating_points(
    ratio_test: Mapping[str, Estimate],
    recall_metric: str,
    swept: Optional[Sweep],
    scored: Sequence[ScoredMatches],
    clusters: Clusters,
) -> Dict[str, Estimate]:
    """Recall at the ratio test's precision and the reverse, over all confidences; only the
    resamples approximate.

    recall_metric: see `recall_name`. swept, scored: of a network; None for the ratio test, which is
    one point.
    """
    names = (f"{recall_metric}_at_ratio_precision", f"precision_at_ratio_{recall_metric}")
    precision = ratio_test["precision"]
    recall = ratio_test[recall_metric]
    if swept is None:
        return dict(zip(names, (recall, precision)))
    exact = (swept.precision, swept.recall)
    resampled = resampled_curves(clusters, scored)
    points = {}
    for name, least, axis, pairs in (
        (names[0], precision, 0, swept.recall_pairs),
        (names[1], recall, 1, swept.pairs),
    ):
        value = float(recall_at_precision(exact[axis], exact[1 - axis], np.array(least.value)))
        samples = recall_at_precision(resampled[axis], resampled[1 - axis], least.samples)
        points[name] = Estimate(value if swept.recall_pairs else math.nan, pairs, samples)
    return points


def differences(
    estimates: Mapping[str, Mapping[str, Estimate]], networks: Sequence[str], clusters: int
) -> List[Line]:
    """Ours minus the best baseline, then minus each further network, for each metric.

    The best baseline has the highest mean on these pairs: a choice in its favour. verdict: better
    or worse where the interval excludes 0, equal where it contains 0, too few below MIN_CLUSTERS
    clusters.
    """
    baselines = [name for name in estimates if name not in (*networks, *UNRANKED)]
    lines = []
    for others in (baselines, *([name] for name in networks if name != OURS)):
        for metric, ours in estimates[OURS].items():
            known = {name: estimates[name][metric] for name in others if metric in estimates[name]}
            best = max(known, key=lambda name: np.nan_to_num(known[name].value, nan=-1.0))
            line = Estimate(
                ours.value - known[best].value, ours.pairs, ours.samples - known[best].samples
            ).line()
            verdict = "too few"
            if clusters >= MIN_CLUSTERS and line["low"] is not None:
                verdict = "better" if line["low"] > 0 else "worse" if line["high"] < 0 else "equal"
            lines.append(
                {
                    "figure": metric,
                    "baseline": best,
                    **line,
                    "clusters": clusters,
                    "verdict": verdict,
                }
            )
    return lines


def negative_pairs(rows: Sequence[Row]) -> Metrics:
    """Matches on pairs of different photographs, by matcher: mean, 95th percentile and the number
    of pairs.
    """
    metrics: Metrics = {}
    for matcher in matchers_of(rows):
        counts = [row.counts.matches for row in rows if row.matcher == matcher]
        values = {
            "matches": np.mean(counts),
            "matches_p95": np.percentile(counts, 95),
            "pairs": len(counts),
        }
        metrics.update(
            {f"{matcher}.unrelated_{name}": plain(value) for name, value in values.items()}
        )
    return metrics


def by_scene(rows: Sequence[Row]) -> List[Line]:
    """One line per scene (sequence or image) and matcher, scenes in their order of appearance."""
    scenes: Dict[str, Dict[str, List[Row]]] = {}
    for row in rows:
        scenes.setdefault(row.scene, {}).setdefault(row.matcher, []).append(row)
    return [
        {"scene": scene, "matcher": matcher, **summarize(matcher_rows)}
        for scene, by_matcher in scenes.items()
        for matcher, matcher_rows in by_matcher.items()
    ]


def by_condition(results: Sequence[PairResult]) -> List[Line]:
    """One line per condition and bin that contains a pair."""
    lines = []
    for condition, edges in BINS.items():
        for low, high in zip(edges, edges[1:]):
            level = f"{low:g} ..{'' if math.isinf(high) else f' {high:g}'}"
            inside = [
                pair
                for pair in results
                if low <= pair.rows[OURS].difficulty.get(condition, math.nan) < high
            ]
            lines += [condition_line(condition, level, inside)] if inside else []
    return lines


def condition_line(condition: str, level: str, results: Sequence[PairResult]) -> Line:
    """A line of robustness.csv: condition, level, pairs, and metrics of ours and of the ratio
    test.
    """
    line: Line = {"condition": condition, "level": level}
    rows = [row for result in results for row in result.rows.values()]
    names = estimators_of(rows)
    areas = [f"auc_{name}_5" for name in (*names[:2], *map(aligned_name, names[:1]))]
    shown = [name for name in values_of(rows) if name in areas or not name.startswith("auc_")]
    for matcher in COMPARED:
        metrics = summarize([row for row in rows if row.matcher == matcher])
        line.setdefault("pairs", metrics["pairs"])
        if "recall_pairs" in metrics:
            line.setdefault("recall_pairs", metrics["recall_pairs"])
        line.update({f"{matcher}.{name}": metrics[name] for name in shown})
    scored = [result.scored[OURS] for result in results if OURS in result.scored]
    if scored:
        swept = sweep(scored)
        least = line[f"{RATIO_TEST}.precision"]
        recall_metric = recall_name(rows)
        recall = float(recall_at_precision(swept.precision, swept.recall, np.array(least)))
        line[f"{OURS}.{recall_metric}_at_ratio_precision"] = plain(
            recall if swept.recall_pairs else math.nan
        )
        line[f"{RATIO_TEST}.{recall_metric}_at_ratio_precision"] = line[
            f"{RATIO_TEST}.{recall_metric}"
        ]
    return line


def pair_line(row: Row) -> Line:
    """A line of pairs.csv, from which every metric can be recomputed. `inf`: no estimate."""
    counts = row.counts
    posed = poses.NAME in row.errors
    line: Line = {
        name: getattr(row, name)
        for name in ("pair", "scene", "matcher", "keypoints0", "keypoints1")
    }
    line.update(matches=counts.matches, correct=counts.correct)
    line.update({} if posed else {"true_matches": counts.truth, "found": counts.found})
    metrics = {"precision": counts.precision}
    metrics.update({"matching_score": row.matching_score} if posed else {"recall": counts.recall})
    metrics.update({f"error_{name}": error for name, error in row.errors.items()})
    line.update(
        {name: round(value, DIGITS) for name, value in {**metrics, **row.conditions}.items()}
    )
    return line if posed or counts.truth else {**line, "recall": ""}
