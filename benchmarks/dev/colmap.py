"""True cameras, COLMAP's own SIFT in a database, our file in the place of its matcher."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, NamedTuple, Tuple

import numpy as np

from pipeline.errors import RequestError
from pipeline.evaluate.inputs import Pose
from superglue_sift import onnx
from superglue_sift.errors import import_extra
from superglue_sift.interop.colmap import CENTRE


class Camera(NamedTuple):
    """K (3, 3) in pixels, the centre of the first at (0, 0); R (3, 3) world to camera; C (3,)
    centre in the world.
    """

    K: np.ndarray
    R: np.ndarray
    C: np.ndarray


class Side(NamedTuple):
    """COLMAP's features of an image: keypoints (n, 6), descriptors (n, 128), (width, height)."""

    keypoints: np.ndarray
    descriptors: np.ndarray
    size: Tuple[int, int]


def library() -> Any:
    """Import pycolmap. Raises RequestError if it is not installed."""
    return import_extra("pycolmap", "colmap")


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
            fx, fy, cx, cy, *pose = map(float, words)
            R, C = np.split(np.array(pose), [9])
            K = np.array([[fx, 0, cx], [0, fy, cy], [0, 0, 1.0]])
            found[name] = Camera(K, R.reshape(3, 3), C.reshape(3))
        except ValueError:
            raise RequestError(
                f"--cameras {path} line {number}: needs a name, fx fy cx cy, nine of R, three of C"
            ) from None
    return found


def pose_between(camera0: Camera, camera1: Camera) -> Pose:
    """The motion from one camera to the other."""
    T_0to1 = np.eye(4)
    T_0to1[:3, :3] = camera1.R @ camera0.R.T
    T_0to1[:3, 3] = camera1.R @ (camera0.C - camera1.C)
    return Pose(camera0.K, camera1.K, T_0to1)


def fundamental(truth: Pose) -> np.ndarray:
    """(3, 3) F with x1^T F x0 = 0 in pixels."""
    x, y, z = truth.T_0to1[:3, 3]
    E = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]]) @ truth.T_0to1[:3, :3]
    return np.linalg.inv(truth.K1).T @ E @ np.linalg.inv(truth.K0)


def extract(database: Path, folder: Path, most: int) -> None:
    """COLMAP's SIFT on a CPU, at most `most` features of each image of a folder."""
    pycolmap = library()
    options = pycolmap.FeatureExtractionOptions()
    options.sift.max_num_features = most
    cpu = pycolmap.Device.cpu
    pycolmap.extract_features(database, folder, extraction_options=options, device=cpu)


def read_sides(content: Any) -> Dict[str, Tuple[Any, Side]]:
    """The images of an open database and their features, by name."""
    found = {}
    for image in content.read_all_images():
        camera = content.read_camera(image.camera_id)
        keypoints = content.read_keypoints(image.image_id)
        descriptors = content.read_descriptors(image.image_id).data
        side = Side(keypoints, descriptors, (camera.width, camera.height))
        found[image.name] = (image, side)
    return found


def load_slot(file: Path) -> Any:
    """The file of `superglue_sift.onnx --for colmap` in ONNX Runtime. Raises RequestError."""
    try:
        import onnxruntime
    except ImportError:
        raise RequestError("needs one more package: pip install onnxruntime") from None
    if not file.is_file():
        raise RequestError(f"{file}: no such file; python -m superglue_sift.onnx --for colmap FILE")
    return onnxruntime.InferenceSession(str(file))


def inputs_of(side: Side) -> Dict[str, np.ndarray]:
    """What COLMAP hands over for an image (its onnx_matchers.cc), by `onnx.COLMAP_SIDE`."""
    a11, a12, a21, a22 = side.keypoints[:, 2:].T
    unit = side.descriptors.astype(np.float32)
    values = {
        "kpts": side.keypoints[:, :2] - CENTRE,
        "desc": unit / np.maximum(np.linalg.norm(unit, axis=1, keepdims=True), 1e-12),
        "image_size": np.array(side.size),
        "scales": (np.hypot(a11, a21) + np.hypot(a12, a22)) / 2,
        "oris": np.arctan2(a21, a11),
    }
    return {name: value.astype(np.float32)[None] for name, value in values.items()}


def match(slot: Any, side0: Side, side1: Side) -> np.ndarray:
    """Matches (K, 2). slot: see `load_slot`."""
    sides = [inputs_of(side) for side in (side0, side1)]
    inputs = {name + side: sides[int(side)][name] for name in onnx.COLMAP_SIDE for side in "01"}
    matches0, _ = slot.run(None, inputs)
    index0 = np.flatnonzero(matches0 >= 0)
    return np.stack([index0, matches0[index0]], axis=1)
