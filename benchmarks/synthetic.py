"""Synthetic pairs: views with known keypoints under a known homography, without images. Nothing can
be learnt from them.
"""

from __future__ import annotations

from typing import List, Tuple

import numpy as np

from superglue_sift.features.sift import ORIENTED
from superglue_sift.geometry.two_view import transform
from superglue_sift.network.batch import Pair, PairBatch, from_pairs

SIZE = (640, 480)  # px
SEVERAL = 0.18  # fraction of keypoints with two orientations, as in SIFT
SHARED = 0.6  # fraction of keypoints visible in the other view, as in real pairs at 3 px


def make_pair(keypoints: int, rng: np.random.Generator) -> Tuple[Pair, np.ndarray]:
    """Two views of `keypoints` each, and H_0to1 (3, 3), a mild one.

    A point that both views show has similar descriptors in both.
    """
    H = np.eye(3) + rng.normal(0, [[0.05, 0.05, 15], [0.05, 0.05, 15], [5e-5, 5e-5, 0]])
    records0 = _make_view(keypoints, rng)
    records1 = _make_view(keypoints, rng)
    seen = rng.permutation(keypoints)[: int(SHARED * keypoints)]
    xy = np.stack([records0["x"], records0["y"]], 1)[seen].astype(np.float64)
    moved = transform(xy, H)
    records1["x"][: len(seen)], records1["y"][: len(seen)] = moved.T
    own = records0["descriptor"][seen]
    records1["descriptor"][: len(seen)] = np.clip(own + rng.normal(0, 15, own.shape), 0, 255)
    return Pair(records0, records1, SIZE, SIZE), H


def _make_view(keypoints: int, rng: np.random.Generator) -> np.ndarray:
    records = np.zeros(keypoints, ORIENTED)
    records["x"] = rng.uniform(0, SIZE[0], keypoints)
    records["y"] = rng.uniform(0, SIZE[1], keypoints)
    records["scale"] = rng.uniform(2, 20, keypoints)
    records["angle"] = rng.uniform(0, 360, keypoints)
    records["score"] = np.sort(rng.uniform(0.01, 0.1, keypoints))[::-1]
    descriptors = records["descriptor"]
    descriptors[:] = np.clip(rng.exponential(30, descriptors.shape), 0, 255)
    several = rng.random(keypoints) < SEVERAL
    second = rng.exponential(30, (several.sum(), descriptors.shape[1]))
    records["second_descriptor"][several] = np.clip(second, 0, 255)
    return records


def make_pairs(keypoints: int, pairs: int) -> Tuple[List[Pair], np.ndarray]:
    """`pairs` independent pairs, and H_0to1 (pairs, 3, 3)."""
    rng = np.random.default_rng(0)
    made = [make_pair(keypoints, rng) for _ in range(pairs)]
    return [pair for pair, _ in made], np.stack([H for _, H in made])


def make_batch(keypoints: int, pairs: int) -> PairBatch:
    """A batch in which every view has exactly `keypoints`."""
    return from_pairs(*make_pairs(keypoints, pairs))
