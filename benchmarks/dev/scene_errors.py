"""Errors of a model of a scene: camera centres, rotations and false pairs, from the true
cameras.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict, List, NamedTuple

import numpy as np
from scipy.spatial.distance import pdist

from pipeline.errors import RequestError


class Camera(NamedTuple):
    """fx, fy, cx, cy in pixels of the photograph as stored; R (3, 3) world to camera; C (3,) centre
    in the world.
    """

    intrinsics: np.ndarray
    R: np.ndarray
    C: np.ndarray

    def K(self, scale: float) -> np.ndarray:
        """(3, 3) calibration matrix of the photograph resized by `scale`; the centre of the first
        pixel at (0, 0).
        """
        fx, fy, cx, cy = self.intrinsics
        moved = (scale - 1) / 2
        return np.array(
            [[fx * scale, 0, cx * scale + moved], [0, fy * scale, cy * scale + moved], [0, 0, 1.0]]
        )


def read_cameras(path: Path) -> Dict[str, Camera]:
    """Cameras of a text file by name: `name fx fy cx cy R(9) C(3)` in each line. Raises
    RequestError.
    """
    found = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        name, *words = line.split() or ["#"]
        if name.startswith("#"):
            continue
        try:
            K, R, C = np.split(np.array(words, float), (4, 13))
            found[name] = Camera(K, R.reshape(3, 3), C.reshape(3))
        except ValueError:
            raise RequestError(
                f"--cameras {path} line {number}: needs a name, fx fy cx cy, nine of R, three of C"
            ) from None
    return found


def scenes_of(names: List[str]) -> Dict[str, List[str]]:
    """Photographs by scene: a name up to its last number. `castle_0007.jpg` belongs to castle."""
    found: Dict[str, List[str]] = {}
    for name in sorted(names):
        match = re.match(r"(.*?)[-_]?\d+\.\w+$", name)
        found.setdefault(match.group(1) if match and match.group(1) else "scene", []).append(name)
    return found


def model_errors(model: Any, cameras: Dict[str, Camera]) -> Dict[str, float]:
    """Errors of a pycolmap.Reconstruction's camera centres and rotations, after the best similarity
    of the centres; {} for fewer than three photographs.

    centre: mean distance, in the units of `cameras`; percent: of the largest
    distance between two true cameras of the scene; rotation: mean angle in degrees.
    """
    import pycolmap

    poses = {each.name: each.cam_from_world() for each in model.images.values() if each.has_pose}
    if len(poses) < 3:
        return {}
    found = [cameras[name] for name in poses]
    centres = np.array([pose.inverse().translation for pose in poses.values()])
    true = np.array([camera.C for camera in found])
    moved = pycolmap.estimate_sim3d(centres, true)
    distance = float(np.linalg.norm(moved * centres - true, axis=1).mean())
    R = moved.rotation.matrix()
    turns = [pose.rotation.matrix() @ R.T @ c.R.T for pose, c in zip(poses.values(), found)]
    cosines = [(np.trace(turn) - 1) / 2 for turn in turns]
    every = np.array([camera.C for camera in cameras.values()])
    return {
        "centre": distance,
        "percent": 100 * distance / float(pdist(every).max()),
        "rotation": float(np.degrees(np.arccos(np.clip(cosines, -1, 1))).mean()),
    }


def true_fundamental(camera0: Camera, camera1: Camera, scale: float) -> np.ndarray:
    """(3, 3) F with x1^T F x0 = 0 for pixels of both photographs resized by `scale`."""
    R = camera1.R @ camera0.R.T
    x, y, z = camera1.R @ (camera0.C - camera1.C)
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.linalg.inv(camera1.K(scale)).T @ cross @ R @ np.linalg.inv(camera0.K(scale))
