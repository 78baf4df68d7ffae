"""Synthetic pairs of a given size: views with known keypoints and truth, without images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import List, Sequence, Tuple

import numpy as np

from pipeline.features import store
from superglue_sift.batch import Pair, PairBatch, from_pairs
from superglue_sift.geometry import transform
from superglue_sift.sift import ORIENTED

SIZE = (640, 480)
SEVERAL = 0.18  # fraction of keypoints with two orientations, as in SIFT
SHARED = 0.6  # fraction of keypoints visible in the other view, as in real pairs at 3 px


def made_pair(keypoints: int, rng: np.random.Generator) -> Tuple[Pair, np.ndarray]:
    """Two views of `keypoints` each under a mild homography, H_0to1 (3, 3); similar descriptors for
    one point.
    """
    H = np.eye(3) + rng.normal(0, [[0.05, 0.05, 15], [0.05, 0.05, 15], [5e-5, 5e-5, 0]])
    records0 = _view(keypoints, rng)
    records1 = _view(keypoints, rng)
    seen = rng.permutation(keypoints)[: int(SHARED * keypoints)]
    xy = np.stack([records0["x"], records0["y"]], 1)[seen].astype(np.float64)
    moved = transform(xy, H)
    records1["x"][: len(seen)], records1["y"][: len(seen)] = moved.T
    noisy = records0["descriptor"][seen] + rng.normal(0, 15, (len(seen), 128))
    records1["descriptor"][: len(seen)] = np.clip(noisy, 0, 255)
    return Pair(records0, records1, SIZE, SIZE), H


def _view(keypoints: int, rng: np.random.Generator) -> np.ndarray:
    records = np.zeros(keypoints, ORIENTED)
    records["x"] = rng.uniform(0, SIZE[0], keypoints)
    records["y"] = rng.uniform(0, SIZE[1], keypoints)
    records["scale"] = rng.uniform(2, 20, keypoints)
    records["angle"] = rng.uniform(0, 360, keypoints)
    records["score"] = np.sort(rng.uniform(0.01, 0.1, keypoints))[::-1]
    records["descriptor"] = np.clip(rng.exponential(30, (keypoints, 128)), 0, 255)
    several = rng.random(keypoints) < SEVERAL
    records["second_descriptor"][several] = np.clip(
        rng.exponential(30, (several.sum(), 128)), 0, 255
    )
    return records


def made_pairs(keypoints: int, pairs: int, seed: int = 0) -> Tuple[List[Pair], np.ndarray]:
    """`pairs` independent pairs, and H_0to1 (pairs, 3, 3)."""
    rng = np.random.default_rng(seed)
    made = [made_pair(keypoints, rng) for _ in range(pairs)]
    return [pair for pair, _ in made], np.stack([H for _, H in made])


def made_batch(keypoints: int, pairs: int, seed: int = 0) -> PairBatch:
    """A batch in which every view has exactly `keypoints`."""
    return from_pairs(*made_pairs(keypoints, pairs, seed))


def made_store(folder: Path, keypoints: int, images: int = 64) -> Path:
    """A keypoint store of `images` images with two views of `keypoints` each."""
    return write_store(folder, *made_pairs(keypoints, images))


def write_store(folder: Path, pairs: Sequence[Pair], homographies: Sequence[np.ndarray]) -> Path:
    """A keypoint store of an image for each pair: itself, and its view by the homography."""
    folder.mkdir(parents=True, exist_ok=True)
    made = [
        store.ImageViews(f"{i:04d}", p.size0, np.stack([np.eye(3), H]), [p.records0, p.records1])
        for i, (p, H) in enumerate(zip(pairs, homographies))
    ]
    rows = [store.write_shard(folder / store.shard_name(0), made)]
    (folder / store.INDEX).write_text(json.dumps(store.index(rows, 2, pairs[0].size0)))
    return folder
