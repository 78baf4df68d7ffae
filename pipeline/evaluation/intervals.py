"""How sure a mean is: bootstrap intervals over pairs, and paired differences to the best baseline.

Every figure of the tables is a mean of one value per pair (an AUC too: of max(0, 1 - error / T)), so one routine
serves all. Pairs are drawn with replacement; all matchers were run on the same pairs, so a difference is taken
pair by pair and its interval is far narrower than those of its two sides.
"""

from __future__ import annotations

import inspect
import math
from typing import Callable, Dict, List, Sequence

import numpy as np

from pipeline.evaluation.matchers import OURS
from pipeline.evaluation.scoring import Row, estimators_of
from pipeline.evaluation.summary import AUC_PIXELS, plain

RESAMPLES = 2000
LEVEL = 0.95
SEED = 0

Values = Dict[str, np.ndarray]


def values_of(rows: Sequence[Row]) -> Values:
    """One value per pair of each figure, (P,) float64; NaN where a pair has no say in it (recall without truth)."""
    values = {
        "precision": np.array([row.counts.precision for row in rows], np.float64),
        "recall": np.array([row.counts.recall for row in rows], np.float64),
    }
    for estimator in estimators_of(rows):
        errors = np.array([row.errors[estimator] for row in rows], np.float64)
        for pixels in AUC_PIXELS:
            values[f"auc_{estimator}_{pixels}"] = np.maximum(0.0, 1.0 - errors / pixels)
    return values


def interval(values: np.ndarray) -> Dict[str, float]:
    """Mean of the values that are numbers, its 95 % interval by the percentile bootstrap, and their count.

    One value, or none, has no interval. Source: scipy.stats.bootstrap (Efron and Tibshirani 1993, chapter 13).
    """
    values = values[np.isfinite(values)]
    mean = float(values.mean()) if values.size else math.nan
    low = high = math.nan
    if values.size > 1:
        found = bootstrap(values).confidence_interval
        low, high = float(found.low), float(found.high)
    return {"value": mean, "low": low, "high": high, "pairs": int(values.size)}


def bootstrap(values: np.ndarray):
    """scipy's percentile bootstrap of the mean, from a fixed seed: the same values give the same interval."""
    from scipy import stats

    # the argument is called `rng` from scipy 1.15 on and `random_state` before
    name = "rng" if "rng" in inspect.signature(stats.bootstrap).parameters else "random_state"
    return stats.bootstrap(
        (values,),
        np.mean,
        n_resamples=RESAMPLES,
        batch=100,
        confidence_level=LEVEL,
        method="percentile",
        **{name: np.random.default_rng(SEED)},
    )


def intervals(
    rows: Sequence, matchers: Sequence[str], values_of: Callable[[Sequence], Values] = values_of
) -> List[Dict[str, object]]:
    """One line per matcher and figure: matcher, figure, value, low, high, pairs.

    rows: anything with a `matcher`, of which `values_of` makes one value per pair and figure.
    """
    lines = []
    for matcher in matchers:
        values = values_of([row for row in rows if row.matcher == matcher])
        for figure, series in values.items():
            found = {name: plain(value) for name, value in interval(series).items()}
            lines.append({"matcher": matcher, "figure": figure, **found})
    return lines


def differences(
    rows: Sequence, values_of: Callable[[Sequence], Values] = values_of
) -> List[Dict[str, object]]:
    """Ours minus the best baseline, pair by pair, for each figure.

    The best baseline is the one with the highest mean on these pairs: a choice in its favour. verdict: better or
    worse where the interval does not hold 0, else undecided.
    """
    names = dict.fromkeys(row.matcher for row in rows)
    by_matcher = {name: values_of([row for row in rows if row.matcher == name]) for name in names}
    baselines = [name for name in names if name != OURS]
    lines = []
    for figure, ours in by_matcher[OURS].items():
        means = {name: interval_mean(by_matcher[name][figure]) for name in baselines}
        best = max(means, key=lambda name: means[name])
        found = interval(ours - by_matcher[best][figure])
        lines.append(
            {
                "figure": figure,
                "baseline": best,
                **{name: plain(value) for name, value in found.items()},
                "verdict": verdict(found["low"], found["high"]),
            }
        )
    return lines


def interval_mean(values: np.ndarray) -> float:
    """Mean of the values that are numbers, -1 when there is none (so that any other is better)."""
    values = values[np.isfinite(values)]
    return float(values.mean()) if values.size else -1.0


def verdict(low: float, high: float) -> str:
    """What an interval of a difference says."""
    if low > 0:
        return "better"
    return "worse" if high < 0 else "undecided"
