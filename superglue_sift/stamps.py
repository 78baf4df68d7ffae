"""Date bars, logos and watermarks: matches of what was drawn on both images, not of what they show.

A stamp lies at the same place in both images, so its matches share one translation, and any
F = [e]x fits them: two unrelated photographs with one date bar would show the same place. COLMAP's
watermark test looks for a translation among matches near the border. Here, such matches are set
aside before a geometry is fitted, also those in the middle: photographs that are identical, or of
one tripod, agree all over the picture, a stamp in a small part of it.
"""

from __future__ import annotations

from typing import Iterator, List, Tuple

import numpy as np

from superglue_sift import geometry

# Lengths are those of images of `geometry.REFERENCE_PX`, and grow with them
SAME_PX = 1.5  # scatter of the translations of one stamp
PLACE_PX = 10.0  # maximum distance from the same place in both images
AROUND_PX = 16.0  # letters this far from a stamp's matches belong to it
FEWEST = 4  # matches of a stamp
BORDER = 0.12  # width of the border, of the shorter side
# Ratio of areas: 0.16 for a plate in the middle, 0.42 for a copy as JPEG of quality 10
SPREAD = 0.28
# True motion is smooth: a few matches share a translation, and many more have similar ones.
ALONE = 2.0  # minimum ratio of a stamp's matches to those
SIMILAR = 4.0  # times SAME_PX: limit of similar translations

Size = Tuple[int, int]


def find_stamps(
    points0: np.ndarray,
    points1: np.ndarray,
    all0: np.ndarray,
    all1: np.ndarray,
    size0: Size,
    size1: Size,
) -> np.ndarray:
    """(K,) bool: matches of stamps among the matched pixels (K, 2).

    all0, all1: (M, 2), (N, 2) all keypoints of both images. size0, size1: (width, height).
    """
    found = np.zeros(len(points0), bool)
    for stamp in _candidates(points0, points1, size0, size1):
        spread0 = _spread(points0[stamp], all0, size0)
        spread1 = _spread(points1[stamp], all1, size1)
        if min(spread0, spread1) < SPREAD:
            # wrong matches between two letters of the stamp, which lie on one line, also fit one F
            found |= near(points0, points0[stamp], size0, size1) & near(
                points1, points1[stamp], size0, size1
            )
    return found


def _candidates(
    points0: np.ndarray, points1: np.ndarray, size0: Size, size1: Size
) -> Iterator[np.ndarray]:
    """(K,) bool each: at least FEWEST matches that share one translation.

    A stamp is drawn in pixels, or grows with the image that it is drawn on.
    """
    unit = _unit(size0, size1)
    for scale in dict.fromkeys((1.0, max(size1) / max(size0))):
        shifts = points1 - scale * points0
        for offset in _offsets((scale * size0[0], scale * size0[1]), size1):
            stamp = _one_translation(shifts, offset, unit)
            if stamp.sum() >= FEWEST:
                yield stamp


def near(points: np.ndarray, stamp: np.ndarray, size0: Size, size1: Size) -> np.ndarray:
    """(n,) bool: points (n, 2) of one image on the stamp whose matches are at `stamp` (k, 2)."""
    from scipy.spatial import KDTree

    if not len(stamp):
        return np.zeros(len(points), bool)
    limit = AROUND_PX * _unit(size0, size1)
    return KDTree(stamp).query(points, distance_upper_bound=limit)[0] < np.inf


def _unit(size0: Size, size1: Size) -> float:
    return max(geometry.unit_of(size) for size in (size0, size1))


def _offsets(size0: Tuple[float, float], size1: Size) -> List[np.ndarray]:
    """Translations (2,) of a stamp at a fixed place from two edges or the centre."""
    wider = size1[0] - size0[0]
    higher = size1[1] - size0[1]
    every = [(x, y) for x in (0, wider / 2, wider) for y in (0, higher / 2, higher)]
    return [np.array(offset) for offset in dict.fromkeys(every)]


def _one_translation(shifts: np.ndarray, offset: np.ndarray, unit: float) -> np.ndarray:
    """(K,) bool: shifts (K, 2) like the most frequent one near `offset`, if it stands out."""
    from scipy.spatial import KDTree

    here = np.flatnonzero(np.linalg.norm(shifts - offset, axis=1) <= PLACE_PX * unit)
    if len(here) < FEWEST:
        return np.zeros(len(shifts), bool)
    tree = KDTree(shifts[here])
    counts = tree.query_ball_point(shifts[here], SAME_PX * unit / 2, return_length=True)
    distance = np.linalg.norm(shifts - shifts[here[counts.argmax()]], axis=1)
    same = distance <= SAME_PX * unit
    similar = (distance <= SIMILAR * SAME_PX * unit) & ~same
    return same if same.sum() >= ALONE * similar.sum() else np.zeros(len(shifts), bool)


def _spread(stamp: np.ndarray, every: np.ndarray, size: Size) -> float:
    """Area over which `stamp` (k, 2) scatters, over that of all keypoints `every` (n, 2).

    An area is the square root of the determinant of the covariance. What lies at the border does
    not count; 0 if no match is left.
    """
    border = BORDER * min(size)
    high = np.array(size) - 1 - border
    stamp = stamp[((stamp >= border) & (stamp <= high)).all(1)]
    every = every[((every >= border) & (every <= high)).all(1)]
    if len(stamp) < 3:
        return 0.0
    area = np.linalg.det(np.cov(stamp.T))
    return float(np.sqrt(max(area, 0.0) / max(np.linalg.det(np.cov(every.T)), 1e-12)))
