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
    MIN_CLUSTERS,
    Clusters,
    Estimate,
    Line,
    auc_by_pair,
    mean_finite,
    plain,
    round_all,
)
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
from pipeline.evaluate.scoring import PairResult, PairRow, ScoredMatches
from pipeline.report.document import Condition
from pipeline.report.rows import Measure, Row, Table, Values
from pipeline.report.tables import PAIRS

AUC_PX = (1, 3, 5, 10)
AUC_DEGREES = (5, 10, 20)  # of a pose
COMPARED = (OURS, RATIO_TEST)  # in tables by difficulty of the pairs
CURVE_POINTS = 512  # of a resampled curve
RECALL_PAIRS = Measure("recall_pairs")


def recall_curve(errors: Sequence[float], limits: Sequence[float]) -> np.ndarray:
    """Fraction of pairs with an error of at most each limit. errors: (P,), limits: (L,); returns
    (L,).
    """
    ordered = np.sort(np.asarray(errors, np.float64))  # NaN comes last: no estimate
    return np.searchsorted(ordered, limits, side="right") / (ordered.size or np.nan)


def resampled_curves(clusters: Clusters, scored: Sequence[ScoredMatches]) -> List[np.ndarray]:
    """Precision and recall on each resample while confidence falls, (R, CURVE_POINTS) each."""
    confidence, pair, *increments = steps(scored)
    column = np.arange(len(confidence)) * CURVE_POINTS // max(len(confidence), 1)
    counted = np.ones(len(scored)), np.array([matches.truth > 0 for matches in scored], float)
    curves = []
    for increment, weight in zip(increments, counted):
        sums = np.zeros((clusters.count, CURVE_POINTS))
        np.add.at(sums, (clusters.of_pair[pair], column), increment)
        pairs = clusters.weights @ clusters.per_cluster(np.arange(len(scored)), weight)
        with np.errstate(invalid="ignore"):
            curves.append(clusters.weights @ sums.cumsum(axis=1) / pairs[:, None])
    return curves


def values_of(rows: Sequence[PairRow]) -> Dict[Measure, np.ndarray]:
    """One value per pair of each metric, (P,) float64; NaN where it is undefined (recall without
    true matches).
    """
    values = {
        Measure(name): np.array([row.shares[name] for row in rows], np.float64)
        for name in rows[0].shares
    }
    for error in rows[0].errors:
        errors = [row.errors[error] for row in rows]
        for limit in AUC_DEGREES if rows[0].has_pose else AUC_PX:
            values[error._replace(metric="auc", limit=limit)] = auc_by_pair(errors, limit)
    return values


def summarize(
    rows: Sequence[PairRow], means: Optional[Mapping[Measure, Estimate]] = None
) -> Values:
    """Metrics of one matcher's rows; `recall_pairs` and `estimated` count the pairs of means that
    leave some out.

    The median error is over all pairs, None when half of them have no estimate; the mean over
    `estimated` pairs.
    means: of `values_of` and more, where they are computed already.
    """
    if means is None:
        means = {
            measure: Estimate(*mean_finite(values), np.zeros(0))
            for measure, values in values_of(rows).items()
        }
    found: Dict[Measure, float] = {
        PAIRS: len(rows),
        Measure("matches"): float(np.mean([row.counts.matches for row in rows])),
    }
    for measure, mean in means.items():
        if not measure.limit:
            found[measure] = mean.value
        if measure.metric == "recall":
            found[RECALL_PAIRS] = mean.pairs
    for error in rows[0].errors:
        found.update({m: mean.value for m, mean in means.items() if m[1:3] == error[1:3]})
        errors = [row.errors[error] for row in rows]
        mean, estimated = mean_finite(errors)
        found[error._replace(metric="mean_error")] = mean
        found[error._replace(metric="estimated")] = estimated
        found[error._replace(metric="median_error")] = float(np.median(errors))
    return round_all(found)


@dataclass(frozen=True)
class Comparison:
    """All metrics, with intervals. differences: ours minus the others."""

    rows: List[Row]
    differences: List[Row]
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
        name: {measure: clusters.mean(values) for measure, values in values_of(own).items()}
        for name, own in rows.items()
    }
    for name in [*networks, RATIO_TEST]:
        own = scored[name] if name in networks else None
        points = operating_points(estimates[RATIO_TEST], own, clusters)
        shares = dict(list(estimates[name].items())[:2])
        estimates[name] = {**shares, **points, **estimates[name]}
    bins = calibration(scored[OURS])
    found = []
    for name, own in rows.items():
        values = dict(summarize(own, estimates[name]))
        if name in networks:
            values[Measure("threshold")] = plain(thresholds[name])
        for measure, value in values.items():
            mean = estimates[name].get(measure)
            found.append(Row(name, measure, **mean.line()) if mean else Row(name, measure, value))
    found.append(Row(OURS, Measure("calibration_error"), plain(calibration_error(bins))))
    return Comparison(
        found,
        differences(estimates, networks, clusters.count),
        {name: sweep(matches) for name, matches in scored.items()},
        [round_all(line) for line in bins],
        clusters.count,
    )


def operating_points(
    ratio_test: Mapping[Measure, Estimate],
    scored: Optional[Sequence[ScoredMatches]],
    clusters: Clusters,
) -> Dict[Measure, Estimate]:
    """Recall at the ratio test's precision and the reverse, over all confidences; only the
    resamples approximate.

    scored: of a network; None for the ratio test, which is one point.
    """
    names = [measure.metric for measure in ratio_test][:2]  # precision, and recall of any kind
    means = list(ratio_test.values())[:2]
    if scored is not None:
        swept = sweep(scored)
        exact = swept.precision, swept.recall
        numbers = swept.pairs, swept.recall_pairs
        resampled = resampled_curves(clusters, scored)
    points = {}
    for axis in (0, 1):  # of which a value is asked
        other = 1 - axis
        best = means[other]
        if scored is not None:
            value = recall_at_precision(exact[axis], exact[other], means[axis].value)
            samples = recall_at_precision(resampled[axis], resampled[other], means[axis].samples)
            value = float(value) if swept.recall_pairs else math.nan
            best = Estimate(value, numbers[other], samples)
        points[Measure(f"{names[other]}_at_ratio_{names[axis]}")] = best
    return points


def differences(
    estimates: Mapping[str, Mapping[Measure, Estimate]], networks: Sequence[str], clusters: int
) -> List[Row]:
    """Ours minus the best baseline, then minus each further network, for each metric.

    The best baseline has the highest mean on these pairs: a choice in its favour. verdict: better
    or worse where the interval excludes 0, equal where it contains 0, too few below MIN_CLUSTERS
    clusters.
    """
    baselines = [name for name in estimates if name not in (*networks, *UNRANKED)]
    rows = []
    for others in (baselines, *([name] for name in networks if name != OURS)):
        for measure, ours in estimates[OURS].items():
            known = {
                name: estimates[name][measure] for name in others if measure in estimates[name]
            }
            best = max(known, key=lambda name: np.nan_to_num(known[name].value, nan=-1.0))
            samples = ours.samples - known[best].samples
            gain = Estimate(ours.value - known[best].value, ours.pairs, samples).line()
            verdict = "too few"
            if clusters >= MIN_CLUSTERS and gain["low"] is not None:
                worse = "worse" if gain["high"] < 0 else "equal"
                verdict = "better" if gain["low"] > 0 else worse
            rows.append(Row(OURS, measure, **gain, baseline=best, verdict=verdict))
    return rows


def count_negatives(counts: Sequence[Mapping[str, int]]) -> List[Row]:
    """Matches on pairs of different photographs, by matcher: mean, 95th percentile and the number
    of pairs. counts: by matcher, of each pair.
    """
    rows = []
    for matcher in counts[0] if counts else ():
        own = [pair[matcher] for pair in counts]
        values = {"matches": np.mean(own), "matches_p95": np.percentile(own, 95), "pairs": len(own)}
        rows += [Row(matcher, Measure(f"negative_{name}"), plain(v)) for name, v in values.items()]
    return rows


def by_scene(results: Sequence[PairResult]) -> List[Tuple[str, Table]]:
    """The metrics of each scene (sequence or image), in their order of appearance."""
    scenes: Dict[str, Dict[str, List[PairRow]]] = {}
    for result in results:
        for matcher, row in result.rows.items():
            scenes.setdefault(row.scene, {}).setdefault(matcher, []).append(row)
    return [
        (scene, {matcher: summarize(rows) for matcher, rows in by_matcher.items()})
        for scene, by_matcher in scenes.items()
    ]


def by_condition(results: Sequence[PairResult]) -> List[Condition]:
    """The metrics of each condition and bin that contains a pair."""
    found = []
    for condition, edges in BINS.items():
        for low, high in zip(edges, edges[1:]):
            level = f"{low:g} ..{'' if math.isinf(high) else f' {high:g}'}"
            inside = [
                pair
                for pair in results
                if low <= pair.rows[OURS].difficulty.get(condition, math.nan) < high
            ]
            found += [summarize_condition(condition, level, inside)] if inside else []
    return found


def summarize_condition(condition: str, level: str, results: Sequence[PairResult]) -> Condition:
    """Metrics of ours and of the ratio test: precision, recall and AUC@5."""
    tables = {name: summarize([pair.rows[name] for pair in results]) for name in COMPARED}
    shares = results[0].rows[OURS].shares
    shown = [each for each in tables[OURS] if each.metric in shares or each.limit == 5]
    counts = [Row("", m, tables[OURS][m]) for m in (PAIRS, RECALL_PAIRS) if m in tables[OURS]]
    rows = [Row(name, measure, tables[name][measure]) for name in COMPARED for measure in shown]
    recall = shown[1]
    at_ratio = Measure(f"{recall.metric}_at_ratio_precision")
    swept = sweep([pair.scored[OURS] for pair in results])
    # a rounded one would be missed by an equal precision
    least = np.mean([pair.rows[RATIO_TEST].counts.precision for pair in results])
    best = float(recall_at_precision(swept.precision, swept.recall, least))
    rows.append(Row(OURS, at_ratio, plain(best if swept.recall_pairs else math.nan)))
    rows.append(Row(RATIO_TEST, at_ratio, tables[RATIO_TEST][recall]))
    return Condition(condition, level, [*counts, *rows])


def pair_line(row: PairRow) -> Line:
    """A line of pairs.csv, from which every metric can be recomputed. `inf`: no estimate."""
    counts = row.counts
    names = ("pair", "scene", "matcher", "keypoints0", "keypoints1")
    line: Line = {name: getattr(row, name) for name in names}
    line.update(matches=counts.matches, correct=counts.correct)
    line.update({} if row.has_pose else {"true_matches": counts.truth, "found": counts.found})
    errors = {measure.name: error for measure, error in row.errors.items()}
    for name, value in {**row.shares, **errors, **row.conditions}.items():
        line[name] = value if math.isinf(value) else plain(value)
    return line
