"""What least squares without RANSAC can do for every matcher: AUC@10 by fraction kept and weights.

    python -m benchmarks.dev.least_squares --images data/images --params params.yaml

Pairs of the validation photographs. The best of each matcher are the constants in
`pipeline/evaluate/estimators.py`. The first table has the F1 of the ratio test by its limit.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import List, NamedTuple, Optional, Sequence

import numpy as np

from pipeline import errors
from pipeline.bootstrap import auc_by_pair
from pipeline.evaluate import estimators, inputs, matchers, scoring
from pipeline.evaluate.heldout import HeldOutPairs
from pipeline.image_sets import sources
from pipeline.parameters import params
from superglue_sift import geometry
from superglue_sift.weights import shipped_weights

FRACTIONS = (0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
POWERS = (0, 1, 2, 4, 6, 8, 16, 32)  # of the confidence; 0: equal weights
ODDS = -1  # in place of a power: as estimators.weights_of weighs a network's
RATIOS = (0.7, 0.75, 0.78, 0.8, 0.82, 0.85, 0.9, 1.0)
LIMIT = 10  # px


class Matches(NamedTuple):
    """The matches (K, 2) of a matcher on one pair, their confidences (K,), and the pair."""

    points0: np.ndarray
    points1: np.ndarray
    scores: np.ndarray
    known: inputs.KnownPair


def corner_error(found: Matches, fraction: float, power: int) -> float:
    """Error in px of the fit to the surest `fraction` of the matches, weighted by a power of the
    confidence.
    """
    if len(found.scores) < geometry.MIN_POINTS:
        return math.inf
    count = max(geometry.MIN_POINTS, math.ceil(fraction * len(found.scores)))
    kept = found.scores >= np.sort(found.scores)[-count]
    scores = found.scores[kept]
    weights = (
        estimators.weights_of("dlt", matchers.OURS, scores) if power == ODDS else scores**power
    )
    H = geometry.fit_dlt(found.points0[kept], found.points1[kept], weights)
    return geometry.corner_error(H, found.known.truth, found.known.pair.size0)


def grid(name: str, found: Sequence[Matches]) -> List[str]:
    """The table of one matcher, in %."""
    lines = [f"{name:12}" + "".join(f"{fraction:>7g}" for fraction in FRACTIONS)]
    for power in (*POWERS, ODDS):
        cells = []
        for fraction in FRACTIONS:
            errors_px = [corner_error(each, fraction, power) for each in found]
            cells.append(f"{100 * auc_by_pair(errors_px, LIMIT).mean():>7.1f}")
        lines.append(f"{'odds' if power == ODDS else f'power {power}':12}" + "".join(cells))
    return lines


def f1_by_ratio(answers: Sequence[dict], pairs: Sequence[inputs.KnownPair]) -> List[str]:
    """Precision, recall and F1 of mutual nearest neighbours by the limit of the ratio, in %."""
    lines = [f"{'ratio below':12}{'P':>7}{'R':>7}{'F1':>7}"]
    truths = [scoring.true_matches(known.pair, known.truth, scoring.CORRECT_PX) for known in pairs]
    for ratio in RATIOS:
        counts = []
        for answer, known, truth in zip(answers, pairs, truths):
            kept = answer["mutual_nn"].above(1.0 - ratio)
            counts.append(scoring.score_matches(known, kept, truth, scoring.CORRECT_PX).counts)
        precision = 100 * np.mean([count.precision for count in counts])
        recall = 100 * np.nanmean([count.recall for count in counts])
        f1 = 2 * precision * recall / (precision + recall)
        lines.append(f"{ratio:<12g}{precision:>7.1f}{recall:>7.1f}{f1:>7.1f}")
    return lines


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dev.least_squares")
    parser.add_argument(
        "--images", type=Path, default=Path("data/images"), help="folder that `fetch` wrote"
    )
    parser.add_argument(
        "--params", type=Path, default=Path("params.yaml"), help="size and number of the pairs"
    )
    args = parser.parse_args(argv)
    images = sources.open_manifest(args.images)
    section = params.load("evaluate", args.params)
    source = HeldOutPairs(images, images.entries("val"), section)
    network = matchers.load_network(shipped_weights(), "cpu")
    compared = matchers.Matchers({matchers.OURS: network}, "cpu")
    pairs: List[inputs.KnownPair] = []
    for index in range(len(source)):
        pairs += inputs.extract(source, [index], section.max_keypoints)[0]
    answers = compared.answers([known.pair for known in pairs], 8)
    print(f"{len(pairs)} pairs of {len(source)} validation photographs")
    print("\n".join(f1_by_ratio(answers, pairs)))
    for name in matchers.MATCHERS:
        chosen = [compared.above(answer)[name] for answer in answers]
        points = [scoring.matched_points(known.pair, each) for known, each in zip(pairs, chosen)]
        print("\n".join(["", *grid(name, [Matches(*p, k) for p, k in zip(points, pairs)])]))
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
