"""The limits of `superglue_sift.scenes`, chosen on pairs that overlap and pairs that share nothing.

A pair's score is how many matches above the strict threshold agree with one fundamental matrix; it is accepted from a
least score on. At each threshold that limit is MARGIN times the highest score of a pair that shares nothing: other
places have worse pairs. The threshold chosen is the one where the weakest pairs that overlap, at the quantile WEAKEST,
are farthest above the limit, by factor.
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

STRICT = tuple(round(0.05 * step, 2) for step in range(10, 20))  # thresholds that are tried
ACCEPT = tuple(range(MIN_FUNDAMENTAL, 41))  # limits in the curve
MARGIN = 1.5
WEAKEST = 0.1

Line = Dict[str, Union[int, float]]


class Scores(NamedTuple):
    """Of one pair. near: does it overlap? values: its score at each of STRICT."""

    near: bool
    values: Sequence[int]


class Limits(NamedTuple):
    """What is chosen. accepted, false: fractions of the pairs that overlap and of the others that it accepts."""

    strict: float
    accept: int
    accepted: float
    false: float


def scores_of(known: KnownPair, answer: PairMatches) -> Scores:
    """The scores of a pair by a network's answer; it overlaps where its truth is a `Pose`."""
    rules = [scenes.Rules(strict=strict, accept=1) for strict in STRICT]
    values = [filled(known.pair, answer, 0.0, each).score for each in rules]
    return Scores(isinstance(known.truth, Pose), values)


def choose(pairs: Sequence[Scores]) -> Limits:
    """Strict threshold and least score. Raises ValueError without pairs of both kinds."""
    near, apart = (_values(pairs, kind) for kind in (True, False))
    # scores below that of the fewest matches that a geometry is fitted to say nothing: those would all agree
    highest = np.maximum(apart.max(axis=0), MIN_FUNDAMENTAL - 1)
    limits = [math.ceil(MARGIN * score) for score in highest]
    best = int((np.quantile(near, WEAKEST, axis=0) / limits).argmax())
    fractions = (float((own[:, best] >= limits[best]).mean()) for own in (near, apart))
    return Limits(STRICT[best], limits[best], *fractions)


def curve(pairs: Sequence[Scores]) -> List[Line]:
    """Lines of curves/acceptance.csv: the fractions of both kinds of pairs that each pair of limits accepts."""
    near, apart = (_values(pairs, kind) for kind in (True, False))
    return [
        {
            "strict": strict,
            "accept": accept,
            "accepted": round(float((near[:, place] >= accept).mean()), 6),
            "false": round(float((apart[:, place] >= accept).mean()), 6),
        }
        for place, strict in enumerate(STRICT)
        for accept in ACCEPT
    ]


def figures(pairs: Sequence[Scores]) -> Dict[str, float]:
    """Flat figures of what is chosen, of ours; nothing where no pair was scored."""
    if not pairs:
        return {}
    found = choose(pairs)
    counts = [sum(pair.near == kind for pair in pairs) for kind in (True, False)]
    named = {**dict(zip(scenes.LIMITS, found[:2])), "scene_accepted": found.accepted, "scene_false": found.false}
    named.update(scene_pairs=counts[0], scene_pairs_apart=counts[1])
    return {f"{OURS}.{name}": round(value, 6) for name, value in named.items()}


def _values(pairs: Sequence[Scores], near: bool) -> np.ndarray:
    """(P, len(STRICT)) scores of the pairs of one kind."""
    found = [pair.values for pair in pairs if pair.near == near]
    if not found:
        raise ValueError("needs pairs that overlap and pairs that share nothing")
    return np.array(found, np.float64)
