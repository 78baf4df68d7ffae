"""Rendered buildings with known cameras: pairs of one side, which overlap, and negative pairs of opposite sides.

Opposite sides look alike and share nothing (`views.buildings`). Photographs are the textures. The seed decides all.
"""

from __future__ import annotations

import contextlib
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
PAIRS = 6  # of each kind in a scene
OVERLAP = 0.1  # minimum fraction of both pictures that the other shows too
MAX_PHOTOGRAPHS = 48  # for textures
ENOUGH_IMAGES = 16  # with fewer photographs all buildings look alike, and limits chosen on them mean little


class RenderedScenes(Source):
    """`count` scenes of at most 2 PAIRS pairs each; every second building is a courtyard.

    The truth of pairs that overlap is a `Pose`, of negative pairs NaN, as in `heldout.NegativePairs`.
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
        pairs = [ViewPair(f"{name} {first}-{second}", first, second, truth) for first, second, truth in chosen]
        return Scene(name, views, pairs)


def _readable(images: ImageSet, entries: Sequence[Entry]) -> List[np.ndarray]:
    """The first photographs, (H, W) uint8. Raises RequestError where none can be read."""
    photographs = []
    for entry in entries[:MAX_PHOTOGRAPHS]:
        with contextlib.suppress(BadImage):  # fetch and keypoints report it
            photographs.append(decode_gray(images.read(entry), entry.name))
    if not photographs:
        raise RequestError("--scenes: no photograph could be read to make textures of; see bad_images.csv of keypoints")
    return photographs


def _pairs(
    pictures: Sequence[places.Picture], cameras: Sequence[places.Camera]
) -> Tuple[List[Tuple[int, int]], List[Tuple[int, int]]]:
    """Pairs that overlap, by growing overlap; pairs of opposite sides that share no pixel."""
    near, apart = [], []
    for first, second in itertools.combinations(range(len(pictures)), 2):
        one, other = ((pictures[number], cameras[number]) for number in (first, second))
        shared = places.overlap(*one, *other), places.overlap(*other, *one)
        if first // PICTURES == second // PICTURES and min(shared) >= OVERLAP:
            near.append((min(shared), (first, second)))
        elif first // PICTURES != second // PICTURES and max(shared) == 0:
            apart.append(((second - first) % PICTURES, (first, second)))  # use every picture
    return [pair for _, pair in sorted(near)], [pair for _, pair in sorted(apart)]


def _pose(camera0: places.Camera, camera1: places.Camera) -> Pose:
    return Pose(camera0.K, camera1.K, camera1.T @ np.linalg.inv(camera0.T))
