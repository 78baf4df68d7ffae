"""Synthetic keypoints, their batches, and networks whose every layer does something."""

import math

import numpy as np
import torch

from pipeline.keypoints.store import EVERYWHERE
from pipeline.train.data import PairBatch
from superglue_sift.features.features import Features
from superglue_sift.network.batch import make_batch
from superglue_sift.network.superglue import SuperGlue

SIZE = (320, 240)
RAGGED = ((20, 33), (300, 9), (0, 5), (7, 207), (140, 150), (0, 0))  # numbers of keypoints


def bound_rounding(largest, roundings, dtype=torch.float32):
    """A bound on the error of values up to `largest` after so many independent roundings.

    Each is off by up to half a unit, of deviation u / sqrt(3); the bound is six deviations of their
    sum.
    """
    unit = torch.finfo(dtype).eps / 2
    return 6 * unit * largest * math.sqrt(roundings / 3)


def count_roundings(config):
    """How many roundings a score of a network has: one for each term of four products a layer."""
    return 2 * config.layers * 4 * config.dim


def make_features(rng, count, orientations=1):
    """`count` synthetic keypoints of SIFT inside a view of 320x240 px."""
    keypoints = np.stack([rng.uniform(0, 319, count), rng.uniform(0, 239, count)], 1)
    scales = rng.uniform(2, 20, count)
    oris = np.zeros((count, orientations), np.float32)
    oris[:, 0] = rng.uniform(0, 360, count)
    scores = rng.uniform(0.01, 0.1, count)
    descriptors = np.zeros((count, orientations, 128), np.uint8)
    descriptors[:, 0] = rng.integers(0, 200, (count, 128))
    geometry = (array.astype(np.float32) for array in (keypoints, scales))
    return Features(*geometry, oris, scores.astype(np.float32), descriptors, SIZE)


def make_features_at(points, size=SIZE):
    """Keypoints of one scale at these positions (n, 2), with descriptors of zeros."""
    count = len(points)
    zeros = np.zeros(count, np.float32)
    scales = np.full(count, 4.0, np.float32)
    descriptors = np.zeros((count, 1, 128), np.uint8)
    points = np.array(points, np.float32).reshape(count, 2)
    return Features(points, scales, zeros[:, None], zeros, descriptors, size)


def make_pair(rng, count0, count1, orientations=1):
    return make_features(rng, count0, orientations), make_features(rng, count1, orientations)


def make_pairs(*counts, seed=0, orientations=1):
    """Features of pairs with these numbers of keypoints (M, N)."""
    rng = np.random.default_rng(seed)
    return [make_pair(rng, *count, orientations) for count in counts]


def batch_pairs(pairs):
    """The batches of the images 0 and of the images 1 of these pairs."""
    return tuple(make_batch(images) for images in zip(*pairs))


def label_pairs(pairs, H=None):
    """A PairBatch of these pairs, each under the homography. None is the identity."""
    H_0to1 = np.stack([np.eye(3) if H is None else H] * len(pairs))
    cells = torch.from_numpy(EVERYWHERE).expand(len(pairs), 2, 3, 3)
    return PairBatch(*batch_pairs(pairs), torch.from_numpy(H_0to1), cells)


def make_scrambled(config):
    """A network whose every layer does something (an untrained one starts as the identity)."""
    torch.manual_seed(0)
    model = SuperGlue(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter) * 0.3 / math.sqrt(parameter.shape[1]))
    return model.eval()


def crop_padding(log_P, m, n):
    """The (m + 1, n + 1) log assignment of a pair, without its padding."""
    rows = torch.cat([log_P[:m], log_P[-1:]])
    return torch.cat([rows[:, :n], rows[:, -1:]], 1)


def make_masks(counts, width):
    """(B, width) bool, True for the keypoints of images with these numbers of them."""
    return torch.arange(width) < torch.tensor(counts)[:, None]
