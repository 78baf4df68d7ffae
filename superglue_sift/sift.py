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
- Descriptors are integers from 0 to 255 in OpenCV, so uint8 loses nothing.
"""

from __future__ import annotations

import functools
from typing import Optional, Sequence

import cv2
import numpy as np

# x, y: px, centre of the first pixel at 0. scale: diameter of the neighbourhood, px (OpenCV's
# `size`). angle: degrees, 0 to 360, clockwise as seen on the screen. score: contrast of the
# extremum (OpenCV's `response`).
GEOMETRY = ("x", "y", "scale", "angle", "score")
KEYPOINT = np.dtype([*((name, "<f4") for name in GEOMETRY), ("descriptor", "u1", (128,))])
# Returned by `extract`: with the second orientation of the point. Its descriptor is zero if there
# is none.
ORIENTED = np.dtype([*KEYPOINT.descr, ("second_angle", "<f4"), ("second_descriptor", "u1", (128,))])

# Minimum `scale` in px: sigma 1.6 of the doubled image, the first of three layers, half a layer
# below it.
MIN_SCALE = 1.6 * 2 ** (1 / 6)

CONTRAST = 0.04  # minimum contrast of a keypoint, OpenCV's default
# Minimum contrast in scenes: 7,000 keypoints in photographs 1,024 px wide, 2,600 of them above
# CONTRAST
WEAK = 0.0133
_SPARE = 1.5  # keypoints to detect per wanted one: those at the same position are merged


def extract(gray: np.ndarray, max_keypoints: int, contrast: float = CONTRAST) -> np.ndarray:
    """Extract the strongest `max_keypoints` (1 or more) of an image (H, W) uint8. Equal input gives
    equal bytes.

    contrast: OpenCV's `contrastThreshold`; a lower value adds weaker keypoints if there are fewer
    than wanted.

    Returns (n,) records of dtype ORIENTED, n <= max_keypoints, at distinct positions, by decreasing
    score; the first orientation is the one of smaller angle. (0,) for an image without structure.
    """
    asked = with_spare(max_keypoints)
    while True:
        sift = detector(asked, contrast)
        points, descriptors = sift.detectAndCompute(gray, None)  # pyright: ignore
        records = _join_orientations(_records(points, descriptors))[:max_keypoints]
        # repeated only for images with very many double orientations
        if len(records) >= max_keypoints or len(points) < asked:
            return records
        asked *= 2


def _join_orientations(records: np.ndarray) -> np.ndarray:
    """Merge KEYPOINT records that share a position into ORIENTED records, strongest first."""
    records = records[_strongest_first(records)]
    first = _first_of_each_position(records)
    joined = np.zeros(len(first), ORIENTED)
    for name in KEYPOINT.names or ():
        joined[name] = records[name][first]
    # orientations of one point are neighbours: they have equal scores and scales
    after = np.minimum(first + 1, max(len(records) - 1, 0))
    shared = (after > first) & (positions(records[first]) == positions(records[after])).all(1)
    for name in ("angle", "descriptor"):
        joined["second_" + name][shared] = records[name][after[shared]]
    return joined


def strongest(records: np.ndarray, max_keypoints: int) -> np.ndarray:
    """The `max_keypoints` strongest of (n,) records, one per position, by decreasing score."""
    order = _strongest_first(records)
    order = order[_first_of_each_position(records[order])]
    return records[order[:max_keypoints]]


def positions(records: np.ndarray) -> np.ndarray:
    """(n, 2) float32 pixels of keypoint records (n,)."""
    return np.stack([records["x"], records["y"]], axis=-1)


def root_sift_of(descriptors: np.ndarray) -> np.ndarray:
    """RootSIFT (Arandjelovic 2012) of (n, 128): float32 of unit length; zeros stay zeros.

    Bitwise equal on every machine, which torch's square root is not.
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


def with_spare(max_keypoints: int) -> int:
    """Number of keypoints to ask OpenCV for, so that enough distinct ones are left."""
    return int(max_keypoints * _SPARE)


@functools.lru_cache(maxsize=8)
def detector(count: int, contrast: float = CONTRAST) -> cv2.SIFT:
    """OpenCV's detector of the `count` strongest keypoints, which counts each orientation."""
    return cv2.SIFT.create(nfeatures=count, contrastThreshold=contrast, enable_precise_upscale=True)


def values_of(points: Sequence[cv2.KeyPoint]) -> np.ndarray:
    """(n, 5) float32: the GEOMETRY of OpenCV's keypoints."""
    values = [(*p.pt, p.size, p.angle, p.response) for p in points]
    return np.array(values, np.float32).reshape(-1, len(GEOMETRY))


def _records(points: Sequence[cv2.KeyPoint], descriptors: Optional[np.ndarray]) -> np.ndarray:
    records = np.empty(len(points), KEYPOINT)
    if points:  # else OpenCV returns no descriptors
        for column, name in zip(values_of(points).T, GEOMETRY):
            records[name] = column
        records["descriptor"] = descriptors
    return records


def _strongest_first(records: np.ndarray) -> np.ndarray:
    """Order of decreasing score; ties by scale, position and angle, which makes it unique."""
    return np.lexsort(
        (records["angle"], records["x"], records["y"], -records["scale"], -records["score"])
    )


def _first_of_each_position(records: np.ndarray) -> np.ndarray:
    """Increasing indices of the first record at each position."""
    position = records["x"].astype(np.complex64)
    position.imag = records["y"]
    return np.sort(np.unique(position, return_index=True)[1])
