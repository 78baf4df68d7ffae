"""Find one position of each keypoint of several images, from matches refined pair by pair.

Refinement gives a keypoint a different position in each pair, but a reconstruction needs one. As in
Dusmanu et al. 2020 (arXiv 2003.08348), the corrections x of all keypoints are solved for together.

For a match of keypoints a and b, refinement finds the place in b's image that shows a. Let d be the
shift from b to this place, and A the local affine map from a's image to b's. The corrections must
satisfy d + A x_a = x_b, weighted by the deviation of the match. Each x must be small, weighted by
SIFT's scatter, which is a fixed number of pixels of the reduced image that SIFT saw. So lengths are
in pixels of images reduced to `verification.RESIZE`.
"""

from __future__ import annotations

from typing import Iterable, List, Sequence, Tuple

import numpy as np

from superglue_sift.geometry.two_view import (
    MIN_AGREEING,
    SCATTER_PX,
    fit_affine_maps,
    map_to_reduced,
    reduction_factor,
    transform,
)
from superglue_sift.geometry.verification import RESIZE
from superglue_sift.match_result import MatchResult

DIRECT = 500_000  # A direct solver is used up to this number of matched keypoints
# Equations are weighted anew so many times. Equations that others contradict lose weight.
ROUNDS = 4
MIN_DEVIATION_PX = 0.03  # Smaller deviations of refined matches are raised to this


def refine_tracks(
    keypoints: Sequence[np.ndarray], pairs: Iterable[Tuple[int, int, MatchResult]]
) -> List[np.ndarray]:
    """Correct the positions of keypoints of several images so that refined matches agree.

    Args:
        keypoints: (N, 2) px of each image, before refinement.
        pairs: (i, j, result), the refined matches of image i with image j. Results and matches that
            are not refined are ignored. The pairs are read once, one at a time.

    Returns:
        (N, 2) float32 px for each image. Keypoints without a refined match are unchanged.
    """
    # All keypoints are numbered through: those of image i begin at starts[i].
    starts = np.cumsum([0, *map(len, keypoints)])
    systems = []
    # Px of each image per px of the reduced image
    factors = np.ones(len(keypoints))
    for i, j, result in pairs:
        if result.deviations is None:
            continue
        refined = result.only(np.isfinite(result.deviations))
        if len(refined.matches) >= MIN_AGREEING:
            factors[i] = reduction_factor(result.size0, RESIZE)
            factors[j] = reduction_factor(result.size1, RESIZE)
            systems.append(_build_equations(starts[i], starts[j], refined))
    positions = [np.asarray(points, np.float64).reshape(-1, 2) for points in keypoints]
    if systems:
        # (n, ...) of each pair -> (sum of n, ...), then one system for all images
        corrections = _solve(int(starts[-1]), *(np.concatenate(part) for part in zip(*systems)))
        moves = [factor * corrections[a:b] for factor, a, b in zip(factors, starts, starts[1:])]
        positions = [points + move for points, move in zip(positions, moves)]
    return [points.astype(np.float32) for points in positions]


def _build_equations(start0: int, start1: int, refined: MatchResult) -> Tuple[np.ndarray, ...]:
    """Build the equations of n refined matches of two images.

    Args:
        start0, start1: number of the first keypoint of each image.
        refined: the matches, all of which are refined.

    Returns:
        The numbers of both keypoints (n,), the map (n, 2, 2), the shift d (n, 2), and the deviation
        (n,), in px of the reduced image 1.
    """
    index0, index1 = refined.matches.T
    # Convert from pixels of the files to pixels of the reduced images.
    to0, to1 = (map_to_reduced(size, RESIZE) for size in (refined.size0, refined.size1))
    before0 = transform(refined.keypoints0[index0], to0)
    before1 = transform(refined.keypoints1[index1], to1)
    p = transform(refined.points0, to0)
    q = transform(refined.points1, to1)
    deviation = np.maximum(np.asarray(refined.deviations) * to1[0, 0], MIN_DEVIATION_PX)
    maps = fit_affine_maps(p, q, np.ones(len(p), bool))
    shift = q - before1 - np.einsum("nij,nj->ni", maps, p - before0)
    return start0 + index0, start1 + index1, maps, shift, deviation


def _solve(
    count: int,
    first: np.ndarray,
    second: np.ndarray,
    maps: np.ndarray,
    shift: np.ndarray,
    deviation: np.ndarray,
) -> np.ndarray:
    """Solve for the corrections (count, 2) by iteratively reweighted least squares.

    The weights are Cauchy's. Keypoints without an equation get zeros. The other arguments are those
    that `_build_equations` returns.
    """
    from scipy.sparse import bsr_matrix, identity, vstack
    from scipy.sparse.linalg import lsmr, splu

    corrections = np.zeros((count, 2))
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
    weight = np.ones(len(first))
    x = np.zeros(size)
    for _ in range(ROUNDS):
        # Solve the weighted equations together with those that keep each correction small.
        scale = np.repeat(np.sqrt(weight) / deviation, 2)
        weighted = vstack([system.multiply(scale[:, None]), identity(size) / SCATTER_PX]).tocsr()
        target = np.concatenate([right * scale, np.zeros(size)])
        if len(used) > DIRECT:
            x = lsmr(weighted, target, atol=1e-4, btol=1e-4)[0]
        else:  # This takes a quarter of the time: short, separate tracks cause little fill-in
            normal = (weighted.T @ weighted).tocsc()
            factors = splu(normal, permc_spec="MMD_AT_PLUS_A", options={"SymmetricMode": True})
            x = factors.solve(weighted.T @ target)
        # Weight the equations anew by their residuals.
        residual = ((system @ x - right).reshape(-1, 2) ** 2).sum(1) / deviation**2
        weight = 1.0 / (1.0 + residual / 9.0)  # Half the weight at three deviations
    corrections[used] = x.reshape(-1, 2)
    return corrections
