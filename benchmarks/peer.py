"""The work of the best-known trainer of SuperGlue on SIFT, for comparison: the work, not the code.

As its users run it: a batch of one pair; the view warped and SIFT computed on both at every access,
in the process that trains; truth by double-precision distances; the whole network in float64, D =
128, T = 20; a loss gathered in a Python loop of -log(exp(.)) over the matches; Adam. Written by us
from that description and the paper, on the plain network of `benchmarks.plain`.
"""

from __future__ import annotations

import itertools
from typing import List, Sequence, Tuple

import cv2
import numpy as np
import torch

from benchmarks.plain import PlainSuperGlue
from superglue_sift.features import sift
from superglue_sift.geometry.two_view import transform
from superglue_sift.network.batch import Pair, from_pairs
from superglue_sift.network.superglue import SuperGlueConfig

KEYPOINTS = 512
CONFIG = SuperGlueConfig(
    dim=128, layers=9, heads=4, norm="batch", scale_angle=False, sinkhorn_iterations=20
)


class PeerTraining:
    """One optimiser step per call, cycling through the images."""

    def __init__(self, images: Sequence[np.ndarray], device: torch.device) -> None:
        torch.manual_seed(0)
        self.images = itertools.cycle(images)
        self.device = device
        self.model = PlainSuperGlue(CONFIG).double().to(device).train()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.random = np.random.default_rng(0)

    def __call__(self) -> None:
        """Train on one pair: load, forward, backward, step."""
        pair, H = self.load(next(self.images))
        self.optimizer.zero_grad()
        log_P = self.model(from_pairs([pair]).to(self.device))[0]
        entries = find_entries(pair, H)
        loss = torch.stack([-torch.log(log_P[i][j].exp()) for i, j in entries]).mean()
        loss.backward()
        self.optimizer.step()

    def load(self, image: np.ndarray) -> Tuple[Pair, np.ndarray]:
        """Warp the image (H, W) uint8 by random corners and extract both; the pair and its
        H_0to1.
        """
        height, width = image.shape
        corners = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32)
        moved = corners + self.random.uniform(-80, 80, (4, 2)).astype(np.float32)
        H = cv2.getPerspectiveTransform(corners, moved)
        warped = cv2.warpPerspective(image, H, (width, height))
        records = [sift.extract(view, KEYPOINTS) for view in (image, warped)]
        return Pair(records[0], records[1], (width, height), (width, height)), H


def find_entries(pair: Pair, H_0to1: np.ndarray) -> List[Tuple[int, int]]:
    """Entries of the assignment in the loss: matches, and keypoints without one (-1: dustbin)."""
    points0, points1 = (sift.positions(records).astype(np.float64) for records in pair[:2])
    distance = np.linalg.norm(transform(points0, H_0to1)[:, None] - points1[None], axis=-1)
    best1 = distance.argmin(0)
    best0 = enumerate(distance.argmin(1).tolist())
    matches = [(i, j) for i, j in best0 if best1[j] == i and distance[i, j] < 3.0]
    taken0, taken1 = map(set, zip(*matches)) if matches else (set(), set())
    lone0 = [(i, -1) for i in range(len(points0)) if i not in taken0]
    lone1 = [(-1, j) for j in range(len(points1)) if j not in taken1]
    return [*matches, *lone0, *lone1]
