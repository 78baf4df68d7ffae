"""Rendered scenes: buildings with true cameras, pairs of one side of each, which overlap, and of opposite sides.

Opposite sides look alike and share nothing (`views.buildings`). Photographs are textures. All follows from a seed.
"""

from __future__ import annotations

import itertools
from typing import List, Sequence, Tuple

import numpy as np

from pipeline.errors import RequestError
from pipeline.evaluate.inputs import Pose, Scene, Source, ViewPair
from pipeline.image_sets.manifest import Entry
from pipeline.image_sets.sources import ImageSet
from pipeline.parameters.schema import Photometric
from pipeline.views import buildings, homography, places, render
from superglue_sift.images import BadImage, decode_gray

SIZE = (768, 576)  # of a picture, px
PICTURES = 4  # of each of two opposite sides
PAIRS = 6  # of a scene that overlap, and as many that share nothing
OVERLAP = 0.1  # least fraction of either picture that the other shows too
MOST_PHOTOGRAPHS = 48  # that textures are cut from
ENOUGH_IMAGES = 16  # of fewer photographs all buildings look alike, and limits chosen on them say little


class RenderedScenes(Source):
    """`count` scenes of at most 2 PAIRS pairs each; every second building is a courtyard.

    The truth of pairs that overlap is a `Pose`, of the others NaN, as of `heldout.UnrelatedPairs`.
    """

    def __init__(self, images: ImageSet, entries: Sequence[Entry], count: int, photometric: Photometric, seed: int):
        self.photographs = _readable(images, entries)
        self.photometric, self.seed = photometric, seed
        self.scenes = [(f"rendered {number}", 2 * PAIRS) for number in range(count)]

    def load(self, index: int) -> Scene:
        """Render the pictures of a building."""
        name = self.scene_name(index)
        rng = homography.generator(self.seed, name, index)
        style, planes = buildings.building(rng, self.photographs, courtyard=index % 2 == 1)
        cameras = [buildings.camera_before(rng, style, side, SIZE) for side in (0, 2) for _ in range(PICTURES)]
        pictures = [places.photograph(planes, camera, SIZE) for camera in cameras]
        near, apart = _pairs(pictures, cameras)
        chosen = [(first, second, _pose(cameras[first], cameras[second])) for first, second in near[:PAIRS]]
        chosen += [(first, second, np.full((3, 3), np.nan)) for first, second in apart[:PAIRS]]
        views = [render.distort(picture.gray, rng, self.photometric) for picture in pictures]
        return Scene(name, views, [ViewPair(f"{name} {one}-{two}", one, two, truth) for one, two, truth in chosen])


def _readable(images: ImageSet, entries: Sequence[Entry]) -> List[np.ndarray]:
    """The first photographs, (H, W) uint8. Raises RequestError where none can be read."""
    found = []
    for entry in entries[:MOST_PHOTOGRAPHS]:
        try:
            found.append(decode_gray(images.read(entry), entry.name))
        except BadImage:  # fetch and keypoints report it
            continue
    if not found:
        raise RequestError("--scenes: no photograph could be read to make textures of; see bad_images.csv of keypoints")
    return found


def _pairs(
    pictures: Sequence[places.Picture], cameras: Sequence[places.Camera]
) -> Tuple[List[Tuple[int, int]], List[Tuple[int, int]]]:
    """Pairs that overlap, those first that overlap least; pairs of opposite sides that share not a pixel."""
    near, apart = [], []
    for one, two in itertools.combinations(range(len(pictures)), 2):
        shared = _shared(pictures, cameras, one, two)
        if one // PICTURES == two // PICTURES and min(shared) >= OVERLAP:
            near.append((min(shared), (one, two)))
        elif one // PICTURES != two // PICTURES and max(shared) == 0:
            apart.append(((two - one) % PICTURES, (one, two)))  # every picture has its turn
    return [pair for _, pair in sorted(near)], [pair for _, pair in sorted(apart)]


def _shared(
    pictures: Sequence[places.Picture], cameras: Sequence[places.Camera], first: int, second: int
) -> Tuple[float, float]:
    both = [(pictures[number], cameras[number]) for number in (first, second)]
    return places.seen_again(*both[0], *both[1]), places.seen_again(*both[1], *both[0])


def _pose(camera0: places.Camera, camera1: places.Camera) -> Pose:
    return Pose(camera0.K, camera1.K, camera1.T @ np.linalg.inv(camera0.T))
