"""The limits of `superglue_sift.scenes`, chosen on pairs that overlap and negative pairs.

The score of a pair is the number of matches above the strict threshold that agree with one fundamental matrix; pairs
are accepted from a minimum score on. At each threshold the minimum is MARGIN times the highest score of a negative
pair, since other places have worse pairs. Chosen is the threshold where the WEAKEST quantile of the pairs that overlap
has the largest ratio to the minimum.
"""

from __future__ import annotations

import math
from typing import Dict, List, NamedTuple, Sequence, Union

import numpy as np

from pipeline.evaluate.inputs import KnownPair, Pose
from pipeline.evaluate.matchers import OURS, filled
from superglue_sift import scenes
from superglue_sift.geometry import MIN_FUNDAMENTAL
from superglue_sift.matcher import PairMatches

STRICT = tuple(round(0.05 * step, 2) for step in range(10, 20))  # candidate thresholds
ACCEPT = tuple(range(MIN_FUNDAMENTAL, 41))  # minimum scores in the curve
MARGIN = 1.5
WEAKEST = 0.1

Line = Dict[str, Union[int, float]]


class Scores(NamedTuple):
    """Scores of one pair at each of STRICT. near: the pair overlaps."""

    near: bool
    values: Sequence[int]


class Limits(NamedTuple):
    """The chosen limits. accepted, false: fractions of the overlapping and of the negative pairs that they accept."""

    strict: float
    accept: int
    accepted: float
    false: float


def scores_of(known: KnownPair, answer: PairMatches) -> Scores:
    """Scores of a network's matches of a pair; pairs whose truth is a `Pose` overlap."""
    values = [filled(known.pair, answer, 0.0, scenes.Rules(strict=strict, accept=1)).score for strict in STRICT]
    return Scores(isinstance(known.truth, Pose), values)


def choose(pairs: Sequence[Scores]) -> Limits:
    """Choose strict threshold and minimum score. Raises ValueError without pairs of both kinds."""
    near, apart = (_values(pairs, kind) for kind in (True, False))
    # fewer matches than a fundamental matrix needs always agree with one
    highest = np.maximum(apart.max(axis=0), MIN_FUNDAMENTAL - 1)
    limits = [math.ceil(MARGIN * score) for score in highest]
    best = int((np.quantile(near, WEAKEST, axis=0) / limits).argmax())
    fractions = (float((scores[:, best] >= limits[best]).mean()) for scores in (near, apart))
    return Limits(STRICT[best], limits[best], *fractions)


def curve(pairs: Sequence[Scores]) -> List[Line]:
    """Lines of curves/acceptance.csv: the fractions of both kinds of pairs accepted by each pair of limits."""
    near, apart = (_values(pairs, kind) for kind in (True, False))
    return [
        {
            "strict": strict,
            "accept": accept,
            "accepted": round(float((near[:, index] >= accept).mean()), 6),
            "false": round(float((apart[:, index] >= accept).mean()), 6),
        }
        for index, strict in enumerate(STRICT)
        for accept in ACCEPT
    ]


def metrics(pairs: Sequence[Scores]) -> Dict[str, float]:
    """Flat metrics of the chosen limits; empty without pairs."""
    if not pairs:
        return {}
    limits = choose(pairs)
    named = {**dict(zip(scenes.LIMITS, limits[:2])), "scene_accepted": limits.accepted, "scene_false": limits.false}
    near = sum(pair.near for pair in pairs)
    named.update(scene_pairs=near, scene_pairs_apart=len(pairs) - near)
    return {f"{OURS}.{name}": round(value, 6) for name, value in named.items()}


def _values(pairs: Sequence[Scores], near: bool) -> np.ndarray:
    """(P, len(STRICT)) scores of the pairs of one kind."""
    scores = [pair.values for pair in pairs if pair.near == near]
    if not scores:
        raise ValueError("needs pairs that overlap and pairs that share nothing")
    return np.array(scores, np.float64)
