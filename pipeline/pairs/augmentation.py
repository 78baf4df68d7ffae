"""Changes of a pair of views that cost nothing, since they happen to keypoints and not to pixels.

SIFT's descriptor does not change when a view is turned, and hardly when another part of it is cut out: turning and
cutting stored keypoints is what rendering, and SIFT again, would give. Every draw is a function of the sample's seed.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Tuple

import numpy as np

from pipeline.features.store import View

# The homography of a pair that shows nothing in common: no point comes near the other view.
APART = np.array([[1.0, 0.0, 1e6], [0.0, 1.0, 1e6], [0.0, 0.0, 1.0]])

_UNRELATED, _COUNTS, _VIEW = 0, 1, 2  # streams of random numbers


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """drop: up to this share of a view's keypoints is left out.

    turn_deg: each view is turned by up to so much either way (180: by any angle) on a canvas that just holds it.
    window: least side of the random window of a view that is kept, as a share of the view's; 1: the whole view.
    unrelated_share: of the pairs so many show two different images, of which nothing matches.
    min_keypoints: each view keeps the strongest n, n log-uniform from here to the most; 0: always the most.
    """

    drop: float = 0.0
    turn_deg: float = 0.0
    window: float = 1.0
    unrelated_share: float = 0.0
    min_keypoints: int = 0

    def second_image(self, image: int, images: int, seed: int) -> int:
        """That of the second view, `images` in all: `image` itself, or another one in a pair of two images."""
        if images < 2 or self.unrelated_share == 0:
            return image
        if _random(seed, _UNRELATED).random() >= self.unrelated_share:
            return image
        return (image + int(_random(seed, _UNRELATED, 1).integers(1, images))) % images

    def counts(self, most: int, seed: int) -> Tuple[int, int]:
        """How many keypoints the two views keep."""
        if not 0 < self.min_keypoints < most:
            return most, most
        low, high = math.log(self.min_keypoints), math.log(most + 1)
        n0, n1 = np.exp(_random(seed, _COUNTS).uniform(low, high, 2)).astype(int)
        return int(n0), int(n1)

    def apply(self, view: View, seed: int, side: int) -> Tuple[np.ndarray, np.ndarray, Tuple[int, int]]:
        """(records, H_image_to_view, size) of the changed view."""
        random = _random(seed, _VIEW, side)
        records, H, size = view.records, view.H_image_to_view, view.size
        if self.window < 1.0:
            records, H, size = _windowed(records, H, size, self.window, random)
        if self.drop > 0:
            # as opaque bytes, which numpy copies eight times as fast as records of fields
            kept = random.random(len(records)) >= self.drop * random.random()
            records = records.view(f"V{records.itemsize}")[kept].view(records.dtype)
        if self.turn_deg > 0:
            records, H, size = _turned(records, H, size, random.uniform(-self.turn_deg, self.turn_deg))
        return records, H, size


UNCHANGED = Augmentation()


def _random(*key: int) -> np.random.Generator:
    return np.random.default_rng(key)


def _windowed(records, H, size, least: float, random: np.random.Generator):
    """The keypoints inside a random window, whose sides are at least the share `least` of the view's."""
    sides = np.maximum(np.round(np.array(size) * random.uniform(least, 1.0)), 1.0)
    corner = np.floor(random.uniform(0.0, 1.0, 2) * (np.array(size) - sides + 1))
    x, y = records["x"] - corner[0], records["y"] - corner[1]
    inside = (x >= -0.5) & (y >= -0.5) & (x <= sides[0] - 0.5) & (y <= sides[1] - 0.5)
    kept = records.view(f"V{records.itemsize}")[inside].view(records.dtype)
    kept["x"], kept["y"] = x[inside], y[inside]
    shift = np.array([[1.0, 0.0, -corner[0]], [0.0, 1.0, -corner[1]], [0.0, 0.0, 1.0]])
    return kept, shift @ H, (int(sides[0]), int(sides[1]))


def _turned(records, H, size, degrees: float):
    """The keypoints of the view turned clockwise (as SIFT counts angles: x right, y down) by `degrees`."""
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    turn = np.array([[c, -s], [s, c]])
    canvas = np.ceil(np.abs(turn) @ np.array(size, float) - 1e-9)
    shift = (canvas - 1) / 2 - turn @ ((np.array(size) - 1) / 2)
    moved = records.copy()
    x, y = records["x"].astype(np.float64), records["y"].astype(np.float64)
    moved["x"], moved["y"] = c * x - s * y + shift[0], s * x + c * y + shift[1]
    for name in ("angle", "second_angle"):
        if name in records.dtype.names:
            moved[name] = np.mod(records[name] + degrees, 360.0)
    T = np.array([[c, -s, shift[0]], [s, c, shift[1]], [0.0, 0.0, 1.0]])
    return moved, T @ H, (int(canvas[0]), int(canvas[1]))
