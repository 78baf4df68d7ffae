"""The ground truth of one pair of keypoint sets, without records."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

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
    counts = [torch.tensor([len(keypoints)]) for keypoints in (keypoints0, keypoints1)]
    given = [t.unsqueeze(0) for t in (keypoints0, keypoints1, size0, size1, H_0to1)]
    names = "keypoints0", "keypoints1", "image_size0", "image_size1", "H_0to1"
    records = {"records0": given[0], "records1": given[1], "counts0": counts[0], "counts1": counts[1]}
    batch = SimpleNamespace(**dict(zip(names, given)), **records, cells=None)
    return Truth(*(matches[0] for matches in ground_truth(batch, positive_px, negative_px)))
