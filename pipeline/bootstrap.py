"""Means over pairs with bootstrap intervals over the photographs or sequences of the pairs."""

from __future__ import annotations

import math
from typing import Any, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

DIGITS = 6  # decimals of written metrics; beyond them float32 sums are noise
RESAMPLES = 2000
SEED = 0
LEVEL = 0.95
# Photographs (or scenes) for a verdict. Five agree by chance with probability 2 ** (1 - 5) = 0.06.
MIN_CLUSTERS = 6

Line = Dict[str, Any]


def plain(value: float) -> Optional[float]:
    """Return a number for JSON, rounded. NaN and infinity become None."""
    if isinstance(value, (int, np.integer)):
        return int(value)
    return round(float(value), DIGITS) if math.isfinite(value) else None


def round_all(line: Mapping[Any, Any]) -> Dict[Any, Any]:
    """Apply `plain` to each number."""
    return {name: plain(value) for name, value in line.items()}


def auc_by_pair(errors: Sequence[float], threshold: float) -> np.ndarray:
    """Return the contribution of each pair to the AUC of the recall curve up to `threshold`.

    Contributions are from 0 to 1, and the AUC is their mean. `errors` has one error per pair. It is
    inf (or NaN) for a pair without an estimate, which counts as a failure.
    """
    return np.fmax(0.0, 1.0 - np.asarray(errors, np.float64) / threshold)  # 0 for NaN, too


def mean_finite(values: Union[Sequence[float], np.ndarray]) -> Tuple[float, int]:
    """Return mean and number of the finite values, (NaN, 0) if there is none."""
    array = np.asarray(values, dtype=np.float64)
    finite = array[np.isfinite(array)]
    return (float(finite.mean()), int(finite.size)) if finite.size else (float("nan"), 0)


class Estimate(NamedTuple):
    """A metric.

    `pairs` is the number of pairs in its mean. `samples` is its value on each resample, and is
    empty if there is a single cluster.
    """

    value: float
    pairs: int
    samples: np.ndarray

    def line(self) -> Line:
        """Return value, low, high and pairs, rounded.

        Low and high are the percentile bootstrap (Efron and Tibshirani 1993, chapter 13).
        """
        # percentiles of the values on the resamples that have one
        ends = 100 * np.array([(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        known = self.samples[np.isfinite(self.samples)]
        low, high = np.percentile(known, ends) if known.size else (math.nan, math.nan)
        return round_all({"value": self.value, "low": low, "high": high, "pairs": self.pairs})


class Clusters:
    """Photographs or sequences, resampled with replacement. `names` has one for each pair."""

    def __init__(self, names: Sequence[str]):
        # clusters are numbered in the order in which they come
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        self.count = len(numbers)
        self.of_pair = np.array([numbers[name] for name in names], np.int64)
        resamples = RESAMPLES if self.count > 1 else 0
        drawn = np.random.default_rng(SEED).integers(
            max(self.count, 1), size=(resamples, self.count)
        )
        # (R, C): how often each resample draws each cluster
        counts = [np.bincount(resample, minlength=self.count) for resample in drawn]
        self.weights = np.array(counts, np.float64).reshape(resamples, self.count)

    def per_cluster(self, pairs: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Sum `values` over these pairs by cluster, (C,)."""
        return np.bincount(self.of_pair[pairs], values, minlength=self.count)

    def mean(self, values: np.ndarray) -> Estimate:
        """Return the mean of the finite values (P,), with its value on each resample."""
        # sums and numbers of the finite values by cluster (C,), then by resample (R,)
        known = np.flatnonzero(np.isfinite(values))
        sums = self.per_cluster(known, values[known])
        counts = self.per_cluster(known, np.ones(len(known)))
        with np.errstate(invalid="ignore"):
            samples = (self.weights @ sums) / (self.weights @ counts)
        return Estimate(*mean_finite(values), samples)
