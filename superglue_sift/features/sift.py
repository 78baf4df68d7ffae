"""Extract SIFT keypoints of a gray image. No other module uses cv2.SIFT.

Choices and the measurements behind them:

- `enable_precise_upscale`: without it OpenCV doubles the image with a shift, and every keypoint
  lies 0.25 px too far right and down (measured on blobs at known positions; 0.00 with it). Rotated
  views would not agree.
- There is one keypoint per position, with up to two orientations. SIFT returns a keypoint for each
  strong orientation, and 18 % of the keypoints share their position with another. Truth and mutual
  matching need distinct points. If a point had one orientation, the two views would choose
  different ones in 15 % of the true matches of COCO views (22 % in oxford_affine), and their
  descriptors would have nothing in common. With `choose_orientations` it is 5 % and 13 %.
- The keypoints of highest rank (`rank_keypoints`) are kept, not those of highest response: 52 % of
  the right matches of COCO views then have both keypoints among the 512 that are kept, instead of
  47 %.
- Descriptors are integers from 0 to 255 in OpenCV, so uint8 loses nothing.
"""

from __future__ import annotations

import functools
from typing import Optional, Sequence, Tuple

import cv2
import numpy as np

from superglue_sift.features.features import SIFT_DIM, Features
from superglue_sift.geometry import two_view

# Minimum scale in px: that of sigma 1.6 in the doubled image, at the first of three layers, minus
# half a layer, by which OpenCV refines it at most.
MIN_SCALE = 1.6 * 2 ** (1 / 6)

CONTRAST = 0.0133  # Minimum contrast of a keypoint, a third of OpenCV's default
# Increase this number when the keypoints of an image change. Features and stores made with another
# number are then made again.
VERSION = "2"


def extract(gray: np.ndarray, max_keypoints: int, mask: Optional[np.ndarray] = None) -> Features:
    """Extract the SIFT keypoints of highest rank (`rank_keypoints`) of an image.

    Args:
        gray: (H, W) uint8.
        max_keypoints: maximum number of keypoints, 1 or more.
        mask: (H, W) uint8. No keypoint lies at a pixel where it is 0.

    Returns:
        At most `max_keypoints` keypoints with two orientations (`Features`), at distinct positions,
        by decreasing rank. The first orientation of a keypoint has the smaller angle. An image
        without structure gives none. Equal input gives equal bytes.
    """
    points = make_detector().detect(gray, mask)
    values = [(*point.pt, point.size, point.angle, point.response) for point in points]
    # Columns x, y, scale, orientation, score
    values = np.array(values, np.float32).reshape(-1, 5)
    # Keep one keypoint for each position. In this order the orientations of a point follow each
    # other, so a second orientation is the next entry, if that has the same geometry.
    order, first = _sort_by_position(values[:, :2], *values[:, 2:].T)
    second = order[np.minimum(first + 1, max(len(order) - 1, 0))]
    first = order[first]
    unlike_orientation = [0, 1, 2, 4]
    is_same = values[first][:, unlike_orientation] == values[second][:, unlike_orientation]
    has_second = is_same.all(axis=1) & (first != second)
    # Keep the best keypoints.
    best = values[first]
    scales, scores = best[:, 2], best[:, 4]
    rows = _find_highest(scores * scales, best[:, :2], scales, max_keypoints)
    first = first[rows]
    has_second = has_second[rows]
    second = second[rows][has_second]

    oris = np.zeros((len(rows), 2), np.float32)
    oris[:, 0] = values[first, 3]
    oris[has_second, 1] = values[second, 3]
    # Describe both orientations of all keypoints in one call.
    rows_of_both = _describe(gray, [points[index] for index in [*first, *second]])
    descriptors = np.zeros((len(rows), 2, SIFT_DIM), np.uint8)
    descriptors[:, 0] = rows_of_both[: len(first)]
    descriptors[has_second, 1] = rows_of_both[len(first) :]
    best = best[rows]
    size = gray.shape[1::-1]
    return Features(best[:, :2], best[:, 2], oris, best[:, 4], descriptors, size, sift_scale=1.0)


def rank_keypoints(features: Features) -> np.ndarray:
    """Return the rank of keypoints, (N,) float32. Those of highest rank are kept, and come first.

    For SIFT it is response times scale, since large keypoints are found again more often. For other
    extractors it is the score.
    """
    # A product in float32 has the same bits on every processor.
    return features.scores * features.scales if features.is_sift else features.scores


def keep_strongest(features: Features, max_keypoints: int) -> Features:
    """Keep the keypoints of highest rank (`rank_keypoints`), in this order.

    If several keypoints have one position, only the keypoint with the highest score is kept.

    Args:
        features: the keypoints.
        max_keypoints: how many are kept at most.
    """
    columns = features.keypoints, features.scales, features.oris[:, 0], features.scores
    order, first = _sort_by_position(*columns)
    distinct = features.select(order[first])
    ranks = rank_keypoints(distinct)
    return distinct.select(_find_highest(ranks, distinct.keypoints, distinct.scales, max_keypoints))


def estimate_sift_scale(features: Features, resize: int) -> float:
    """Return px of the image that SIFT saw per px of the image, even if it is not known.

    For keypoints of your own, it is that of an image which `resize` reduces. But SIFT detects no
    keypoint below MIN_SCALE. If `resize` would make a keypoint smaller than this, your SIFT saw a
    larger image.

    Args:
        features: the keypoints.
        resize: longer side in px to which images are reduced, or 0 for images in full size.
    """
    if features.sift_scale is not None:
        return features.sift_scale
    factor = two_view.compute_reduction_factor(features.image_size, resize)
    if features.is_sift and len(features.scales):
        factor = max(1.0, min(factor, float(features.scales.min()) / MIN_SCALE))
    return 1.0 / factor


@functools.lru_cache(maxsize=1)
def make_detector() -> cv2.SIFT:
    """Create OpenCV's detector of all keypoints above CONTRAST, once for a process."""
    return cv2.SIFT.create(contrastThreshold=CONTRAST, enable_precise_upscale=True)


def _describe(gray: np.ndarray, points: Sequence[cv2.KeyPoint]) -> np.ndarray:
    """Compute the descriptors (n, 128) float32 of keypoints, as `detectAndCompute` returns them."""
    if not points:
        return np.empty((0, SIFT_DIM), np.float32)
    # OpenCV doubles the image only if there is a keypoint of octave -1, so one is added, and its
    # descriptor is dropped. Its lowest byte is the octave, where 255 means -1, and the next byte is
    # the layer 1.
    doubled = cv2.KeyPoint(0.0, 0.0, MIN_SCALE, 0.0, 0.0, 255 | 1 << 8)
    return make_detector().compute(gray, [*points, doubled])[1][:-1]


def _find_highest(
    ranks: np.ndarray, keypoints: np.ndarray, scales: np.ndarray, count: int
) -> np.ndarray:
    """Find the `count` highest ranks (n,); return their indices.

    The scales and positions of the keypoints decide between equal ranks.
    """
    return np.lexsort((keypoints[:, 0], keypoints[:, 1], -scales, -ranks))[:count]


def _sort_by_position(
    keypoints: np.ndarray, scales: np.ndarray, oris: np.ndarray, scores: np.ndarray
) -> Tuple[np.ndarray, np.ndarray]:
    """Sort n keypoints by position, and at each position by descending score.

    Returns:
        The order (n,), and where in it each position begins.
    """
    x, y = keypoints.T
    order = np.lexsort((oris, -scales, -scores, x, y))
    sorted_positions = keypoints[order]
    begins = np.ones(len(order), bool)
    begins[1:] = (sorted_positions[1:] != sorted_positions[:-1]).any(axis=1)
    return order, np.flatnonzero(begins)
