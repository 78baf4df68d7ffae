"""A photograph matched with a part of it, magnified and rotated by fixed amounts.

As when a landmark is seen from afar and from near: the larger the zoom, the fewer keypoints of the
whole have a true match. Photographs that would be scaled up more than
`views.homography.max_upscale` times are left out, so only large ones reach the last levels.
"""

from __future__ import annotations

from typing import Iterator, Tuple

import cv2
import numpy as np

from pipeline.evaluate.heldout import LEVELS, SEED, HeldOutPairs, disturb
from pipeline.evaluate.inputs import Scene, ViewPair, image_size
from pipeline.keypoints.views import generator, magnification, mild_view
from superglue_sift.features.images import BadImage
from superglue_sift.geometry.two_view import compose

ZOOMS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
ROTATIONS_DEG = (45.0, 90.0, 180.0)
ROTATED = (2.0, 4.0, 8.0)  # zooms that are rotated too


class ZoomedPairs(HeldOutPairs):
    """One pair of each of the first `count` photographs of a source, with its photometric
    distortion.

    zoom: 1 or more, view 1 over view 0; rotation_deg: of view 1, clockwise.
    """

    def __init__(self, source: HeldOutPairs, count: int, zoom: float, rotation_deg: float = 0.0):
        params = source.params.model_copy(update={"pairs_per_image": 1})
        super().__init__(source.images, source.entries[:count], params)
        self.zoom = zoom
        self.rotation_deg = rotation_deg

    def load(self, index: int) -> Scene:
        """Render the pair of one photograph. Raises BadImage for an unreadable or too small one."""
        name = self.entries[index].name
        image = self.read(index)
        rng = generator(SEED, f"magnified {name}", 0)  # the same places at every level
        H_image_to_0 = mild_view(rng, image_size(image), self.view_size)
        try:
            H_0to1 = zoom_in(rng, self.view_size, self.zoom, self.rotation_deg)
        except ValueError as error:  # of wide views
            raise BadImage(name, str(error)) from None
        H_image_to_1 = compose(H_0to1, H_image_to_0)
        upscale = magnification(H_image_to_1, self.view_size).max()
        if upscale > self.params.views.homography.max_upscale:
            raise BadImage(name, f"a part magnified {self.zoom:g} times has no pixels of its own")
        views = [self.render_view(image, H, rng) for H in (H_image_to_0, H_image_to_1)]
        return Scene(name, views, [ViewPair(f"{name} x{self.zoom:g}", 0, 1, H_0to1)])


def zoom_in(
    rng: np.random.Generator, size: Tuple[int, int], zoom: float, rotation_deg: float
) -> np.ndarray:
    """H_0to1 (3, 3) that magnifies a random part of a view to a view of the same `size` (width,
    height).

    Raises ValueError where the part is larger than the view.
    """
    middle = (np.array(size) - 1) / 2
    turn = cv2.getRotationMatrix2D((0, 0), -rotation_deg, 1.0)[:, :2]
    margin = middle - np.abs(turn.T) @ middle / zoom
    if (margin < -1e-9).any():
        raise ValueError(f"zoom {zoom}, rotated by {rotation_deg}: no part fills {size}")
    centre = middle + rng.uniform(-1.0, 1.0, 2) * np.maximum(margin, 0.0)
    H = np.eye(3)
    H[:2, :2] = zoom * turn
    H[:2, 2] = middle - H[:2, :2] @ centre
    return H


def levels(source: HeldOutPairs, count: int) -> Iterator[Tuple[str, float, HeldOutPairs]]:
    """Condition, level and pairs of each line of robustness.csv: disturbed, zoomed, rotated."""
    for name, (function, amounts) in LEVELS.items():
        for amount in amounts:
            yield name, amount, disturb(source, count, function, amount)
    for rotation in (0.0, *ROTATIONS_DEG):
        name = f"zoom, rotated by {rotation:g} degrees" if rotation else "zoom"
        for zoom in ROTATED if rotation else ZOOMS:
            yield name, zoom, ZoomedPairs(source, count, zoom, rotation)
