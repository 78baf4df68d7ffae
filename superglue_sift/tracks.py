"""Positions of keypoints that several images agree on, from matches that were aligned pair by pair.

A keypoint with partners in many images gets another position in each pair it is matched in. A reconstruction needs one.
All are solved for together, as in Dusmanu et al. 2020 (arXiv 2003.08348): alignment of a match (a, b) says that the
point at a lies d from b; with A the local affine map from a's image to b's, corrections x of both must satisfy
d + A x_a = x_b, as exactly as the deviation of the match says, and each x is small, as SIFT's scatter says.
"""

from __future__ import annotations

from typing import Iterable, List, Sequence, Tuple

import numpy as np

from superglue_sift.geometry import SCATTER_PX
from superglue_sift.local_maps import LEAST_AGREEING, nearest_affine
from superglue_sift.match_result import MatchResult

DIRECT = 500_000  # keypoints, up to which the equations are solved by elimination
ROUNDS = 4  # of weights: an equation that others contradict loses its say
LEAST_PX = 0.03  # deviation below which no alignment is trusted more


def refine_tracks(keypoints: Sequence[np.ndarray], pairs: Iterable[Tuple[int, int, MatchResult]]) -> List[np.ndarray]:
    """Positions of the keypoints of several images, corrected so that aligned matches agree.

    Args:
        keypoints: of each image (N, 2) px, as SIFT gave them: what the matches' indices mean.
        pairs: (i, j, found): the matches of image i (its image 0) with image j, aligned (`found.deviations` is not
            None); others, and matches whose position stayed SIFT's, have no say. Read once, one pair at a time.

    Returns (N, 2) float32 px for each image; keypoints without an aligned match are as they were.
    """
    starts = np.concatenate([[0], np.cumsum([len(points) for points in keypoints])]).astype(np.int64)
    found = [_equations(starts[i], starts[j], one) for i, j, one in pairs if one.deviations is not None]
    given = [np.asarray(points, np.float64).reshape(-1, 2) for points in keypoints]
    if sum(len(equations[0]) for equations in found):
        moved = _solve(int(starts[-1]), *(np.concatenate(part) for part in zip(*found)))
        given = [points + moved[a:b] for points, a, b in zip(given, starts, starts[1:])]
    return [points.astype(np.float32) for points in given]


def _equations(start0: int, start1: int, found: MatchResult) -> Tuple[np.ndarray, ...]:
    """Of the aligned matches: numbers of both keypoints (n,), map (n, 2, 2), shift (n, 2) px, deviation (n,) px."""
    deviations = np.asarray(found.deviations)
    aligned = np.isfinite(deviations)
    if aligned.sum() < LEAST_AGREEING:
        aligned[:] = False
    own, theirs = found.matches[aligned].T
    p, q = found.points0[aligned].astype(np.float64), found.points1[aligned].astype(np.float64)
    maps = nearest_affine(p, q, np.ones(len(p), bool)) if len(p) else np.zeros((0, 2, 2))
    shift = q - found.keypoints1[theirs] - np.einsum("nij,nj->ni", maps, p - found.keypoints0[own])
    return start0 + own, start1 + theirs, maps, shift, np.maximum(deviations[aligned], LEAST_PX)


def _solve(
    count: int, first: np.ndarray, second: np.ndarray, maps: np.ndarray, shift: np.ndarray, deviation: np.ndarray
):
    """(count, 2) corrections of least weighted squares; Cauchy's weights by the residuals of the round before."""
    from scipy.sparse import coo_matrix, identity, vstack
    from scipy.sparse.linalg import lsmr, splu

    equations = 2 * np.arange(len(first))[:, None] + [[0, 1]]  # (n, 2)
    rows = np.concatenate([np.repeat(equations, 2, axis=1).ravel(), equations.ravel()])
    columns = np.concatenate([(2 * first[:, None] + [[0, 1, 0, 1]]).ravel(), (2 * second[:, None] + [[0, 1]]).ravel()])
    values = np.concatenate([maps.reshape(-1), np.full(equations.size, -1.0)])
    system = coo_matrix((values, (rows, columns)), shape=(equations.size, 2 * count)).tocsr()
    right = -shift.ravel()
    weight, x = np.ones(len(first)), np.zeros(2 * count)
    for _ in range(ROUNDS):
        scale = np.repeat(np.sqrt(weight) / deviation, 2)
        whole = vstack([system.multiply(scale[:, None]), identity(2 * count) / SCATTER_PX]).tocsr()
        target = np.concatenate([right * scale, np.zeros(2 * count)])
        if count > DIRECT:
            x = lsmr(whole, target, atol=1e-4, btol=1e-4)[0]
        else:  # tracks are short and apart, so the normal equations fill up little: a quarter of the time
            normal = (whole.T @ whole).tocsc()
            x = splu(normal, permc_spec="MMD_AT_PLUS_A", options={"SymmetricMode": True}).solve(whole.T @ target)
        residual = ((system @ x - right).reshape(-1, 2) ** 2).sum(1) / deviation**2
        weight = 1.0 / (1.0 + residual / 9.0)  # three deviations
    return x.reshape(-1, 2)
