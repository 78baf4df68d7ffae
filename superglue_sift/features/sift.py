"""SIFT keypoints of a gray image. The only module that uses cv2.SIFT.

Choices and the measurements behind them:

- `enable_precise_upscale`: without it OpenCV doubles the image with a shift, and every keypoint
  lies 0.25 px too far right and down (measured on blobs at known positions; 0.00 with it). Rotated
  views would not agree.
- One keypoint per position, with up to two orientations: SIFT returns a keypoint for each strong
  orientation, and 18 % of them share their position with another. Truth and mutual matching need
  distinct points. With one orientation per point, the two views choose different ones in 15 % of
  the true matches of COCO views (22 % in oxford_affine), and their descriptors have nothing in
  common; with the choice of `orientation` it is 5 % (13 %).
- The keypoints of highest `rank` are kept, not those of highest response: 52 % of the right matches
  of COCO views then have both keypoints among the 512 that are kept, in place of 47 %.
- Descriptors are integers from 0 to 255 in OpenCV, so uint8 loses nothing.
"""

from __future__ import annotations

import functools
from typing import Optional, Sequence, Tuple

import cv2
import numpy as np

# x, y: px, centre of the first pixel at 0. scale: diameter of the neighbourhood, px (OpenCV's
# `size`). angle: degrees, 0 to 360, clockwise as seen on the screen. score: contrast of the
# extremum (OpenCV's `response`).
GEOMETRY = ("x", "y", "scale", "angle", "score")
KEYPOINT = np.dtype([*((name, "<f4") for name in GEOMETRY), ("descriptor", "u1", (128,))])
# What `extract` returns also has the second orientation of a point, whose descriptor is zero if the
# point has one orientation.
ORIENTED = np.dtype([*KEYPOINT.descr, ("second_angle", "<f4"), ("second_descriptor", "u1", (128,))])

# Minimum `scale` in px: sigma 1.6 of the doubled image, the first of three layers, half a layer
# below it.
MIN_SCALE = 1.6 * 2 ** (1 / 6)

CONTRAST = 0.0133  # minimum contrast of a keypoint, a third of OpenCV's default
# Increase this number when the same image gives other keypoints. Features and stores made with
# another number are then made again.
VERSION = "2"


def extract(gray: np.ndarray, max_keypoints: int, mask: Optional[np.ndarray] = None) -> np.ndarray:
    """Extract the `max_keypoints` (1 or more) of highest `rank` of an image (H, W) uint8. Equal
    input gives equal bytes.

    mask: (H, W) uint8. No keypoint lies at a pixel where it is 0.

    Returns (n,) records of dtype ORIENTED, n <= max_keypoints, at distinct positions, by decreasing
    rank; the first orientation is the one of smaller angle. (0,) for an image without structure.
    """
    points = detector().detect(gray, mask)
    values = values_of(points)
    # one keypoint for each position: OpenCV's orientations of a point follow each other
    order, first = _by_position(values)
    second = order[np.minimum(first + 1, max(len(order) - 1, 0))]
    first = order[first]
    same = [values[name][first] == values[name][second] for name in ("x", "y", "scale", "score")]
    shared = np.logical_and.reduce([*same, first != second])
    # the best keypoints, described in both orientations at once
    kept = _highest(_rank_of_sift(values[first]), values[first], max_keypoints)
    first = first[kept]
    shared = shared[kept]
    second = second[kept][shared]

    records = np.zeros(len(kept), ORIENTED)
    for name in GEOMETRY:
        records[name] = values[name][first]
    records["second_angle"][shared] = values["angle"][second]
    descriptors = _describe(gray, [points[index] for index in [*first, *second]])
    records["descriptor"] = descriptors[: len(first)]
    records["second_descriptor"][shared] = descriptors[len(first) :]
    return records


def rank(records: np.ndarray) -> np.ndarray:
    """(n,) float32. The keypoints with the highest values are kept, and come first.

    For SIFT it is response times scale, since large keypoints are found again more often. For other
    extractors it is the score.
    """
    is_sift = records.dtype in (KEYPOINT, ORIENTED)
    return _rank_of_sift(records) if is_sift else records["score"]


def _rank_of_sift(records: np.ndarray) -> np.ndarray:
    # the product in float32 has the same bits on every processor
    return records["score"] * records["scale"]


def strongest(records: np.ndarray, max_keypoints: int) -> np.ndarray:
    """The `max_keypoints` of (n,) keypoints with the highest `rank`, in this order. Of keypoints at
    one position, only the one of highest score counts.
    """
    order, first = _by_position(records)
    distinct = records[order[first]]
    return distinct[_highest(rank(distinct), distinct, max_keypoints)]


def positions(records: np.ndarray) -> np.ndarray:
    """(n, 2) float32 pixels of keypoint records (n,)."""
    return np.stack([records["x"], records["y"]], axis=-1)


def root_sift_of(descriptors: np.ndarray) -> np.ndarray:
    """RootSIFT (Arandjelovic 2012) of (n, 128): float32 of unit length; zeros stay zeros.

    Bitwise equal on every machine.
    """
    values = descriptors.astype(np.float32)
    return np.sqrt(values / np.maximum(values.sum(axis=1, keepdims=True), 1.0))


def whole_sift(descriptors: np.ndarray) -> np.ndarray:
    """Convert RootSIFT (N, 128), from 0 to 1, to SIFT from 0 to 255; SIFT is returned unchanged.

    RootSIFT is the square root of SIFT divided by its sum; OpenCV scales SIFT to a length of 512.
    """
    values = np.asarray(descriptors, np.float32)
    if not values.size or values.max() > 1.0 + 1e-3:
        return values
    squares = np.square(values)
    length = np.maximum(np.linalg.norm(squares, axis=1, keepdims=True), 1e-12)
    return np.minimum(np.rint(512.0 * squares / length), 255.0)


@functools.lru_cache(maxsize=1)
def detector() -> cv2.SIFT:
    """OpenCV's detector of all keypoints above CONTRAST."""
    return cv2.SIFT.create(contrastThreshold=CONTRAST, enable_precise_upscale=True)


def values_of(points: Sequence[cv2.KeyPoint]) -> np.ndarray:
    """(n,) records of the GEOMETRY of OpenCV's keypoints."""
    values = [(*p.pt, p.size, p.angle, p.response) for p in points]
    return np.array(values, [(name, np.float32) for name in GEOMETRY])


def _describe(gray: np.ndarray, points: Sequence[cv2.KeyPoint]) -> np.ndarray:
    """(n, 128) float32 descriptors of keypoints, as `detectAndCompute` returns them."""
    if not points:
        return np.empty((0, 128), np.float32)
    # OpenCV doubles the image only for keypoints of octave -1 (255, below the layer, 1)
    doubled = cv2.KeyPoint(0.0, 0.0, MIN_SCALE, 0.0, 0.0, 255 | 1 << 8)
    return detector().compute(gray, [*points, doubled])[1][:-1]


def _highest(ranks: np.ndarray, records: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` highest ranks (n,); ties by scale and position, which are unique."""
    return np.lexsort((records["x"], records["y"], -records["scale"], -ranks))[:count]


def _by_position(records: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """Order of (n,) records by position, at each by falling score; where positions begin."""
    falling = -records["scale"], -records["score"]
    order = np.lexsort((records["angle"], *falling, records["x"], records["y"]))
    place = positions(records[order])
    begins = np.ones(len(order), bool)
    begins[1:] = (place[1:] != place[:-1]).any(axis=1)
    return order, np.flatnonzero(begins)
