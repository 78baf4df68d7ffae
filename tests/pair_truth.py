"""The ground truth of one pair of keypoint sets, without records."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from superglue_sift.batch import Pair, from_pairs
from superglue_sift.sift import KEYPOINT
from superglue_sift.truth import Truth, ground_truth


def pair_truth(
    keypoints0: Tensor,
    keypoints1: Tensor,
    H_0to1: Tensor,
    size0: Tensor,
    size1: Tensor,
    positive_px: float = 3.0,
    negative_px: float = 5.0,
) -> Truth:
    """Ground truth of one pair, (M,) and (N,).

    Args:
        keypoints0 (M, 2), keypoints1 (N, 2): px; may be empty.
        H_0to1: (3, 3) float64.
        size0, size1: (2,) width and height, px.
    """
    sides = []
    for keypoints in (keypoints0, keypoints1):
        records = np.zeros(len(keypoints), KEYPOINT)
        records["x"], records["y"] = keypoints.numpy().T
        sides.append(records)
    pair = Pair(*sides, tuple(size0.tolist()), tuple(size1.tolist()))
    batch = from_pairs([pair], H_0to1.numpy()[None])
    found = ground_truth(batch, positive_px, negative_px)
    return Truth(*(matches[0, : len(side)] for matches, side in zip(found, sides)))
