"""Stores of synthetic views with known truth: the same points seen through random homographies."""

import json

import numpy as np
import torch

from pipeline.distributed import Context
from pipeline.keypoints import store
from pipeline.train import data
from superglue_sift.features.features import Features
from superglue_sift.geometry.two_view import transform

SIZE = (320, 240)
VIEWS = 3  # of an image of a store


def make_features(rng, xy, descriptors):
    """Keypoints at `xy` (n, 2) px with noisy copies of `descriptors` (n, 128), each of one
    orientation.
    """
    count = len(xy)
    scales = rng.uniform(2, 20, count).astype(np.float32)
    oris = np.zeros((count, 2), np.float32)
    oris[:, 0] = rng.uniform(0, 360, count)
    scores = np.sort(rng.uniform(0.01, 0.1, count))[::-1].astype(np.float32)
    noisy = descriptors + rng.normal(0, 20, descriptors.shape)
    stored = np.zeros((count, 2, 128), np.uint8)
    stored[:, 0] = np.clip(noisy, 0, 255).astype(np.uint8)
    return Features(xy.astype(np.float32), scales, oris, scores, stored, SIZE)


def make_image(rng, name, views, points):
    """One image: `points` points, of which each view sees those inside it, in another order."""
    xy = rng.uniform(0, 1, (points, 2)) * SIZE
    descriptors = rng.integers(0, 160, (points, 128))
    homographies = []
    features = []
    for _ in range(views):
        H = np.eye(3) + rng.normal(0, [[0.1, 0.1, 20], [0.1, 0.1, 20], [1e-4, 1e-4, 0]])
        moved = transform(xy, H)
        inside = np.flatnonzero(((moved >= 0) & (moved <= np.array(SIZE) - 1)).all(1))
        inside = rng.permutation(inside)
        homographies.append(H)
        noisy = moved[inside] + rng.normal(0, 0.3, (len(inside), 2))
        features.append(make_features(rng, noisy, descriptors[inside]))
    return store.ImageViews(name, SIZE, np.stack(homographies), features)


def make_store(folder, images=5, points=40, seed=0):
    """A store of `images` synthetic images with varying numbers of points; one image has none."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    shard = [
        make_image(rng, f"{i:03d}", VIEWS, (points + 7 * i) if i != 1 else 0) for i in range(images)
    ]
    row = {**store.write_shard(folder / store.name_shard(0), shard), "photographs": [""] * images}
    (folder / store.INDEX).write_text(json.dumps(store.make_index([row], VIEWS)))
    return folder


def make_stores(folder):
    """What the stage keypoints leaves behind: a train and a val store."""
    make_store(folder / "train")
    make_store(folder / "val", images=3, seed=1)
    return folder


def make_step_batches(store, make_params, keys=None, context=None, **run):
    """The batches of a training of 8 pairs a step on `store`."""
    train = make_params("train", **(keys or {"max_keypoints": 30}))
    context = context or Context(0, 1, torch.device("cpu"))
    return data.StepBatches(train, make_params("run", **run), store, 8, context)
