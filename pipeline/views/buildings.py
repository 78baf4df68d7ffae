"""Synthetic buildings whose opposite sides look alike and share nothing, with photographs as textures.

All sides have rows of the same window. Walls, signs and boxes have textures from photographs: from their left halves
on two sides, from their right halves on the opposite sides. So two pictures of opposite sides agree in their windows
alone, as repeated structure that misleads matchers.
"""

from __future__ import annotations

from typing import List, NamedTuple, Sequence, Tuple

import cv2
import numpy as np

from pipeline.views.places import Camera, Plane, looking_at

TEXELS = 48  # per metre of a wall
PATCH = 224  # texels, side of a piece of a photograph in a wall
WALL_CONTRAST, SIGN_CONTRAST = 0.5, 0.9  # relative to the photographs
REFLECTION = 0.3  # contrast of a photograph reflected in a window
PANE = 40  # gray level of a pane without a reflection
CLOSED = 0.12  # fraction of the windows that are walled up
SIGNS, BOXES = 3, 2  # on each side, and in front of it
GROUND_M = 9.0  # depth of the pavement in front of a wall
WITHIN = 0.42  # cameras in a courtyard stay within this fraction of its width from the middle
FOCAL = 0.95  # relative to the width of the picture


class Style(NamedTuple):
    """Common style of all sides. size: (width, depth, height) m. window: (h, w) uint8.

    pitch: (across, down) m from window to window. courtyard: cameras stand inside.
    """

    size: Tuple[float, float, float]
    window: np.ndarray
    pitch: Tuple[float, float]
    courtyard: bool


def building(rng: np.random.Generator, photographs: Sequence[np.ndarray], courtyard: bool) -> Tuple[Style, List[Plane]]:
    """A random building of four sides with pavement, signs and boxes. photographs: (h, w) uint8, one or more."""
    size = (rng.uniform(18, 26), rng.uniform(18, 26), rng.uniform(8, 11))
    pitch = (rng.uniform(2.4, 3.4), rng.uniform(2.8, 3.4))
    style = Style(size, _window(rng, pitch), pitch, courtyard)
    planes: List[Plane] = []
    for side in range(4):
        halves = [_half(photo, side // 2) for photo in photographs]
        local = [_wall(rng, halves, style, side), _ground(rng, halves, style, side)]
        for _ in range(BOXES):
            local += _box(rng, halves, style, side)
        R = _yaw(side)
        planes += [Plane(R @ plane.corner, R @ plane.right, R @ plane.down, plane.texture) for plane in local]
    return style, planes


def camera_before(rng: np.random.Generator, style: Style, side: int, size: Tuple[int, int]) -> Camera:
    """A camera with pictures of `size` that looks at a random point of a side's wall, from a random direction."""
    width, front, height = _extent(style, side)
    max_distance = min(18.0, 1.4 * abs(front)) if style.courtyard else 18.0
    target = np.array([rng.uniform(-0.25, 0.25) * width, -rng.uniform(0.3, 0.6) * height, front])
    angle, distance = np.radians(rng.uniform(-60, 60)), rng.uniform(0.4, 1.0) * max_distance
    centre = target + distance * np.array([np.sin(angle), 0.0, -np.cos(angle)])
    centre[1] = -rng.uniform(1.4, 3.5)
    if style.courtyard:
        centre[0] = np.clip(centre[0], -WITHIN * width, WITHIN * width)
    focal = FOCAL * size[0]
    K = np.array([[focal, 0, (size[0] - 1) / 2], [0, focal, (size[1] - 1) / 2], [0, 0, 1.0]])
    R = _yaw(side)
    return looking_at(K, R @ centre, R @ target, np.radians(rng.uniform(-4, 4)))


def _extent(style: Style, side: int) -> Tuple[float, float, float]:
    """Width of a side, z of its wall and height, in the frame of the side: cameras look along z."""
    width, depth = style.size[:2] if side % 2 == 0 else style.size[1::-1]
    return width, depth / 2 if style.courtyard else -depth / 2, style.size[2]


def _yaw(side: int) -> np.ndarray:
    """(3, 3) rotation from the frame of a side to the world."""
    return cv2.Rodrigues(np.array([0.0, side * np.pi / 2, 0.0]))[0]


def _half(photograph: np.ndarray, which: int) -> np.ndarray:
    middle = photograph.shape[1] // 2
    return photograph[:, middle:] if which else photograph[:, :middle]


def _piece(
    rng: np.random.Generator, photographs: Sequence[np.ndarray], size: Tuple[int, int], contrast: float
) -> np.ndarray:
    """A random crop of a random photograph, `size` = (width, height), enlarged where the photograph is too small."""
    photo = photographs[int(rng.integers(len(photographs)))]
    h, w = photo.shape
    scale = max(1.0, size[0] / w, size[1] / h)
    cut = (max(int(size[0] / scale), 1), max(int(size[1] / scale), 1))
    x, y = (int(rng.integers(margin + 1)) for margin in (w - cut[0], h - cut[1]))
    piece = cv2.resize(photo[y : y + cut[1], x : x + cut[0]], size, interpolation=cv2.INTER_LINEAR)
    return cv2.convertScaleAbs(piece, alpha=contrast, beta=140 - contrast * float(piece.mean()))


def _window(rng: np.random.Generator, pitch: Tuple[float, float]) -> np.ndarray:
    """(h, w) uint8: a frame with mullions; PANE marks the glass."""
    w, h = int(rng.uniform(0.4, 0.55) * pitch[0] * TEXELS), int(rng.uniform(0.5, 0.65) * pitch[1] * TEXELS)
    bar, light = int(rng.integers(3, 7)), int(rng.integers(200, 245))
    window = np.full((h, w), light, np.uint8)
    columns, rows = int(rng.integers(2, 4)), int(rng.integers(2, 4))
    for column in range(columns):
        for row in range(rows):
            x0, x1 = (bar + (w - bar) * index // columns for index in (column, column + 1))
            y0, y1 = (bar + (h - bar) * index // rows for index in (row, row + 1))
            window[y0 : y1 - bar, x0 : x1 - bar] = PANE
    sill = max(h // 14, 2)
    window[-sill:] = light - 70
    return window


def _wall(rng: np.random.Generator, photographs: Sequence[np.ndarray], style: Style, side: int) -> Plane:
    width, front, height = _extent(style, side)
    w, h = int(width * TEXELS), int(height * TEXELS)
    texture = np.empty((h, w), np.uint8)
    for y in range(0, h, PATCH):
        for x in range(0, w, PATCH):
            patch = texture[y : y + PATCH, x : x + PATCH]
            patch[:] = _piece(rng, photographs, (PATCH, PATCH), WALL_CONTRAST)[: patch.shape[0], : patch.shape[1]]
    _set_windows(rng, texture, photographs, style)
    for _ in range(SIGNS):
        sides = (int(rng.uniform(1, 2.5) * TEXELS), int(rng.uniform(1, 2.5) * TEXELS))
        sign = _piece(rng, photographs, sides, SIGN_CONTRAST)
        y, x = (int(rng.integers(outer - inner)) for outer, inner in zip(texture.shape, sign.shape))
        texture[y : y + sign.shape[0], x : x + sign.shape[1]] = sign
    corner, right = np.array([-width / 2, -height, front]), np.array([width, 0.0, 0.0])
    return Plane(corner, right, np.array([0.0, height, 0.0]), texture)


def _set_windows(rng: np.random.Generator, texture: np.ndarray, photographs: Sequence, style: Style) -> None:
    """Draw rows of the style's window, with random light and reflections; leave some walled up."""
    h, w = style.window.shape
    across, down = (int(pitch * rng.uniform(0.94, 1.06) * TEXELS) for pitch in style.pitch)
    first = rng.integers(0, across - w, endpoint=True), rng.integers(down // 8, down // 3)
    for y in range(int(first[1]), texture.shape[0] - h, down):
        for x in range(int(first[0]), texture.shape[1] - w, across):
            if rng.uniform() < CLOSED:
                continue
            panes = _piece(rng, photographs, (w, h), REFLECTION).astype(np.int16) - 140 + int(rng.integers(30, 90))
            lit = np.where(style.window == PANE, panes, style.window.astype(np.int16) + rng.integers(-12, 12))
            texture[y : y + h, x : x + w] = lit.clip(0, 255)


def _ground(rng: np.random.Generator, photographs: Sequence[np.ndarray], style: Style, side: int) -> Plane:
    width, front, _ = _extent(style, side)
    texture = _piece(rng, photographs, (int(width * TEXELS / 2), int(GROUND_M * TEXELS / 2)), WALL_CONTRAST)
    corner, right = np.array([-width / 2, 0.0, front]), np.array([width, 0.0, 0.0])
    return Plane(corner, right, np.array([0.0, 0.0, -GROUND_M]), texture)


def _box(rng: np.random.Generator, photographs: Sequence[np.ndarray], style: Style, side: int) -> List[Plane]:
    """A box in front of a wall: its front, left and right."""
    width, front, _ = _extent(style, side)
    w, d, h = rng.uniform([0.8, 0.6, 0.8], [2.4, 1.5, 2.2])
    x, z = rng.uniform(-0.4, 0.4) * width, front - rng.uniform(2.5, 5.5)

    def face(corner: Tuple[float, float], right: Tuple[float, float]) -> Plane:
        size = int(max(np.hypot(*right), 0.5) * TEXELS), int(h * TEXELS)
        texture = _piece(rng, photographs, size, SIGN_CONTRAST)
        at, edge = np.array([corner[0], -h, corner[1]]), np.array([right[0], 0.0, right[1]])
        return Plane(at, edge, np.array([0.0, h, 0.0]), texture)

    left, near, far = x - w / 2, z - d / 2, z + d / 2
    return [face((left, near), (w, 0)), face((left, far), (0, -d)), face((x + w / 2, near), (0, d))]
