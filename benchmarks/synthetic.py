"""Stores of synthetic pairs: views with known keypoints and truth, without images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Sequence

import numpy as np

from pipeline.features import store
from pipeline.train.pairs.synthetic import make_pairs
from superglue_sift.batch import Pair


def made_store(folder: Path, keypoints: int, images: int = 64) -> Path:
    """A keypoint store of `images` images with two views of `keypoints` each."""
    return write_store(folder, *make_pairs(keypoints, images))


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
