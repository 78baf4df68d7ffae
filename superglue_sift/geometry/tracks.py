"""Find one position of each keypoint of several images, from matches refined pair by pair.

Refinement gives a keypoint a different position in each pair, but a reconstruction needs one. As in
Dusmanu et al. 2020 (arXiv 2003.08348), the corrections x of all keypoints are solved for together.

For a match of keypoints a and b, refinement finds the place in b's image that shows a. Let d be the
shift from b to this place, and A the local affine map from a's image to b's. The corrections must
satisfy d + A x_a = x_b, weighted by the deviation of the match. Each x must be small, weighted by
SIFT's scatter.
"""

from __future__ import annotations

from typing import Iterable, List, Sequence, Tuple

import numpy as np

from superglue_sift.geometry.local_maps import MIN_INLIERS, fit_affine_maps
from superglue_sift.geometry.two_view import SCATTER_PX

TOLERANCE = 1e-7  # of the solver; positions are then exact to a thousandth of a pixel
# Number of weighted solutions. Between them, equations that others contradict lose weight.
ROUNDS = 4
MIN_DEVIATION_PX = 0.03  # Smaller deviations of refined matches are raised to this

# The refined matches of two images: the numbers of both images, indices (K, 2) of the keypoints,
# refined positions (K, 2) px in the second image, and their deviations (K,) px
RefinedPair = Tuple[int, int, np.ndarray, np.ndarray, np.ndarray]


def refine_tracks(
    keypoints: Sequence[np.ndarray], pairs: Iterable[RefinedPair], factors: Sequence[float]
) -> List[np.ndarray]:
    """Correct the positions of keypoints of several images so that refined matches agree.

    Args:
        keypoints: (N, 2) px of each image, before refinement.
        pairs: the matches of pairs of images. Those with a deviation of NaN are ignored. The pairs
            are read once, one at a time.
        factors: multiply the limits, one for each image. SIFT's scatter is a fixed number of pixels
            of the image that SIFT saw.

    Returns:
        (N, 2) float32 px for each image. Keypoints without a refined match are unchanged.
    """
    positions = [np.asarray(points, np.float64).reshape(-1, 2) for points in keypoints]
    # All keypoints are numbered through: those of image i begin at starts[i].
    starts = np.cumsum([0, *map(len, positions)])
    systems = []
    for i, j, matches, refined1, deviations in pairs:
        is_refined = np.isfinite(deviations)
        if is_refined.sum() < MIN_INLIERS:
            continue
        index0, index1 = matches[is_refined].T
        points0 = positions[i][index0]
        points1 = refined1[is_refined].astype(np.float64)
        maps = fit_affine_maps(points0, points1, np.ones(len(points0), bool), factors[i])
        shift = points1 - positions[j][index1]
        deviation = np.maximum(deviations[is_refined], MIN_DEVIATION_PX * factors[j])
        systems.append((starts[i] + index0, starts[j] + index1, maps, shift, deviation))
    if systems:
        # (n, ...) of each pair -> (sum of n, ...), then one system for all images
        scatter = SCATTER_PX * np.repeat(factors, np.diff(starts))
        corrections = _solve(scatter, *(np.concatenate(part) for part in zip(*systems)))
        positions = [p + corrections[a:b] for p, a, b in zip(positions, starts, starts[1:])]
    return [points.astype(np.float32) for points in positions]


def _solve(
    scatter: np.ndarray,
    first: np.ndarray,
    second: np.ndarray,
    maps: np.ndarray,
    shift: np.ndarray,
    deviation: np.ndarray,
) -> np.ndarray:
    """Solve for the corrections (N, 2) px by iteratively reweighted least squares.

    The weights are Cauchy's. Keypoints without an equation get zeros.

    Args:
        scatter: (N,) px, the deviation of SIFT's position of each keypoint.
        first, second: (n,), the keypoints of each match.
        maps: (n, 2, 2), the map A of each match.
        shift: (n, 2) px, the shift d of each match.
        deviation: (n,) px, of each match.
    """
    from scipy.sparse import bsr_matrix, diags, vstack
    from scipy.sparse.linalg import lsmr

    corrections = np.zeros((len(scatter), 2))
    # Number only the keypoints that have equations.
    used, ends = np.unique(np.stack([first, second], axis=1), return_inverse=True)
    size = 2 * len(used)
    # Build the sparse system of 2x2 blocks. The row of a match has A at a, and -1 at b.
    blocks = np.stack([maps, np.broadcast_to(-np.eye(2), maps.shape)], axis=1).reshape(-1, 2, 2)
    starts = np.arange(0, len(blocks) + 1, 2)
    system = bsr_matrix((blocks, ends.ravel(), starts), shape=(shift.size, size)).tocsr()
    system.eliminate_zeros()
    system.sort_indices()
    right = -shift.ravel()
    prior = diags(1.0 / np.repeat(scatter[used], 2))
    weight = np.ones(len(first))
    x = np.zeros(size)
    for _ in range(ROUNDS):
        # Solve the weighted equations together with those that keep each correction small.
        scale = np.repeat(np.sqrt(weight) / deviation, 2)
        weighted = vstack([system.multiply(scale[:, None]), prior]).tocsr()
        target = np.concatenate([right * scale, np.zeros(size)])
        x = lsmr(weighted, target, atol=TOLERANCE, btol=TOLERANCE)[0]
        # Update the weights by the residuals.
        residual = ((system @ x - right).reshape(-1, 2) ** 2).sum(1) / deviation**2
        weight = 1.0 / (1.0 + residual / 9.0)  # Half the weight at three deviations
    corrections[used] = x.reshape(-1, 2)
    return corrections
