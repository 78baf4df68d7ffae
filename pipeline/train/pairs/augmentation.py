"""Changes of a pair in keypoint space: what its views show of each other, by the seed of its sample alone.

They cost next to nothing, since they happen to keypoints and not to pixels. A turn is exact up to the pixel grid, since
SIFT's descriptor turns along, and so is a cut but for the keypoints near it. A smaller view is an approximation, since
SIFT runs at other sampled scales there: docs/training.md says how near it comes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Callable, Optional, Tuple

import numpy as np

from pipeline.features.store import View
from superglue_sift.geometry import resizing

# Another view of the store, drawn by the generator; None where the draw shows one of the pair's own images.
Others = Callable[[np.random.Generator], Optional[View]]

LEAST_ZOOM = 1.5  # times that a view of a zoomed pair is made smaller, at least
NEIGHBOURS = 8  # views of other images around the one that was made smaller, at most
BEYOND = 0.25  # of each of its sides so much may lie beyond the edge

_UNRELATED, _COUNTS, _VIEW, _ZOOM = 0, 1, 2, 3  # streams of random numbers


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """drop: up to this share of a view's keypoints is left out.

    turn_deg: each view is turned by up to so much either way (180: by any angle) on a canvas that just holds it.
    window: least side of the random window of a view that is kept, as a share of the view's; 1: the whole view.
    unrelated_share: of the pairs so many show two different images, of which nothing matches.
    min_keypoints: each view keeps the strongest n, n log-uniform from here to the most; 0: always the most.
    zoom_share: of the pairs so many have one view, either, that is made smaller and set among views of other images.
    zoom_max: by how many times at most; log-uniform from LEAST_ZOOM.
    """

    drop: float = 0.0
    turn_deg: float = 0.0
    window: float = 1.0
    unrelated_share: float = 0.0
    min_keypoints: int = 0
    zoom_share: float = 0.0
    zoom_max: float = 7.0

    def second_image(self, image: int, images: int, seed: int) -> int:
        """That of the second view, `images` in all: `image` itself, or another one in a pair of two images."""
        if images < 2 or self.unrelated_share == 0:
            return image
        if np.random.default_rng((seed, _UNRELATED)).random() >= self.unrelated_share:
            return image
        return (image + int(np.random.default_rng((seed, _UNRELATED, 1)).integers(1, images))) % images

    def counts(self, most: int, seed: int) -> Tuple[int, int]:
        """How many keypoints the two views keep."""
        if not 0 < self.min_keypoints < most:
            return most, most
        low, high = math.log(self.min_keypoints), math.log(most + 1)
        n0, n1 = np.exp(np.random.default_rng((seed, _COUNTS)).uniform(low, high, 2)).astype(int)
        return int(n0), int(n1)

    def zoom(self, seed: int, side: int) -> float:
        """By how many times the view of this side (0 or 1) is made smaller; 1: it stays as large as it is."""
        zoomed, factor = _zoom(self.zoom_share, self.zoom_max, seed) if self.zoom_share else (0, 1.0)
        return factor if side == zoomed else 1.0

    def apply(
        self,
        view: View,
        seed: int,
        side: int,
        others: Others = lambda random: None,
        least: float = 0.0,
        most: Optional[int] = None,
    ) -> View:
        """The changed view of this side (0 or 1) of the pair.

        Args:
            others: gives the views that surround one that is made smaller.
            least: the smallest scale (px) at which keypoints are found; 0: the smallest of the view.
            most: the first so many of the changed view's keypoints are kept; None: all.
        """
        given = view.records
        if self.window < 1.0 or self.drop > 0 or self.turn_deg > 0:  # a generator takes longer than many a change
            random = np.random.default_rng((seed, _VIEW, side))
        if self.window < 1.0:
            view = _windowed(view, self.window, random)
        if self.drop > 0:
            view = view._replace(
                records=_kept(view.records, random.random(len(view.records)) >= self.drop * random.random())
            )
        factor = self.zoom(seed, side)
        if factor > 1.0:
            # of a stream of its own: the turn is the same with and without
            view = mosaic(view, factor, least, others, np.random.default_rng((seed, _ZOOM, side)))
        own = view.records is not given
        view = view._replace(records=view.records[:most])  # before the turn, which leaves their order
        if self.turn_deg > 0:
            view = _turned(view, random.uniform(-self.turn_deg, self.turn_deg), own)
        return view


@functools.lru_cache(maxsize=1024)  # asked for both sides of a pair
def _zoom(share: float, most: float, seed: int) -> Tuple[int, float]:
    """The side that is made smaller, and by how many times; 1: none is."""
    random = np.random.default_rng((seed, _ZOOM))
    if random.random() >= share:
        return 0, 1.0
    return int(random.integers(2)), math.exp(random.uniform(math.log(LEAST_ZOOM), math.log(most)))


PLAIN = Augmentation()  # changes nothing


def _kept(records: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """`records[chosen]`, as opaque bytes, which numpy copies eight times as fast as records of fields."""
    return records.view(f"V{records.itemsize}")[chosen].view(records.dtype)


def _windowed(view: View, least: float, random: np.random.Generator) -> View:
    """The keypoints inside a random window, whose sides are at least the share `least` of the view's."""
    records, size = view.records, np.array(view.size)
    sides = np.maximum(np.round(size * random.uniform(least, 1.0)), 1.0)
    corner = np.floor(random.uniform(0.0, 1.0, 2) * (size - sides + 1))
    x, y = records["x"] - corner[0], records["y"] - corner[1]
    inside = (x >= -0.5) & (y >= -0.5) & (x <= sides[0] - 0.5) & (y <= sides[1] - 0.5)
    kept = _kept(records, inside)
    kept["x"], kept["y"] = x[inside], y[inside]
    shift = np.array([[1.0, 0.0, -corner[0]], [0.0, 1.0, -corner[1]], [0.0, 0.0, 1.0]])
    return View(kept, shift @ view.H_image_to_view, (int(sides[0]), int(sides[1])))


def _turned(view: View, degrees: float, own: bool) -> View:
    """The keypoints of the view turned clockwise (as SIFT counts angles: x right, y down) by `degrees`.

    own: nobody else holds the records, which may be overwritten.
    """
    records, size = view.records, view.size
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    turn = np.array([[c, -s], [s, c]])
    canvas = np.ceil(np.abs(turn) @ np.array(size, float) - 1e-9)
    shift = (canvas - 1) / 2 - turn @ ((np.array(size) - 1) / 2)
    moved = records if own else records.view(f"V{records.itemsize}").copy().view(records.dtype)
    x, y = records["x"].astype(np.float64), records["y"].astype(np.float64)
    moved["x"], moved["y"] = c * x - s * y + shift[0], s * x + c * y + shift[1]
    for name in ("angle", "second_angle"):
        if name in (records.dtype.names or ()):
            moved[name] = np.mod(records[name] + degrees, 360.0)
    T = np.array([[c, -s, shift[0]], [s, c, shift[1]], [0.0, 0.0, 1.0]])
    return View(moved, T @ view.H_image_to_view, (int(canvas[0]), int(canvas[1])))


def mosaic(view: View, factor: float, least: float, others: Others, random: np.random.Generator) -> View:
    """The view made smaller and set, at a random place, among others made smaller alike, on a canvas of its own size.

    What lies beyond the canvas is cut off. Keypoints that fall below the scale `least` (px) are dropped, since no
    detector would find them; the rest stay ordered by falling score. Descriptors and angles do not change.
    """
    least = least or float(view.records["scale"].min(initial=np.inf))
    canvas = np.array(view.size, float)
    cell = canvas / factor
    corner = random.uniform(-BEYOND * cell, canvas - (1.0 - BEYOND) * cell)
    records = [_smaller(view, factor, least, corner, cell)]
    before, after = (np.ceil(np.maximum(room, 0) / cell) for room in (corner, canvas - corner - cell))
    columns, rows = (range(-int(a), int(b) + 1) for a, b in zip(before, after))
    around = [place for place in itertools.product(columns, rows) if place != (0, 0)]
    for place in random.permutation(len(around))[:NEIGHBOURS]:
        other = others(random)
        if other is not None:
            records.append(_smaller(other, factor, least, corner + around[place] * cell, cell))
    joined = np.concatenate(records)
    inside = np.ones(len(joined), bool)
    for name, length in zip("xy", canvas):
        inside &= (joined[name] >= -0.5) & (joined[name] <= length - 0.5)
    order = np.flatnonzero(inside)
    order = order[np.argsort(-joined["score"][order], kind="stable")]
    shrink = resizing((1, 1), (1 / factor, 1 / factor))
    shrink[:2, 2] += corner
    return View(_kept(joined, order), shrink @ view.H_image_to_view, view.size)


def _smaller(view: View, factor: float, least: float, corner: np.ndarray, cell: np.ndarray) -> np.ndarray:
    """The keypoints of the view made smaller by `factor`, its upper left corner at `corner`, inside its cell (px)."""
    records = view.records
    kept = _kept(records, records["scale"] >= least * factor)
    inside = np.ones(len(kept), bool)
    for name, start, length in zip("xy", corner, cell):
        place = (kept[name].astype(np.float64) + 0.5) / factor
        inside &= place <= length
        kept[name] = place - 0.5 + start
    kept["scale"] /= factor
    return _kept(kept, inside)
