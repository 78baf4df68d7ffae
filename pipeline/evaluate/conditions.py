"""Difficulty of a pair, computed from its homography: the axes of the robustness table."""

from __future__ import annotations

import math
from typing import Dict, Tuple

import numpy as np

from superglue_sift.geometry import two_view

GRID = 32  # samples along each side for the overlap
BINS: Dict[str, Tuple[float, ...]] = {  # condition -> edges; a pair falls into low <= value < high
    "rotation_deg": (0, 15, 30, 60, 120, 181),
    "scale": (1, 1.25, 1.6, 2.2, 3, 4.5, 6.5, 9, math.inf),
    "tilt": (1, 1.2, 1.5, 2, 3, math.inf),
    "perspective": (1, 1.5, 2.5, 5, 10, math.inf),
    "overlap": (0, 0.25, 0.5, 0.75, 1.01),
    "keypoints": (0, 64, 128, 256, 512, 1024, math.inf),
}


def overlap(H_0to1: np.ndarray, size0: Tuple[int, int], size1: Tuple[int, int]) -> float:
    """Fraction of image 0 that image 1 shows, 0..1, on a grid of points."""
    grid = np.stack(
        np.meshgrid(*[(np.arange(GRID) + 0.5) / GRID * side - 0.5 for side in size0]), axis=-1
    )
    with np.errstate(all="ignore"):
        mapped = two_view.transform(grid.reshape(-1, 2), H_0to1)
        inside = (mapped >= -0.5) & (mapped <= np.array(size1) - 0.5)
    return float(inside.all(axis=1).mean())


def conditions_of(
    H_0to1: np.ndarray, size0: Tuple[int, int], size1: Tuple[int, int]
) -> Dict[str, float]:
    """Conditions at the centre of image 0.

    rotation_deg: 0..180, without sign; scale: 1 or more, the larger over the smaller; tilt: ratio
    of the two principal stretches, 1 for a similarity; perspective: change of area between the
    corners, 1 for an affine map; overlap: 0..1.
    """
    centre = (np.array([size0]) - 1) / 2
    left, stretches, right = np.linalg.svd(two_view.jacobians(H_0to1, centre)[0])
    rotation = left @ right  # nearest orthogonal map
    scale = np.sqrt(stretches.prod())
    depths = np.abs([H_0to1[2] @ np.array([x, y, 1.0]) for x, y in two_view.corners(size0)])
    with np.errstate(divide="ignore"):  # inf for a degenerate map
        values = {
            "rotation_deg": np.degrees(abs(np.arctan2(rotation[1, 0], rotation[0, 0]))),
            "scale": max(scale, 1 / scale),
            "tilt": stretches[0] / stretches[1],
            "perspective": (depths.max() / depths.min()) ** 3,
            "overlap": overlap(H_0to1, size0, size1),
        }
    return {name: float(value) for name, value in values.items()}
