"""A pair to be matched, and where pairs come from.

A source is anything with `len()`, `scene_name(index)`, `pairs_in(index)` and `load(index) -> Scene`; `heldout`
and `hpatches` are two. Loading a scene twice gives the same bytes, so that pictures can be drawn afterwards
without keeping the images of all pairs in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Protocol, Sequence, Tuple

import numpy as np

from pipeline.evaluation.conditions import conditions_of
from superglue_sift import sift
from superglue_sift.images import BadImage


@dataclass(frozen=True)
class ViewPair:
    """Two views of a scene. first, second: indices of its images; H_0to1: (3, 3) float64, pixels."""

    name: str
    first: int
    second: int
    H_0to1: np.ndarray


@dataclass(frozen=True)
class Scene:
    """Images that show one thing, (H, W) uint8 gray, and the pairs among them."""

    name: str
    images: List[np.ndarray]
    pairs: List[ViewPair]


@dataclass(frozen=True)
class Pair:
    """What every matcher gets. keypoints0/1: KEYPOINT records; size0/1: (width, height)."""

    name: str
    scene: str
    scene_index: int
    position: int  # of the pair in its scene
    keypoints0: np.ndarray
    keypoints1: np.ndarray
    size0: Tuple[int, int]
    size1: Tuple[int, int]
    H_0to1: np.ndarray
    conditions: Dict[str, float]


class Source(Protocol):
    """Where scenes come from. `load` raises BadImage where a scene may be left out and counted."""

    def __len__(self) -> int: ...

    def scene_name(self, index: int) -> str: ...

    def pairs_in(self, index: int) -> int: ...

    def load(self, index: int) -> Scene: ...


def image_size(image: np.ndarray) -> Tuple[int, int]:
    """(width, height) of an (H, W) image."""
    return int(image.shape[1]), int(image.shape[0])


def pairs_of_scene(scene: Scene, index: int, max_keypoints: int) -> List[Pair]:
    """All pairs of scene number `index`, SIFT run once on each of its images."""
    keypoints = [sift.extract(image, max_keypoints) for image in scene.images]
    return [
        _pair(scene, index, position, keypoints[view.first], keypoints[view.second])
        for position, view in enumerate(scene.pairs)
    ]


def pair_of_scene(
    scene: Scene, index: int, position: int, max_keypoints: int
) -> Tuple[Pair, Tuple[np.ndarray, np.ndarray]]:
    """One of these pairs alone, and its two images."""
    view = scene.pairs[position]
    images = scene.images[view.first], scene.images[view.second]
    keypoints0, keypoints1 = (sift.extract(image, max_keypoints) for image in images)
    return _pair(scene, index, position, keypoints0, keypoints1), images


def _pair(scene: Scene, index: int, position: int, keypoints0: np.ndarray, keypoints1: np.ndarray) -> Pair:
    view = scene.pairs[position]
    size0, size1 = image_size(scene.images[view.first]), image_size(scene.images[view.second])
    return Pair(
        name=view.name,
        scene=scene.name,
        scene_index=index,
        position=position,
        keypoints0=keypoints0,
        keypoints1=keypoints1,
        size0=size0,
        size1=size1,
        H_0to1=view.H_0to1,
        conditions=conditions_of(view.H_0to1, size0, size1),
    )


def extract(
    source: Source, scenes: Sequence[int], max_keypoints: int
) -> Tuple[List[Pair], List[Tuple[str, str]]]:
    """Keypoints of all pairs of these scenes, in order, and (scene name, reason) of those left out."""
    pairs: List[Pair] = []
    bad: List[Tuple[str, str]] = []
    for index in scenes:
        try:
            pairs += pairs_of_scene(source.load(index), index, max_keypoints)
        except BadImage as error:
            bad.append((source.scene_name(index), error.reason))
    return pairs, bad
