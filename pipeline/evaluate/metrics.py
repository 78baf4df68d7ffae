"""From results of pairs to figures: means, how sure they are, and ours beside the baselines; each computed once.

Every figure is a mean of one value per pair or is read off such means, so one routine serves all. Pairs of one
photograph or sequence are alike, so these are resampled, with all their pairs: every figure of every matcher on the
same resamples, so that a difference is taken within each and its interval is far narrower than those of its two sides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from pipeline.bootstrap import (
    DIGITS,
    LEAST_CLUSTERS,
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
from pipeline.evaluate.confidence import Sweep, calibration, calibration_error, recall_at_precision, steps, sweep
from pipeline.evaluate.matchers import OURS, UNRANKED
from pipeline.evaluate.scoring import Judged, PairResult, Row, aligned_name, estimators_of, matchers_of

AUC_PX = (1, 3, 5, 10)
AUC_DEGREES = (5, 10, 20)  # of a pose
RATIO_TEST = "ratio_test"  # whose precision and recall are asked of the networks too
COMPARED = (OURS, RATIO_TEST)  # in tables by how hard the pairs are
CURVE_POINTS = 512  # of a resampled curve

Figures = Dict[str, Optional[float]]


def recall_curve(errors: Sequence[float], limits: Sequence[float]) -> np.ndarray:
    """Share of pairs with an error of at most each limit. errors: (P,), limits: (L,); returns (L,)."""
    values = np.sort(np.asarray(errors, np.float64))  # NaN stands last, as no estimate does
    return np.searchsorted(values, limits, side="right") / (values.size or np.nan)


def resampled_curves(clusters: Clusters, judged: Sequence[Judged]) -> Tuple[np.ndarray, np.ndarray]:
    """Precision and recall on each resample while confidence falls, (R, CURVE_POINTS) each."""
    confidence, pair, *shares = steps(judged)
    column = np.arange(len(confidence)) * CURVE_POINTS // max(len(confidence), 1)
    asked = (np.ones(len(judged)), np.array([one.truth > 0 for one in judged], np.float64))
    curves = []
    for share, has_a_say in zip(shares, asked):
        sums = np.zeros((clusters.count, CURVE_POINTS))
        np.add.at(sums, (clusters.of_pair[pair], column), share)
        pairs = clusters.weights @ clusters.per_cluster(np.arange(len(judged)), has_a_say)
        with np.errstate(invalid="ignore"):
            curves.append(clusters.weights @ sums.cumsum(axis=1) / pairs[:, None])
    return curves[0], curves[1]


def values_of(rows: Sequence[Row]) -> Dict[str, np.ndarray]:
    """One value per pair of each figure, (P,) float64; NaN where a pair has no say in it (recall without truth)."""
    values = {"precision": np.array([row.counts.precision for row in rows], np.float64)}
    if found_share(rows) == "matching_score":
        values["matching_score"] = np.array([row.matching_score for row in rows], np.float64)
    else:
        values["recall"] = np.array([row.counts.recall for row in rows], np.float64)
    for name in estimators_of(rows):
        errors = [row.errors[name] for row in rows]
        for limit in AUC_DEGREES if poses.is_pose(name) else AUC_PX:
            values[f"auc_{name}_{limit}"] = auc_by_pair(errors, limit)
    return values


def found_share(rows: Sequence[Row]) -> str:
    """Name of the figure that says how much is found: the recall, or the matching score where true partners are not
    known."""
    return "matching_score" if poses.NAME in estimators_of(rows) else "recall"


def figures_of(rows: Sequence[Row], means: Optional[Mapping[str, Estimate]] = None) -> Figures:
    """Figures of the rows of one matcher, means beside their number of pairs where that is not all of them.

    The median error is over all pairs, None when half of them have no estimate; the mean over `estimated_*` pairs.
    means: those of `values_of`, and more, where they are known already.
    """
    if means is None:
        means = {name: Estimate(*mean_finite(series), np.zeros(0)) for name, series in values_of(rows).items()}
    figures: Dict[str, float] = {"pairs": len(rows), "matches": mean_finite([row.counts.matches for row in rows])[0]}
    for name, mean in means.items():
        if not name.startswith("auc_"):
            figures[name] = mean.value
        if name == "recall":
            figures["recall_pairs"] = mean.pairs
    for estimator in estimators_of(rows):
        areas = (name for name in means if name.rpartition("_")[0] == f"auc_{estimator}")
        figures.update({name: means[name].value for name in areas})
        errors = [row.errors[estimator] for row in rows]
        figures[f"mean_error_{estimator}"], figures[f"estimated_{estimator}"] = mean_finite(errors)
        figures[f"median_error_{estimator}"] = float(np.median(errors)) if errors else math.nan
    return rounded(figures)


@dataclass(frozen=True)
class Comparison:
    """What an evaluation says. intervals: a line per matcher and figure; differences: ours minus the others."""

    figures: Figures
    intervals: List[Line]
    differences: List[Line]
    sweeps: Dict[str, Sweep]
    calibration: List[Line]
    clusters: int


def compare(results: Sequence[PairResult], thresholds: Mapping[str, float]) -> Comparison:
    """All figures of an evaluation. thresholds: of the networks, by name."""
    rows = {name: [one.rows[name] for one in results] for name in results[0].rows}
    judged = {name: [one.judged[name] for one in results] for name in results[0].judged}
    clusters = Clusters([row.scene for row in rows[OURS]])
    found = {name: {f: clusters.mean(v) for f, v in values_of(own).items()} for name, own in rows.items()}
    sweeps, share = {name: sweep(own) for name, own in judged.items()}, found_share(rows[OURS])
    for name in (*sweeps, *([RATIO_TEST] if sweeps else [])):
        points = operating_points(found[RATIO_TEST], share, sweeps.get(name), judged.get(name, ()), clusters)
        first = {figure: found[name][figure] for figure in ("precision", share)}
        found[name] = {**first, **points, **found[name]}
    figures: Figures = {}
    for name, own in rows.items():
        figures.update({f"{name}.{figure}": value for figure, value in figures_of(own, found[name]).items()})
        if name in thresholds:
            figures[f"{name}.threshold"] = plain(thresholds[name])
    bins = calibration(judged.get(OURS, ()))
    if judged:
        figures[f"{OURS}.calibration_error"] = plain(calibration_error(bins))
    intervals = [
        {"matcher": name, "figure": figure, **estimate.line(), "clusters": clusters.count}
        for name, own in found.items()
        for figure, estimate in own.items()
    ]
    lines = differences(found, tuple(thresholds), clusters.count)
    return Comparison(figures, intervals, lines, sweeps, [rounded(line) for line in bins], clusters.count)


def operating_points(
    ratio_test: Mapping[str, Estimate], share: str, found: Optional[Sweep], judged: Sequence[Judged], clusters: Clusters
) -> Dict[str, Estimate]:
    """Recall at the ratio test's precision and the reverse: swept over all confidences, exact but for the resamples.

    share: what `found_share` calls the recall. found, judged: of a network; None: of the ratio test itself, which has
    one operating point.
    """
    names = (f"{share}_at_ratio_precision", f"precision_at_ratio_{share}")
    precision, recall = ratio_test["precision"], ratio_test[share]
    if found is None:
        return dict(zip(names, (recall, precision)))
    exact, resampled = (found.precision, found.recall), resampled_curves(clusters, judged)
    points = {}
    for name, least, own, pairs in ((names[0], precision, 0, found.recall_pairs), (names[1], recall, 1, found.pairs)):
        value = float(recall_at_precision(exact[own], exact[1 - own], np.array(least.value)))
        samples = recall_at_precision(resampled[own], resampled[1 - own], least.samples)
        points[name] = Estimate(value if found.recall_pairs else math.nan, pairs, samples)
    return points


def differences(found: Mapping[str, Mapping[str, Estimate]], networks: Sequence[str], clusters: int) -> List[Line]:
    """Ours minus the best baseline, then minus each further network, for each figure.

    The best baseline has the highest mean on these pairs: a choice in its favour. verdict: better or worse where the
    interval does not hold 0, equal where it does, too few where there are not LEAST_CLUSTERS to resample.
    """
    baselines = [name for name in found if name not in (*networks, *UNRANKED)]
    lines = []
    for others in (baselines, *([name] for name in networks if name != OURS)):
        for figure, ours in found[OURS].items():
            known = {name: found[name][figure] for name in others if figure in found[name]}
            best = max(known, key=lambda name: np.nan_to_num(known[name].value, nan=-1.0))
            line = Estimate(ours.value - known[best].value, ours.pairs, ours.samples - known[best].samples).line()
            verdict = "too few"
            if clusters >= LEAST_CLUSTERS and line["low"] is not None:
                verdict = "better" if line["low"] > 0 else "worse" if line["high"] < 0 else "equal"
            lines.append({"figure": figure, "baseline": best, **line, "clusters": clusters, "verdict": verdict})
    return lines


def unrelated(rows: Sequence[Row]) -> Figures:
    """Matches on pairs with nothing in common, by matcher: mean, 95th percentile and the number of pairs."""
    found: Figures = {}
    for matcher in matchers_of(rows):
        counts = [row.counts.matches for row in rows if row.matcher == matcher]
        figures = {"matches": np.mean(counts), "matches_p95": np.percentile(counts, 95), "pairs": len(counts)}
        found.update({f"{matcher}.unrelated_{name}": plain(value) for name, value in figures.items()})
    return found


def by_scene(rows: Sequence[Row]) -> List[Line]:
    """One line per scene (sequence or image) and matcher, scenes in their order of appearance."""
    scenes: Dict[str, Dict[str, List[Row]]] = {}
    for row in rows:
        scenes.setdefault(row.scene, {}).setdefault(row.matcher, []).append(row)
    return [
        {"scene": scene, "matcher": matcher, **figures_of(own)}
        for scene, by_matcher in scenes.items()
        for matcher, own in by_matcher.items()
    ]


def by_condition(results: Sequence[PairResult]) -> List[Line]:
    """One line per condition and bin that holds a pair."""
    lines = []
    for condition, edges in BINS.items():
        for low, high in zip(edges, edges[1:]):
            level = f"{low:g} ..{'' if math.isinf(high) else f' {high:g}'}"
            inside = [one for one in results if low <= one.rows[OURS].difficulty.get(condition, math.nan) < high]
            lines += [condition_line(condition, level, inside)] if inside else []
    return lines


def condition_line(condition: str, level: str, results: Sequence[PairResult]) -> Line:
    """A line of robustness.csv: condition, level, pairs, and figures of ours and of the ratio test."""
    line: Line = {"condition": condition, "level": level}
    rows = [row for one in results for row in one.rows.values()]
    names = estimators_of(rows)
    areas = [f"auc_{name}_5" for name in (*names[:2], *map(aligned_name, names[:1]))]
    shown = [name for name in values_of(rows) if name in areas or not name.startswith("auc_")]
    for matcher in COMPARED:
        figures = figures_of([row for row in rows if row.matcher == matcher])
        line.setdefault("pairs", figures["pairs"])
        if "recall_pairs" in figures:
            line.setdefault("recall_pairs", figures["recall_pairs"])
        line.update({f"{matcher}.{name}": figures[name] for name in shown})
    judged = [one.judged[OURS] for one in results if OURS in one.judged]
    if judged:
        found, least, share = sweep(judged), line[f"{RATIO_TEST}.precision"], found_share(rows)
        recall = float(recall_at_precision(found.precision, found.recall, np.array(least)))
        line[f"{OURS}.{share}_at_ratio_precision"] = plain(recall if found.recall_pairs else math.nan)
        line[f"{RATIO_TEST}.{share}_at_ratio_precision"] = line[f"{RATIO_TEST}.{share}"]
    return line


def pair_line(row: Row) -> Line:
    """A line of pairs.csv: everything needed to make any figure again by hand. `inf` = no estimate."""
    counts, posed = row.counts, poses.NAME in row.errors
    line: Line = {name: getattr(row, name) for name in ("pair", "scene", "matcher", "keypoints0", "keypoints1")}
    line.update(matches=counts.matches, correct=counts.correct)
    line.update({} if posed else {"true_matches": counts.truth, "found": counts.found})
    figures = {"precision": counts.precision}
    figures.update({"matching_score": row.matching_score} if posed else {"recall": counts.recall})
    figures.update({f"error_{name}": error for name, error in row.errors.items()})
    line.update({name: round(value, DIGITS) for name, value in {**figures, **row.conditions}.items()})
    return line if posed or counts.truth else {**line, "recall": ""}
