"""Change the keypoints of a pair at random. The seed of its sample determines the changes.

The changes are fast, because they change keypoints and not pixels. A rotation is exact up to the
pixel grid, because SIFT's descriptor rotates with the image. A smaller view is an approximation,
because SIFT samples other scales there.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Callable, Optional, Sequence, Tuple

import numpy as np

from pipeline.keypoints.store import EVERYWHERE, KeypointStore, View
from pipeline.params import Augmentation
from superglue_sift.features.features import KEYPOINT_FIELDS, TYPICAL_SCORE, Features
from superglue_sift.features.sift import rank_keypoints
from superglue_sift.geometry.two_view import compose, inverse, map_to_resized

# A function that draws a view of the store, or returns None if it has drawn an image of the pair
DrawOtherView = Callable[[np.random.Generator], Optional[View]]

NO_AUGMENTATION = -1  # The seed of a pair that is shown as it is stored
# Smallest and largest factors by which one view of a zoomed pair shrinks (docs/recipe.md), and the
# factors of the pairs that `zoom_far` selects.
ZOOM = (1.5, 10.0)
FAR_ZOOM = (5.0, 12.0)
MAX_NEIGHBORS = 8  # Largest number of views of other images around the shrunk one
MAX_BEYOND = 0.25  # Fraction of each side of the shrunk view that may lie outside the canvas

# Numbers of separate streams of random numbers
_NEGATIVE = 0
_COUNTS = 1
_VIEW = 2
_ZOOM = 3
_SCORE = 4

NO_CHANGE = Augmentation()


def choose_second_image(changes: Augmentation, image: int, images: int, seed: int) -> int:
    """Return the image of the second view, which is another one in a negative pair.

    Args:
        changes: how much the pairs are changed.
        image: index of the image of the first view.
        images: number of images.
        seed: the seed of the sample of the pair.
    """
    if images < 2 or changes.negatives == 0:
        return image
    if np.random.default_rng((seed, _NEGATIVE)).random() >= changes.negatives:
        return image
    offset = int(np.random.default_rng((seed, _NEGATIVE, 1)).integers(1, images))
    return (image + offset) % images


def classify_pair(changes: Augmentation, image: int, images: int, seed: int) -> str:
    """Return the kind of a pair: "stored", "negative", "zoomed" or "changed".

    A "stored" pair is not augmented. A "changed" pair is augmented, but is no other kind.

    Args:
        changes: how much the pairs are changed.
        image: index of the image of the first view.
        images: number of images.
        seed: the seed of the sample of the pair.
    """
    if seed == NO_AUGMENTATION:
        return "stored"
    if choose_second_image(changes, image, images, seed) != image:
        return "negative"
    return "zoomed" if _draw_zoom(changes.zoom, changes.zoom_far, seed)[1] > 1.0 else "changed"


def draw_counts(changes: Augmentation, limit: int, *seed: int) -> Tuple[int, int]:
    """Draw the numbers of keypoints that the two views keep.

    Args:
        changes: how much the pairs are changed.
        limit: largest number.
        seed: the numbers that determine the draw.
    """
    if not 0 < changes.min_keypoints < limit:
        return limit, limit
    low = math.log(changes.min_keypoints)
    high = math.log(limit + 1)
    rng = np.random.default_rng((*seed, _COUNTS))
    # The draw is log-uniform: as often between 100 and 200 as between 1,000 and 2,000.
    n0, n1 = np.exp(rng.uniform(low, high, 2)).astype(int)
    return int(n0), int(n1)


def read_changed_view(
    store: KeypointStore,
    images: Tuple[int, int],
    view_index: int,
    stored_view: int,
    changes: Augmentation,
    seed: int,
    limit: int,
) -> View:
    """Read view 0 or 1 of a pair, and change it.

    Args:
        store: the keypoints.
        images: indices of the images of the two views.
        view_index: 0 or 1, the position of the view in the pair.
        stored_view: index of the view among the views of its image.
        changes: how much the pairs are changed.
        seed: the seed of the sample of the pair.
        limit: largest number of keypoints to keep.
    """
    image = images[view_index]
    keypoints = slice(None)
    # A generator is created only if it is needed, because this is slow.
    if changes.keypoint_drop > 0 or changes.rotation_deg > 0:
        rng = np.random.default_rng((seed, _VIEW, view_index))
    # The fraction itself is random, from 0 to keypoint_drop.
    if changes.keypoint_drop > 0:
        count = store.counts[image, stored_view]
        keypoints = np.flatnonzero(rng.random(count) >= changes.keypoint_drop * rng.random())
    view = store.read_view(image, stored_view, keypoints)
    zoomed_index, factor = _draw_zoom(changes.zoom, changes.zoom_far, seed)
    if factor > 1.0 and view_index == zoomed_index:
        # The zoom draws from its own stream, so the rotation is the same with and without zoom.
        zoom_rng = np.random.default_rng((seed, _ZOOM, view_index))
        draw_other_view = functools.partial(_draw_other_view, store, images)
        view = make_mosaic(view, factor, store.min_scale, draw_other_view, zoom_rng)
    # The limit comes before the rotation, which keeps the order of the keypoints.
    features = view.features.select(slice(limit))
    if changes.score_drop and changes.score_drop > np.random.default_rng((seed, _SCORE)).random():
        features = features._replace(scores=np.full_like(features.scores, TYPICAL_SCORE))
    view = View(features, view.H_image_to_view, view.cell)
    if changes.rotation_deg > 0:
        view = rotate_view(view, rng.uniform(-changes.rotation_deg, changes.rotation_deg))
    return view


@functools.lru_cache(maxsize=1024)  # It is called for both views of a pair
def _draw_zoom(fraction: float, far_fraction: float, seed: int) -> Tuple[int, float]:
    """Draw which view of a pair shrinks, and its factor. With a factor of 1, neither shrinks."""
    if fraction == 0:
        return 0, 1.0
    rng = np.random.default_rng((seed, _ZOOM))
    if rng.random() >= fraction:
        return 0, 1.0
    view_index = int(rng.integers(2))
    min_factor, max_factor = FAR_ZOOM if far_fraction > 0 and rng.random() < far_fraction else ZOOM
    return view_index, math.exp(rng.uniform(math.log(min_factor), math.log(max_factor)))


def rotate_view(view: View, degrees: float) -> View:
    """Rotate the keypoints clockwise by `degrees` (as SIFT counts angles: x right, y down)."""
    features = view.features
    size = features.image_size
    c = math.cos(math.radians(degrees))
    s = math.sin(math.radians(degrees))
    # Find the smallest canvas (width, height) for the rotated view, and the shift of its center.
    R = np.array([[c, -s], [s, c]])
    canvas = np.ceil(np.abs(R) @ np.array(size, float) - 1e-9)
    shift = (canvas - 1) / 2 - R @ ((np.array(size) - 1) / 2)
    x, y = features.keypoints.T.astype(np.float64)
    keypoints = np.empty_like(features.keypoints, order="C")
    keypoints[:, 0] = c * x - s * y + shift[0]
    keypoints[:, 1] = s * x + c * y + shift[1]
    rotated = features._replace(
        keypoints=keypoints,
        oris=np.mod(features.oris + degrees, 360.0),
        image_size=(int(canvas[0]), int(canvas[1])),
    )
    # (3, 3), the same rotation as a homography of pixels
    T = np.array([[c, -s, shift[0]], [s, c, shift[1]], [0.0, 0.0, 1.0]])
    cell = view.cell if view.cell is EVERYWHERE else compose(view.cell, inverse(T))
    return View(rotated, compose(T, view.H_image_to_view), cell)


def make_mosaic(
    view: View,
    factor: float,
    min_scale: float,
    draw_other_view: DrawOtherView,
    rng: np.random.Generator,
) -> View:
    """Shrink a view, and put it at a random position among other views that are shrunk alike.

    The canvas has the size of the view. Keypoints outside the canvas are dropped, and so are
    keypoints that are too small for a detector. The others stay, ordered by descending rank.
    Descriptors and angles do not change. The ground truth needs the `cell` of the result, because
    its homography also maps points onto the other photographs.

    Args:
        view: the view.
        factor: by how much it shrinks, above 1.
        min_scale: smallest scale (px) at which keypoints are detected. If 0, it is the smallest
            scale of the view.
        draw_other_view: draws the views that surround the shrunk one.
        rng: generator of the positions and of the other views.
    """
    min_scale = min_scale or float(view.features.scales.min(initial=np.inf))
    # The shrunk view fills a cell (width, height), whose upper left corner is at `corner`.
    size = view.features.image_size
    canvas = np.array(size, float)
    cell = canvas / factor
    corner = rng.uniform(-MAX_BEYOND * cell, canvas - (1.0 - MAX_BEYOND) * cell)
    shrunk = [_shrink_keypoints(view, factor, min_scale, corner, cell)]
    # Fill cells around it, up to MAX_NEIGHBORS on the canvas, with views of other images.
    before, after = (
        np.ceil(np.maximum(space, 0) / cell) for space in (corner, canvas - corner - cell)
    )
    columns, rows = (range(-int(a), int(b) + 1) for a, b in zip(before, after))
    neighbor_cells = [cell_xy for cell_xy in itertools.product(columns, rows) if cell_xy != (0, 0)]
    for index in rng.permutation(len(neighbor_cells))[:MAX_NEIGHBORS]:
        other_view = draw_other_view(rng)
        if other_view is not None:
            shrunk.append(
                _shrink_keypoints(
                    other_view, factor, min_scale, corner + neighbor_cells[index] * cell, cell
                )
            )
    # Keep the keypoints on the canvas, ordered by descending rank.
    features = _join_features(shrunk)
    positions = features.keypoints
    is_inside = ((positions >= -0.5) & (positions <= canvas - 0.5)).all(axis=1)
    index = np.flatnonzero(is_inside)
    order = np.argsort(-rank_keypoints(features)[index], kind="stable")
    # (3, 3) each: from the view to the canvas, and from the canvas to the unit square
    shrink = map_to_resized((1, 1), (1 / factor, 1 / factor))
    shrink[:2, 2] += corner
    to_cell = np.diag([*1 / cell, 1.0])
    to_cell[:2, 2] = (0.5 - corner) / cell
    features = features.select(index[order])._replace(image_size=size)
    return View(features, shrink @ view.H_image_to_view, to_cell)


def _join_features(parts: Sequence[Features]) -> Features:
    """Join the keypoints of several views."""
    return parts[0]._replace(
        **{
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in KEYPOINT_FIELDS
        }
    )


def _shrink_keypoints(
    view: View, factor: float, min_scale: float, corner: np.ndarray, cell: np.ndarray
) -> Features:
    """Return the keypoints of a view shrunk by `factor` that lie inside its cell.

    The cell has the upper left corner `corner` and the width and height `cell`, (2,) px each.
    """
    features = view.features
    index = np.flatnonzero(features.scales >= min_scale * factor)
    # (n, 2) px from the corner of the shrunk view
    positions = (features.keypoints[index].astype(np.float64) + 0.5) / factor
    is_inside = (positions <= cell).all(axis=1)
    index = index[is_inside]
    return Features(
        keypoints=(positions[is_inside] - 0.5 + corner).astype(np.float32),
        scales=features.scales[index] / factor,
        oris=features.oris[index],
        scores=features.scores[index],
        descriptors=features.descriptors[index],
        image_size=features.image_size,
    )


def _draw_other_view(
    store: KeypointStore, pair_images: Tuple[int, int], rng: np.random.Generator
) -> Optional[View]:
    """Return a random view of a random image, or None if it is in `pair_images`."""
    image = int(rng.integers(len(store)))
    view = int(rng.integers(store.views_per_image))
    return None if image in pair_images else store.read_view(image, view)
