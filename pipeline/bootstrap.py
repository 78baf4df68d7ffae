"""Means over pairs with bootstrap intervals over the photographs or sequences of the pairs."""

from __future__ import annotations

from typing import Any, Dict, Sequence

import numpy as np

DIGITS = 6  # decimals of written metrics; beyond them float32 sums are noise
RESAMPLES = 2000
SEED = 0
ENDS = (0.025, 0.975)  # quantiles of the resamples that are the 95 % interval
# Photographs (or scenes) for a verdict. Five agree by chance with probability 2 ** (1 - 5) = 0.06.
MIN_CLUSTERS = 6


def auc_by_pair(errors: Sequence[float], threshold: float) -> np.ndarray:
    """Return the contribution of each pair to the AUC of the recall curve up to `threshold`.

    Contributions are from 0 to 1, and the AUC is their mean. `errors` has one error per pair. It is
    inf (or NaN) for a pair without an estimate, which counts as a failure.
    """
    return np.fmax(0.0, 1.0 - np.asarray(errors, np.float64) / threshold)  # 0 for NaN, too


class Clusters:
    """Photographs or sequences, resampled with replacement. `names` has one for each pair.

    weights: (R, C), how often each resample draws each cluster. A single cluster is not resampled.
    """

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

    def mean(self, values: np.ndarray) -> Dict[str, Any]:
        """Return the mean of the finite values (P,), its interval, and the number of pairs in it.

        The keys are value, low, high and pairs. Low and high are the percentile bootstrap (Efron
        and Tibshirani 1993, chapter 13). Numbers are rounded, and None where there is none.
        """
        known = np.isfinite(values)
        # (C,) sums and counts by cluster, then (R,) means of the resamples
        sums = np.bincount(self.of_pair[known], values[known], self.count)
        counts = np.bincount(self.of_pair[known], minlength=self.count)
        with np.errstate(invalid="ignore"):
            samples = (self.weights @ sums) / (self.weights @ counts)
        value = values[known].mean() if known.any() else np.nan
        low, high = np.nanquantile(samples, ENDS) if len(samples) else (np.nan, np.nan)
        line = {"value": value, "low": low, "high": high, "pairs": known.sum()}
        return {
            name: round(each.item(), DIGITS) if np.isfinite(each) else None
            for name, each in line.items()
        }
