"""Find the matches of date bars, logos and watermarks, which no geometry may use.

A watermark lies at the same place in both images, so its matches share one translation, and any
F = [e]x fits them. Two unrelated photographs with the same date bar would seem to show one place.
COLMAP's watermark test looks for a translation among matches near the border. Here matches in the
middle count too. Photographs that are identical, or taken from one tripod, also share one
translation, but all over the picture. A watermark covers a small part of it.

Limits in pixels hold in an image of `two_view.REFERENCE_PX`, and are multiplied in a larger file.
"""

from __future__ import annotations

import itertools
from typing import Iterator, Sequence, Tuple

import numpy as np

from superglue_sift.geometry.two_view import Size, compute_reduction_factor

SAME_PX = 1.5  # Translations of one watermark differ by at most this
EXPECTED_PX = 10.0  # A watermark has one of the expected translations, up to this distance
AROUND_PX = 16.0  # Keypoints up to this far from its matches belong to a watermark
MIN_MATCHES = 4  # Minimum number of matches of a watermark
BORDER = 0.12  # Width of the border, as a part of the shorter side
# Maximum ratio of a watermark's area to that of all keypoints. The ratio is 0.16 for a plate in the
# middle, and 0.42 for a copy of the photograph as JPEG of quality 10.
SPREAD = 0.28
# True motion is smooth. Where a few matches share a translation, many more have similar ones.
ALONE = 2.0  # Minimum ratio of a watermark's matches to those with similar translations
SIMILAR = 4.0  # Limit of similar translations, times SAME_PX


def find_watermarks(
    keypoints: Tuple[np.ndarray, np.ndarray], matches: np.ndarray, sizes: Sequence[Size]
) -> np.ndarray:
    """Find the matches that lie on a watermark.

    Args:
        keypoints: (M, 2) and (N, 2) px, all keypoints of both images.
        matches: (K, 2), indices of matched keypoints.
        sizes: (width, height) of both images in px.

    Returns:
        (K,) bool.
    """
    is_marked = np.zeros(len(matches), bool)
    points = [xy[index] for xy, index in zip(keypoints, matches.T)]
    for mark in _find_translations(points[0], points[1], sizes):
        areas = [
            _compute_relative_area(matched[mark], xy, size)
            for matched, xy, size in zip(points, keypoints, sizes)
        ]
        if min(areas) < SPREAD:
            # Wrong matches between two letters of a watermark also fit F, since both letters lie on
            # one line. So every match with both ends on the watermark belongs to it.
            on_mark0, on_mark1 = (lie_on_mark(matched, matched[mark], sizes) for matched in points)
            is_marked |= on_mark0 & on_mark1
    return is_marked


def lie_on_mark(points: np.ndarray, mark: np.ndarray, sizes: Sequence[Size]) -> np.ndarray:
    """Return whether points (n, 2) px lie on the watermark whose matches are at `mark` (k, 2) px.

    Args:
        points: positions in one of the images.
        mark: positions in the same image.
        sizes: (width, height) of both images in px.

    Returns:
        (n,) bool.
    """
    from scipy.spatial import KDTree

    if not len(mark):
        return np.zeros(len(points), bool)
    limit = AROUND_PX * max(map(compute_reduction_factor, sizes))
    return KDTree(mark).query(points, distance_upper_bound=limit)[0] < np.inf


def _find_translations(
    points0: np.ndarray, points1: np.ndarray, sizes: Sequence[Size]
) -> Iterator[np.ndarray]:
    """Yield the sets of matches, (K,) bool, that share a translation that a watermark may have.

    A watermark has a fixed place relative to two edges or to the center. It is drawn in pixels, or
    grows with the image.

    Args:
        points0, points1: (K, 2) px.
        sizes: (width, height) of both images in px.
    """
    size0, size1 = map(np.array, sizes)
    factor = max(map(compute_reduction_factor, sizes))
    anchors = np.array(list(itertools.product((0, 0.5, 1), repeat=2)))
    # The size of a watermark is the same in pixels, or relative to the longer side.
    for scale in dict.fromkeys((1.0, max(size1) / max(size0))):
        shifts = points1 - scale * points0
        # A watermark is fixed to the first edge, the center or the last edge, in x and in y. Each
        # gives one translation.
        for expected in np.unique(anchors * (size1 - scale * size0), axis=0):
            mark = _share_translation(shifts, expected, factor)
            if mark.any():
                yield mark


def _share_translation(shifts: np.ndarray, expected: np.ndarray, factor: float) -> np.ndarray:
    """Find the shifts that are like the most frequent one near an expected shift.

    None are found if they are few, or if many more shifts are similar, as they are where the motion
    is true.

    Args:
        shifts: (K, 2) px, of all matches.
        expected: (2,) px, the shift of a watermark.
        factor: multiplies the limits.

    Returns:
        (K,) bool.
    """
    from scipy.spatial import KDTree

    none = np.zeros(len(shifts), bool)
    candidates = shifts[np.linalg.norm(shifts - expected, axis=1) <= EXPECTED_PX * factor]
    if not len(candidates):
        return none
    tree = KDTree(candidates)
    counts = tree.query_ball_point(candidates, SAME_PX * factor / 2, return_length=True)
    distances = np.linalg.norm(shifts - candidates[counts.argmax()], axis=1)
    is_same = distances <= SAME_PX * factor
    is_similar = distances <= SIMILAR * SAME_PX * factor  # Includes the same shifts
    alone = is_same.sum() >= ALONE * (is_similar.sum() - is_same.sum())
    return is_same if alone and is_same.sum() >= MIN_MATCHES else none


def _compute_relative_area(mark: np.ndarray, keypoints: np.ndarray, size: Size) -> float:
    """Compare the area over which `mark` (k, 2) scatters with the area of all keypoints (n, 2).

    An area is the square root of the determinant of the covariance. Keypoints at the border do not
    count. The ratio is 0 if fewer than three matches are left.
    """
    border = BORDER * min(size)
    last = np.array(size) - 1 - border
    mark, keypoints = (
        points[((points >= border) & (points <= last)).all(1)] for points in (mark, keypoints)
    )
    if len(mark) < 3:
        return 0.0
    area = np.linalg.det(np.cov(mark.T))
    return float(np.sqrt(max(area, 0.0) / max(np.linalg.det(np.cov(keypoints.T)), 1e-12)))
