"""Made pairs of photographs, of one place and of two, to learn which pairs a scene accepts.

Of one place: views of one plane, views of several planes at different depths, views of a wall of
equal windows. Of two places: the most similar photographs, two parts of one photograph that share
nothing, the same stamp on both, a mirror image, walls with the same windows.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, NamedTuple, Tuple

import cv2
import numpy as np

from pipeline.params import Homography, Photometric
from pipeline.views.homography import sample_view
from pipeline.views.render import distort, render
from superglue_sift.geometry.two_view import Size, compose, inverse, normalize, transform

Random = np.random.Generator
Gray = np.ndarray  # a photograph (H, W) uint8
VIEW = (640, 480)  # px, width and height
# Wider than in training: little overlap, strong tilt and zoom
WIDE = Homography(scale_min=0.25, perspective=0.3, rotation_deg=60, tilt_deg=70, max_upscale=4)
MILD = Homography(scale_min=0.7, perspective=0.15, rotation_deg=20, tilt_deg=30, max_upscale=4)
LIGHT = Photometric(brightness=0.2, contrast=0.3, gamma=0.2, blur=1.5, noise=0.03, jpeg=0.5)
WINDOW = 72  # px
RIGHT_PX = 4.0  # error up to which a match is right


class Made(NamedTuple):
    """Two images, and the homographies (L, 3, 3) of the planes that both show."""

    image0: Gray
    image1: Gray
    planes: np.ndarray

    def right(self, points0: np.ndarray, points1: np.ndarray) -> np.ndarray:
        """(K,) bool: matches (K, 2) that one of the planes explains."""
        right = np.zeros(len(points0), bool)
        for H in self.planes:
            right |= np.linalg.norm(transform(points0, H) - points1, axis=1) < RIGHT_PX
        return right


def made(image0: Gray, image1: Gray, planes: Any = ()) -> Made:
    """A pair; planes: a sequence of (3, 3)."""
    return Made(image0, image1, np.reshape(planes, (-1, 3, 3)).astype(float))


def view(
    rng: Random, photo: Gray, limits: Homography, size: Size = VIEW
) -> Tuple[np.ndarray, np.ndarray]:
    """A random view of a photograph, and its homography (3, 3)."""
    H = sample_view(rng, photo.shape[::-1], size, limits)
    return distort(render(photo, H, size), rng, LIGHT), H


def mild_part(rng: Random, photo: Gray) -> Gray:
    """What a mild view shows, as it is."""
    return render(photo, sample_view(rng, photo.shape[::-1], VIEW, MILD), VIEW)


def plane(rng: Random, photo: Gray, _other: Gray) -> Made:
    """Two views of a photograph."""
    (one, H0), (two, H1) = (view(rng, photo, WIDE) for _ in range(2))
    return made(one, two, [compose(H1, inverse(H0))])


def depth(rng: Random, photo: Gray, other: Gray) -> Made:
    """A photograph cut into planes at different depths, seen by a camera that moved.

    Behind the planes in front is another photograph, which the first camera does not see.
    """
    first = mild_part(rng, photo)
    K, turn, moved = _motion(rng)
    fronts = [_outline(rng) for _ in range(rng.integers(2, 13))]
    # in units of the depth of the last plane
    depths = [1.0, *np.sort(rng.uniform(0.4, 0.9, len(fronts)))[::-1]]
    layer = np.zeros(first.shape, np.uint8)  # of each pixel, the nearest plane
    for number, outline in enumerate(fronts, 1):
        cv2.fillConvexPoly(layer, outline, number)
    behind = np.where(layer == 0, first, cv2.resize(other, VIEW, interpolation=cv2.INTER_AREA))
    second = np.zeros_like(first)
    planes = []
    for number, far in enumerate(depths):
        normal = np.append(rng.uniform(-0.4, 0.4, 2), 1.0)
        planes.append(normalize(K @ (turn + np.outer(moved, normal) / far) @ np.linalg.inv(K)))
        seen = first if number else behind
        mask = np.uint8(255) * (layer == number) if number else np.full_like(layer, 255)
        shown = cv2.warpPerspective(mask, planes[-1], VIEW) > 127
        second[shown] = cv2.warpPerspective(seen, planes[-1], VIEW)[shown]
    second, H = view(rng, second, WIDE)
    return made(distort(first, rng, LIGHT), second, [compose(H, each) for each in planes])


def _motion(rng: Random) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """K (3, 3) of a camera, and its motion: R (3, 3), t (3,) for a place at depth 1."""
    width, height = VIEW
    focal = width * rng.uniform(0.8, 1.6)
    K = np.array([[focal, 0, width / 2], [0, focal, height / 2], [0, 0, 1]])
    turn = cv2.Rodrigues(np.radians(rng.uniform([-15, -30, -25], [15, 30, 25])))[0]
    moved = -turn @ rng.uniform([-0.5, -0.2, -0.3], [0.5, 0.2, 0.3])
    ahead = np.array([0, 0, 1.0])
    # it still looks at a part of the place
    return K, turn, moved + rng.uniform(0.3, 1) * (ahead - turn @ ahead)


def _outline(rng: Random) -> np.ndarray:
    """A convex outline within a view, (n, 2) int32."""
    middle = rng.uniform(0.1, 0.9, 2) * VIEW
    points = middle + rng.uniform(0.08, 0.35) * rng.uniform(-1, 1, (8, 2)) * VIEW
    return cv2.convexHull(points.astype(np.int32))[:, 0]


def wall(rng: Random, photo: Gray, back: Gray) -> np.ndarray:
    """A wall of equal windows, in rows: the middle of one photograph, many times on another."""
    out = cv2.resize(back, VIEW, interpolation=cv2.INTER_AREA)
    at = (np.array(photo.shape) - WINDOW) // 2
    window = photo[at[0] : at[0] + WINDOW, at[1] : at[1] + WINDOW]
    right, down = (WINDOW * rng.uniform(1.15, 1.6, 2)).astype(int)
    for y in range(rng.integers(0, down - WINDOW + 1), VIEW[1] - WINDOW, down):
        for x in range(rng.integers(0, right - WINDOW + 1), VIEW[0] - WINDOW, right):
            light = rng.normal(0, 4, window.shape) + rng.uniform(-12, 12)
            out[y : y + WINDOW, x : x + WINDOW] = (window + light).clip(0, 255)
    return out


def one_wall(rng: Random, photo: Gray, other: Gray) -> Made:
    """Two views of a wall of equal windows, with planes in front of it."""
    return depth(rng, wall(rng, photo, other), other)


def part(rng: Random, photo: Gray, other: Gray) -> Made:
    """Two walls with the same windows, and on both the same part of a photograph."""
    width, height = rng.integers(np.array(VIEW) // 7, np.array(VIEW) // 2)
    size = photo.shape[1] - width, photo.shape[0] - height
    x, y = rng.integers(0, np.maximum(size, 1))
    shared = photo[::-1][y : y + height, x : x + width]
    sides = []
    maps = []
    back = [mild_part(rng, photo), other]
    for each in back:
        image = wall(rng, photo, each)
        x, y = rng.integers(0, np.array(VIEW) - shared.shape[::-1])
        image[y : y + shared.shape[0], x : x + shared.shape[1]] = shared
        seen, H = view(rng, image, MILD)
        sides.append(seen)
        maps.append(compose(H, np.array([[1.0, 0, x], [0, 1, y], [0, 0, 1]])))
    return made(*sides, [compose(maps[1], inverse(maps[0]))])


def two_walls(rng: Random, photo: Gray, other: Gray) -> Made:
    """Two walls with the same windows."""
    back = [mild_part(rng, photo), other]
    return made(*(view(rng, wall(rng, photo, each), MILD)[0] for each in back))


def different(rng: Random, photo: Gray, other: Gray) -> Made:
    """Two photographs."""
    return made(photo, other)


def parts(rng: Random, photo: Gray, _other: Gray) -> Made:
    """The two halves of a photograph, each seen from elsewhere: similar, but nothing in common."""
    across = int(rng.integers(2))
    middle = photo.shape[across] // 2
    half = photo[:middle] if across == 0 else photo[:, :middle]
    rest = photo[middle:] if across == 0 else photo[:, middle:]
    sizes = [(each.shape[1] - 1, each.shape[0] - 1) for each in (half, rest)]
    sides = [view(rng, each, MILD, size)[0] for each, size in zip((half, rest), sizes)]
    return made(*sides)


def stamped(rng: Random, photo: Gray, other: Gray) -> Made:
    """Two photographs with the same date bar, logo or watermark."""
    words = "".join(rng.choice(list("ABDEGHKMNPRSTW 0123456789:-"), rng.integers(8, 26)))
    size = rng.uniform(0.5, 1.2)
    (width, height), below = cv2.getTextSize(words, cv2.FONT_HERSHEY_SIMPLEX, size, 2)
    edge = rng.integers(3, size=2)  # left, middle or right; top, middle or bottom
    bar = bool(rng.integers(2))
    sides = []
    for image in (photo, other):
        image = image.copy()
        free = np.array(image.shape[::-1]) - [width, height + below]
        x, y = np.choose(edge, [np.full(2, 8), free // 2, free - 8])
        if bar:
            image[max(int(y) - 6, 0) : int(y) + height + below + 7] = 0
        at = int(x), int(y) + height
        cv2.putText(image, words, at, cv2.FONT_HERSHEY_SIMPLEX, size, 255, 2, cv2.LINE_AA)
        sides.append(distort(image, rng, LIGHT))
    return made(*sides)


def mirrored(rng: Random, photo: Gray, _other: Gray) -> Made:
    """A view of a photograph, and one of its mirror image."""
    sides = view(rng, photo, MILD)[0], view(rng, np.ascontiguousarray(photo[:, ::-1]), MILD)[0]
    return made(*sides)


KINDS: Dict[str, Tuple[Callable[..., Made], int]] = {  # how it is made, how often of a photograph
    "plane": (plane, 2),
    "depth": (depth, 2),
    "one wall": (one_wall, 2),
    "part": (part, 2),
    "similar": (different, 1),
    "parts": (parts, 1),
    "two walls": (two_walls, 2),
    "stamped": (stamped, 1),
    "mirrored": (mirrored, 1),
}
