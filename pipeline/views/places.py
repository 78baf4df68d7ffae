"""Render textured rectangles by known cameras, with the depth of every pixel.

A picture warps each texture by the homography of its plane and shows the nearest surface at each pixel. The depths give
the exact overlap of two pictures. Units: metres and pixels; x right, y down, z forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Optional, Sequence, Tuple

import cv2
import numpy as np

from superglue_sift.geometry import jacobians, resizing, transform

FINER = 2  # rendered pixels per pixel of a picture along each axis, then averaged
BACKGROUND = 190  # gray level without a surface
SAME_DEPTH = 0.01  # relative difference up to which two depths are of one surface
SHARED_STEP = 6  # pixels between samples of the overlap along each axis
NEAR_PLANE = 0.1  # metres; nearer surfaces are not shown

Part = Tuple[slice, slice]  # rows and columns of a picture


@dataclass(frozen=True)
class Plane:
    """A rectangle with a texture, (h, w) uint8. corner: (3,) of the texture's upper left; right, down: (3,) edges."""

    corner: np.ndarray
    right: np.ndarray
    down: np.ndarray
    texture: np.ndarray

    def to_world(self) -> np.ndarray:
        """(3, 3) map of homogeneous texture pixels to points of the plane."""
        h, w = self.texture.shape
        across, along = self.right / w, self.down / h
        return np.stack([across, along, self.corner + (across + along) / 2], axis=1)


class Camera(NamedTuple):
    """K: (3, 3) in pixels; R (3, 3) and t (3,): a point X of the world is R X + t for the camera."""

    K: np.ndarray
    R: np.ndarray
    t: np.ndarray

    @property
    def T(self) -> np.ndarray:
        """(4, 4), points of the world to points of the camera."""
        T = np.eye(4)
        T[:3, :3], T[:3, 3] = self.R, self.t
        return T


class Picture(NamedTuple):
    """gray: (H, W) uint8. depth: (H, W) float32 along the optical axis, metres; inf where there is no surface."""

    gray: np.ndarray
    depth: np.ndarray


def looking_at(K: np.ndarray, centre: np.ndarray, target: np.ndarray, roll: float = 0.0) -> Camera:
    """A camera at `centre` (3,) that looks at `target` (3,), rotated by `roll` radians about its axis."""
    forward = (target - centre) / np.linalg.norm(target - centre)
    right = np.cross([0.0, 1.0, 0.0], forward)
    right /= np.linalg.norm(right)
    R = np.stack([right, np.cross(forward, right), forward])
    R = cv2.Rodrigues(np.array([0.0, 0.0, roll]))[0] @ R
    return Camera(K, R, -R @ centre)


def homography_of(plane: Plane, camera: Camera) -> np.ndarray:
    """(3, 3) texture pixels to picture pixels, not normalized: the third coordinate is the depth in metres."""
    world = plane.to_world()
    return camera.K @ (camera.R @ world + camera.t[:, None] * np.array([0.0, 0.0, 1.0]))


def photograph(planes: Sequence[Plane], camera: Camera, size: Tuple[int, int]) -> Picture:
    """Render a picture of `size` = (width, height) pixels. Planes are visible from both sides."""
    finer = (size[0] * FINER, size[1] * FINER)
    fine = camera._replace(K=resizing(size, finer) @ camera.K)
    gray, nearest = np.full(finer[::-1], BACKGROUND, np.uint8), np.zeros(finer[::-1], np.float32)
    depth = np.zeros(size[::-1], np.float32)
    for plane in planes:
        part = _part(plane, camera, size)
        if part is not None:
            inverse, inside = _inverse_depth(plane, camera, part)
            np.maximum(depth[part], np.where(inside, inverse, 0), out=depth[part])
            rows, columns = (slice(axis.start * FINER, axis.stop * FINER) for axis in part)
            part = rows, columns
            inverse, inside = _inverse_depth(plane, fine, part)
            shown = inside & (inverse > nearest[part])
            if shown.any():
                cv2.copyTo(_warped(plane, fine, part, shown), shown.astype(np.uint8), gray[part])
                nearest[part][shown] = inverse[shown]
    with np.errstate(divide="ignore"):
        return Picture(cv2.resize(gray, size, interpolation=cv2.INTER_AREA), 1 / depth)


def _part(plane: Plane, camera: Camera, size: Tuple[int, int]) -> Optional[Part]:
    """The rows and columns of the picture that the plane may cover; None if it is outside."""
    points = plane.corner + np.array([np.zeros(3), plane.right, plane.right + plane.down, plane.down])
    pixels, depths = projected(points, camera)
    if (depths <= NEAR_PLANE).all():
        return None
    low, high = np.zeros(2), np.array(size, float)
    if (depths > NEAR_PLANE).all():  # else its outline reaches infinity
        low, high = np.maximum(np.floor(pixels.min(0)) - 1, low), np.minimum(np.ceil(pixels.max(0)) + 2, high)
    return None if (low >= high).any() else (slice(int(low[1]), int(high[1])), slice(int(low[0]), int(high[0])))


def _inverse_depth(plane: Plane, camera: Camera, part: Part) -> Tuple[np.ndarray, np.ndarray]:
    """(H, W) float32 inverse depth of the plane at each pixel of a part, and bool: inside its rectangle."""
    inverse = np.linalg.inv(homography_of(plane, camera))
    y, x = (np.arange(axis.start, axis.stop) for axis in part)
    s, t, k = (np.add.outer(row[1] * y + row[2], row[0] * x).astype(np.float32) for row in inverse)
    h, w = plane.texture.shape
    inside = (k > 0) & (k < 1 / NEAR_PLANE)
    inside &= (s >= -0.5 * k) & (s <= (w - 0.5) * k) & (t >= -0.5 * k) & (t <= (h - 0.5) * k)
    return k, inside


def _warped(plane: Plane, camera: Camera, part: Part, shown: np.ndarray) -> np.ndarray:
    """(H, W) uint8: the texture warped to a part of the picture, reduced first to avoid aliasing."""
    H, texture = homography_of(plane, camera), plane.texture
    rows, columns = np.flatnonzero(shown.any(axis=1)), np.flatnonzero(shown.any(axis=0))
    offset = np.array([part[1].start, part[0].start])
    centre = offset + np.array([[columns[0] + columns[-1], rows[0] + rows[-1]]]) / 2
    texels = transform(centre, np.linalg.inv(H))
    scale = float(np.sqrt(abs(np.linalg.det(jacobians(H, texels)[0]))))
    if scale < 1.0:
        h, w = texture.shape
        small = (max(round(w * scale), 1), max(round(h * scale), 1))
        texture = cv2.resize(texture, small, interpolation=cv2.INTER_AREA)
        H = H @ np.linalg.inv(resizing((w, h), small))
    moved = np.array([[1.0, 0, -offset[0]], [0, 1, -offset[1]], [0, 0, 1]])
    size = (shown.shape[1], shown.shape[0])
    return cv2.warpPerspective(texture, moved @ H, size, flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)


def overlap(picture0: Picture, camera0: Camera, picture1: Picture, camera1: Camera) -> float:
    """Fraction of the pixels of picture 0 whose surface picture 1 shows too, 0 to 1, on a grid of pixels."""
    height, width = picture0.depth.shape
    y, x = (grid.ravel() for grid in np.mgrid[0:height:SHARED_STEP, 0:width:SHARED_STEP])
    depth = picture0.depth[y, x].astype(np.float64)
    known = np.isfinite(depth)
    points = backprojected(np.stack([x, y], axis=1)[known].astype(np.float64), depth[known], camera0)
    pixels, depths = projected(points, camera1)
    height, width = picture1.depth.shape
    u, v = np.rint(np.nan_to_num(pixels, nan=-1, posinf=-1, neginf=-1).clip(-1, 1e6)).astype(np.int64).T
    inside = (depths > 0) & (u >= 0) & (v >= 0) & (u < width) & (v < height)
    depth1 = picture1.depth[v[inside], u[inside]]
    return float((np.abs(depth1 - depths[inside]) <= SAME_DEPTH * depths[inside]).sum() / len(depth))


def backprojected(points: np.ndarray, depth: np.ndarray, camera: Camera) -> np.ndarray:
    """(N, 3) points of the world at pixels (N, 2) with depths (N,)."""
    rays = np.column_stack([points, np.ones(len(points))]) @ np.linalg.inv(camera.K).T
    return (rays * depth[:, None] - camera.t) @ camera.R


def projected(points: np.ndarray, camera: Camera) -> Tuple[np.ndarray, np.ndarray]:
    """(N, 2) pixels of points of the world (N, 3), and their depths (N,), negative behind the camera."""
    homogeneous = (points @ camera.R.T + camera.t) @ camera.K.T
    with np.errstate(divide="ignore", invalid="ignore"):
        return homogeneous[:, :2] / homogeneous[:, 2:], homogeneous[:, 2]
