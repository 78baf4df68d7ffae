"""Pairs with ground truth, and their sources.

`heldout`, `hpatches`, `poses` and others define a `Source`. Loading a scene twice gives the same
bytes, so pictures are drawn afterwards without keeping the images of all pairs in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from superglue_sift.features.images import BadImage
from superglue_sift.network.batch import Pair, choose_pair


@dataclass(frozen=True)
class Pose:
    """Two cameras. K0, K1: (3, 3) in pixels of the images as matched; T_0to1: (4, 4), points of
    camera 0 to 1.
    """

    K0: np.ndarray
    K1: np.ndarray
    T_0to1: np.ndarray


Extract = Callable[[np.ndarray, int], np.ndarray]  # as `sift.extract`
Truth = Union[np.ndarray, Pose]  # a homography: (3, 3) float64, pixels of view 0 to view 1


@dataclass(frozen=True)
class ViewPair:
    """Two views of a scene, by the indices of its images, and their ground truth."""

    name: str
    first: int
    second: int
    truth: Truth


@dataclass(frozen=True)
class Scene:
    """Images of one place, (H, W) uint8 gray, and the pairs among them."""

    name: str
    images: List[np.ndarray]
    pairs: List[ViewPair]


@dataclass(frozen=True)
class KnownPair:
    """The input of every matcher, with its ground truth. place: number of the scene, and of the
    pair in it.

    images: both, (H, W) uint8 gray, for the alignment of matches; optional.
    """

    name: str
    scene: str
    place: Tuple[int, int]
    pair: Pair
    truth: Truth
    images: Optional[Tuple[np.ndarray, np.ndarray]] = None


class Source:
    """Scenes by name and number of pairs. `load` raises BadImage for one to leave out. unit: word
    for its scenes.
    """

    scenes: Sequence[Tuple[str, int]]
    unit = "scenes"

    def __len__(self) -> int:
        return len(self.scenes)

    def load(self, index: int) -> Scene:
        raise NotImplementedError

    def in_color(self, index: int, image: int, gray: np.ndarray) -> np.ndarray:
        """Image number `image` of scene `index`, which `load` gave as `gray`, for pictures:
        (H, W, 3) BGR.
        """
        raise NotImplementedError


def image_size(image: np.ndarray) -> Tuple[int, int]:
    """(width, height) of an (H, W) image."""
    return image.shape[1::-1]


def pairs_of_scene(
    scene: Scene, index: int, max_keypoints: int, extractor: Extract, only: Optional[int] = None
) -> List[KnownPair]:
    """The pairs of scene number `index`, or only pair number `only`; runs the extractor once on
    each image.
    """
    keypoints: Dict[int, np.ndarray] = {}
    pairs = []
    for position, view in enumerate(scene.pairs):
        if only not in (None, position):
            continue
        sides = view.first, view.second
        for image in set(sides) - set(keypoints):
            keypoints[image] = extractor(scene.images[image], max_keypoints)
        image0, image1 = (scene.images[side] for side in sides)
        records0, records1 = (keypoints[side] for side in sides)
        pair = choose_pair(Pair(records0, records1, image_size(image0), image_size(image1)))
        images = (image0, image1)
        known = KnownPair(view.name, scene.name, (index, position), pair, view.truth, images)
        pairs.append(known)
    return pairs


class Results(NamedTuple):
    """Pairs, or results of pairs, in the order of the source. bad: (scene, reason) of what could
    not be read.
    """

    pairs: List
    bad: List[Tuple[str, str]]


def extract(
    source: Source, scenes: Sequence[int], max_keypoints: int, extractor: Extract
) -> Results:
    """Extract keypoints: all pairs of these scenes, in order."""
    pairs = []
    bad = []
    for index in scenes:
        try:
            pairs += pairs_of_scene(source.load(index), index, max_keypoints, extractor)
        except BadImage as error:
            bad.append((source.scenes[index][0], error.reason))
    return Results(pairs, bad)
