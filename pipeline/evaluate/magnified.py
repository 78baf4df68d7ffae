"""A whole photograph beside a part of it, magnified and turned by exactly the amount in the table.

As when a landmark is seen from far away and from near: the more the part is magnified, the fewer keypoints of the
whole have a partner at all. Photographs that would have to be magnified more than `views.homography.max_upscale` times
beyond their own pixels are left out, so that large ones alone reach the last levels.
"""

from __future__ import annotations

import math
from typing import Iterator, Tuple

import numpy as np

from pipeline.evaluate.heldout import SEED, HeldOutPairs
from pipeline.evaluate.inputs import Scene, ViewPair, image_size
from pipeline.views import homography
from superglue_sift.geometry import compose
from superglue_sift.images import BadImage

MAGNIFICATIONS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
TURNS_DEG = (45.0, 90.0, 180.0)
TURNED = (2.0, 4.0, 8.0)  # magnifications at which the part is turned, too


class MagnifiedPairs(HeldOutPairs):
    """The first `count` photographs of a source, one pair each; light and camera change as in the source.

    magnification: 1 or more, view 1 over view 0; turn_deg: of view 1, clockwise.
    """

    def __init__(self, source: HeldOutPairs, count: int, magnification: float, turn_deg: float = 0.0):
        params = source.params.model_copy(update={"pairs_per_image": 1})
        super().__init__(source.images, source.entries[:count], params)
        self.magnification, self.turn_deg = magnification, turn_deg

    def load(self, index: int) -> Scene:
        """Render the pair of one photograph. Raises BadImage when it cannot be read or is too small."""
        name, image = self.entries[index].name, self._image(index)
        rng = homography.generator(SEED, f"magnified {name}", 0)  # the same places at every level
        H_image_to_0 = homography.mild_view(rng, image_size(image), self.view_size)
        H_0to1 = part(rng, self.view_size, self.magnification, self.turn_deg)
        H_image_to_1 = compose(H_0to1, H_image_to_0)
        upscale = homography.magnification(H_image_to_1, self.view_size).max()
        if upscale > self.params.views.homography.max_upscale:
            raise BadImage(name, f"a part magnified {self.magnification:g} times has no pixels of its own")
        views = [self._rendered(image, H, rng) for H in (H_image_to_0, H_image_to_1)]
        return Scene(name, views, [ViewPair(f"{name} x{self.magnification:g}", 0, 1, H_0to1)])


def part(rng: np.random.Generator, size: Tuple[int, int], magnification: float, turn_deg: float) -> np.ndarray:
    """H_0to1 (3, 3) that fills a view with a part of a view of the same `size` (width, height), anywhere inside it.

    Raises ValueError where the part is larger than the view.
    """
    c, s = math.cos(math.radians(turn_deg)), math.sin(math.radians(turn_deg))
    turn = np.array([[c, -s], [s, c]])
    middle = (np.array(size) - 1) / 2
    room = middle - np.abs(turn.T) @ middle / magnification
    if (room < -1e-9).any():
        raise ValueError(f"a part of {size} magnified {magnification} times and turned by {turn_deg} is none")
    place = middle + rng.uniform(-1.0, 1.0, 2) * np.maximum(room, 0.0)
    H = np.eye(3)
    H[:2, :2] = magnification * turn
    H[:2, 2] = middle - H[:2, :2] @ place
    return H


def levels(source: HeldOutPairs, count: int) -> Iterator[Tuple[str, str, MagnifiedPairs]]:
    """Condition, level and pairs of each line of the two tables: magnified upright, and turned."""
    for magnification in MAGNIFICATIONS:
        yield "magnification", f"{magnification:g}", MagnifiedPairs(source, count, magnification)
    for turn in TURNS_DEG:
        for magnification in TURNED:
            condition = f"magnification, turned by {turn:g} degrees"
            yield condition, f"{magnification:g}", MagnifiedPairs(source, count, magnification, turn)
