"""Synthetic keypoints, their batches, and networks whose every layer does something."""

import math

import numpy as np
import torch

from superglue_sift.features.sift import KEYPOINT
from superglue_sift.network.batch import Pair, from_pairs
from superglue_sift.network.superglue import SuperGlue

SIZE = (320, 240)
RAGGED = ((20, 33), (300, 9), (0, 5), (7, 207), (140, 150), (0, 0))  # numbers of keypoints


def rounding(largest, roundings, dtype=torch.float32):
    """A bound on the error of values up to `largest` after so many independent roundings.

    Each is off by up to half a unit, of deviation u / sqrt(3); the bound is six deviations of their
    sum.
    """
    unit = torch.finfo(dtype).eps / 2
    return 6 * unit * largest * math.sqrt(roundings / 3)


def roundings_of(config):
    """How many roundings a score of a network has: one for each term of four products a layer."""
    return 2 * config.layers * 4 * config.dim


def records(rng, count, dtype=KEYPOINT):
    """`count` synthetic keypoints inside a 320x240 view."""
    made = np.zeros(count, dtype)
    made["x"] = rng.uniform(0, 319, count)
    made["y"] = rng.uniform(0, 239, count)
    made["scale"] = rng.uniform(2, 20, count)
    made["angle"] = rng.uniform(0, 360, count)
    made["score"] = rng.uniform(0.01, 0.1, count)
    made["descriptor"] = rng.integers(0, 200, (count, 128))
    return made


def records_at(points):
    """Records of one scale at these places (n, 2), without descriptors."""
    made = np.zeros(len(points), KEYPOINT)
    made["x"], made["y"] = np.transpose(points)
    made["scale"] = 4.0
    return made


def pair(rng, count0, count1, dtype=KEYPOINT):
    return Pair(records(rng, count0, dtype), records(rng, count1, dtype), SIZE, SIZE)


def pairs_of(*counts, seed=0, dtype=KEYPOINT):
    """Pairs of these numbers of keypoints (M, N)."""
    rng = np.random.default_rng(seed)
    return [pair(rng, *each, dtype) for each in counts]


def related(pairs, H=None):
    """A batch of these pairs, each under the homography; None: the identity."""
    return from_pairs(pairs, np.stack([np.eye(3) if H is None else H] * len(pairs)))


def scrambled(config):
    """A network whose every layer does something (an untrained one starts as the identity)."""
    torch.manual_seed(0)
    model = SuperGlue(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter) * 0.3 / math.sqrt(parameter.shape[1]))
    return model.eval()


def of_pair(log_P, m, n):
    """The (m + 1, n + 1) log assignment of a pair, without its padding."""
    rows = torch.cat([log_P[:m], log_P[-1:]])
    return torch.cat([rows[:, :n], rows[:, -1:]], 1)


def masks(counts, width):
    """(B, width) bool, True for the keypoints of images with these numbers of them."""
    return torch.arange(width) < torch.tensor(counts)[:, None]
