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
  the right matches of COCO views then have both keypoints among the 512 that are kept, in place of
  47 %.
- Descriptors are integers from 0 to 255 in OpenCV, so uint8 loses nothing.
"""

from __future__ import annotations

import functools
from typing import Optional, Sequence, Tuple

import cv2
import numpy as np

# x, y are in px, and the centre of the first pixel is 0. scale is the diameter of the neighbourhood
# in px (OpenCV's `size`). angle is from 0 to 360 degrees, clockwise as seen on the screen. score is
# the contrast of the extremum (OpenCV's `response`).
GEOMETRY = ("x", "y", "scale", "angle", "score")
KEYPOINT = np.dtype([*((name, "<f4") for name in GEOMETRY), ("descriptor", "u1", (128,))])
# `extract` returns this dtype, which also has the second orientation of a point. Its descriptor is
# zero if the point has one orientation.
ORIENTED = np.dtype([*KEYPOINT.descr, ("second_angle", "<f4"), ("second_descriptor", "u1", (128,))])

# Minimum `scale` in px. It belongs to sigma 1.6 of the doubled image, in the first of three layers,
# half a layer below it.
MIN_SCALE = 1.6 * 2 ** (1 / 6)

TYPICAL_SCORE = 0.03  # Contrast of a typical keypoint, for keypoints whose contrast is not known
CONTRAST = 0.0133  # Minimum contrast of a keypoint, a third of OpenCV's default
# Increase this number when the same image gives other keypoints. Features and stores made with
# another number are then made again.
VERSION = "2"


def extract(gray: np.ndarray, max_keypoints: int, mask: Optional[np.ndarray] = None) -> np.ndarray:
    """Extract the SIFT keypoints of highest rank (`rank_keypoints`) of an image.

    Args:
        gray: (H, W) uint8.
        max_keypoints: maximum number of keypoints, 1 or more.
        mask: (H, W) uint8. No keypoint lies at a pixel where it is 0.

    Returns:
        (n,) records of dtype ORIENTED, n <= max_keypoints, at distinct positions, by decreasing
        rank. The first orientation of a keypoint has the smaller angle. An image without structure
        gives (0,). Equal input gives equal bytes.
    """
    points = make_detector().detect(gray, mask)
    values = to_geometry_records(points)
    # Keep one keypoint for each position. In this order the orientations of a point follow each
    # other, so a second orientation is the next entry, if that has the same geometry.
    order, first = _sort_by_position(values)
    second = order[np.minimum(first + 1, max(len(order) - 1, 0))]
    first = order[first]
    same = [values[name][first] == values[name][second] for name in ("x", "y", "scale", "score")]
    has_second = np.logical_and.reduce([*same, first != second])
    # Keep the best keypoints.
    best = values[first]
    rows = _find_highest(best["score"] * best["scale"], best, max_keypoints)
    first = first[rows]
    has_second = has_second[rows]
    second = second[rows][has_second]

    records = np.zeros(len(rows), ORIENTED)
    for name in GEOMETRY:
        records[name] = values[name][first]
    records["second_angle"][has_second] = values["angle"][second]
    # Describe both orientations of all keypoints in one call.
    descriptors = _describe(gray, [points[index] for index in [*first, *second]])
    records["descriptor"] = descriptors[: len(first)]
    records["second_descriptor"][has_second] = descriptors[len(first) :]
    return records


def rank_keypoints(records: np.ndarray) -> np.ndarray:
    """Return the rank of keypoints, (n,) float32. Those of highest rank are kept, and come first.

    For SIFT it is response times scale, since large keypoints are found again more often. For other
    extractors it is the score.
    """
    is_sift = records.dtype in (KEYPOINT, ORIENTED)
    # A product in float32 has the same bits on every processor.
    return records["score"] * records["scale"] if is_sift else records["score"]


def keep_strongest(records: np.ndarray, max_keypoints: int) -> np.ndarray:
    """Keep the keypoints of highest rank (`rank_keypoints`), in this order.

    If several keypoints have one position, only the keypoint with the highest score is kept.

    Args:
        records: (n,) keypoints.
        max_keypoints: how many are kept at most.
    """
    order, first = _sort_by_position(records)
    distinct = records[order[first]]
    return distinct[_find_highest(rank_keypoints(distinct), distinct, max_keypoints)]


def positions(records: np.ndarray) -> np.ndarray:
    """Return the positions (n, 2) float32 px of keypoint records (n,)."""
    return np.stack([records["x"], records["y"]], axis=-1)


def to_root_sift(descriptors: np.ndarray) -> np.ndarray:
    """Convert SIFT descriptors (n, 128) to RootSIFT (Arandjelovic 2012).

    Returns:
        (n, 128) float32 of length 1. Zeros stay zeros. The bytes are the same on every machine.
    """
    values = descriptors.astype(np.float32)
    return np.sqrt(values / np.maximum(values.sum(axis=1, keepdims=True), 1.0))


def to_sift(descriptors: np.ndarray) -> np.ndarray:
    """Convert RootSIFT (n, 128), from 0 to 1, to SIFT from 0 to 255. Return SIFT unchanged.

    RootSIFT is the square root of SIFT divided by its sum. OpenCV scales SIFT to a length of 512.
    """
    values = np.asarray(descriptors, np.float32)
    if not values.size or values.max() > 1.0 + 1e-3:
        return values
    squares = np.square(values)
    length = np.maximum(np.linalg.norm(squares, axis=1, keepdims=True), 1e-12)
    return np.minimum(np.rint(512.0 * squares / length), 255.0)


@functools.lru_cache(maxsize=1)
def make_detector() -> cv2.SIFT:
    """Create OpenCV's detector of all keypoints above CONTRAST, once for a process."""
    return cv2.SIFT.create(contrastThreshold=CONTRAST, enable_precise_upscale=True)


def to_geometry_records(points: Sequence[cv2.KeyPoint]) -> np.ndarray:
    """Return the GEOMETRY of OpenCV's keypoints as records (n,)."""
    values = [(*point.pt, point.size, point.angle, point.response) for point in points]
    return np.array(values, [(name, np.float32) for name in GEOMETRY])


def _describe(gray: np.ndarray, points: Sequence[cv2.KeyPoint]) -> np.ndarray:
    """Compute the descriptors (n, 128) float32 of keypoints, as `detectAndCompute` returns them."""
    if not points:
        return np.empty((0, 128), np.float32)
    # OpenCV doubles the image only if there is a keypoint of octave -1, so one is added, and its
    # descriptor is dropped. Its lowest byte is the octave, where 255 means -1, and the next byte is
    # the layer 1.
    doubled = cv2.KeyPoint(0.0, 0.0, MIN_SCALE, 0.0, 0.0, 255 | 1 << 8)
    return make_detector().compute(gray, [*points, doubled])[1][:-1]


def _find_highest(ranks: np.ndarray, records: np.ndarray, count: int) -> np.ndarray:
    """Find the `count` highest ranks (n,); return their indices.

    The scales and positions of `records` (n,) decide between equal ranks.
    """
    return np.lexsort((records["x"], records["y"], -records["scale"], -ranks))[:count]


def _sort_by_position(records: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """Sort (n,) records by position, and at each position by falling score.

    Returns:
        The order (n,), and where in it each position begins.
    """
    falling = -records["scale"], -records["score"]
    order = np.lexsort((records["angle"], *falling, records["x"], records["y"]))
    sorted_positions = positions(records[order])
    begins = np.ones(len(order), bool)
    begins[1:] = (sorted_positions[1:] != sorted_positions[:-1]).any(axis=1)
    return order, np.flatnonzero(begins)
