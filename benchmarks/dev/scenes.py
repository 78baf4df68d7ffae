"""Map places with known cameras by COLMAP, from our matches and from COLMAP's own matches.

    python -m benchmarks.dev.scenes /data/strecha --cameras /data/strecha/cameras_gt.txt
    python -m benchmarks.dev.scenes DIR --cameras FILE --only entry-P10 --ways superglue

Photographs are first reduced to 1,024 px. Every database is mapped by pycolmap. The ways to build a
database are:

- `superglue`: the command `superglue-match folder --colmap`
- `colmap`: COLMAP's SIFT and its exhaustive matcher
- `stored`: COLMAP's SIFT, matched by `superglue-match database`

The columns are:

- the photographs registered in the largest model
- the points of this model, their mean track length and reprojection error
- the mean error of camera centers after a similarity, in cm if FILE is in meters, and in percent
  of the largest distance between two cameras
- the mean error of rotations, in degrees
- the verified pairs, and how many of them are false: fewer than half of the matches of a false
  pair lie within 4 px of the true epipolar lines
- wall and processor seconds of extraction and matching
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import cv2
import numpy as np
import pandas as pd
from scipy.spatial.distance import pdist
from scipy.spatial.transform import Rotation

from pipeline import errors
from superglue_sift.features.images import read_gray, reduce_image
from superglue_sift.geometry import two_view
from superglue_sift.interop.colmap import CENTER

WORK = Path("scenes")  # databases and models
RIGHT_PX = 4.0  # from the true epipolar lines
LONGER = 1024  # px, side of the photographs
WAYS = ("superglue", "colmap", "stored")
MODEL = ["registered", "points", "track", "reprojection, px", "centers, cm", "%", "rotations"]
CENTERS = MODEL.index("centers, cm")


class Camera(NamedTuple):
    """Describe a photograph's camera.

    Attributes:
        K: (3, 3) in pixels; the center of the first pixel is (0, 0).
        R: (3, 3), from the world to the camera.
        C: (3,), its center in the world.
    """

    K: np.ndarray
    R: np.ndarray
    C: np.ndarray


Cameras = Dict[str, Camera]  # by the names of photographs


def read_cameras(path: Path) -> Cameras:
    """Read a text file with `name fx fy cx cy R(9) C(3)` in each line."""
    rows = pd.read_csv(path, sep=r"\s+", comment="#", header=None, index_col=0)
    numbers = rows.to_numpy(float).reshape(len(rows), 16)
    cameras = {}
    for name, (fx, fy, cx, cy, *pose) in zip(rows.index, numbers):
        K = np.array([[fx, 0, cx], [0, fy, cy], [0, 0, 1]])
        cameras[name] = Camera(K, np.reshape(pose[:9], (3, 3)), np.array(pose[9:]))
    return cameras


def compute_fundamental(camera0: Camera, camera1: Camera) -> np.ndarray:
    """Compute F (3, 3), with x1^T F x0 = 0 in pixels."""
    x, y, z = camera1.R @ (camera0.C - camera1.C)
    E = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]]) @ camera1.R @ camera0.R.T
    return np.linalg.inv(camera1.K).T @ E @ np.linalg.inv(camera0.K)


def write_scenes(images: Path, cameras: Path, only: str = "") -> Dict[str, Cameras]:
    """Write the reduced photographs of scenes below WORK.

    Args:
        images: folder of the photographs. castle_0007.jpg belongs to the scene castle.
        cameras: file of the cameras (`read_cameras`).
        only: a scene. If empty, all scenes are written.

    Returns:
        The cameras of each scene.
    """
    camera_of = read_cameras(cameras)
    scenes: Dict[str, List[str]] = {}
    for file in sorted(camera_of):
        name = re.sub(r"[-_]?\d+\.\w+$", "", file)
        if (images / file).is_file() and only in ("", name):
            scenes.setdefault(name, []).append(file)
    written: Dict[str, Cameras] = {}
    for name, files in scenes.items():
        folder = find_photos(name)
        folder.mkdir(parents=True, exist_ok=True)
        written[name] = {}
        for file in files:
            image = read_gray(images / file)
            small = reduce_image(image, LONGER)
            cv2.imwrite(str(folder / file), small, [cv2.IMWRITE_JPEG_QUALITY, 95])
            to_small = two_view.map_to_resized(image.shape[::-1], small.shape[::-1])
            camera = camera_of[file]
            written[name][file] = camera._replace(K=to_small @ camera.K)
    return written


def find_photos(scene: str) -> Path:
    """Return the folder of a scene's reduced photographs."""
    return WORK / scene / "photos"


def build_database(database: Path, photos: Path, way: str) -> None:
    """Write a database with the matches of all pairs. Commands and COLMAP have their defaults.

    Args:
        database: the file.
        photos: folder of the photographs.
        way: how, one of WAYS.
    """
    command = [sys.executable, "-m", "superglue_sift"]
    if way == "superglue":
        command += ["folder", str(photos), "--colmap", str(database)]
        command += ["--out-dir", str(database.with_suffix(""))]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return
    import pycolmap

    cpu = pycolmap.Device.cpu
    pycolmap.extract_features(database, photos, device=cpu)
    if way == "stored":
        command += ["database", str(database)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    else:
        pycolmap.match_exhaustive(database, device=cpu)


def map_scene(database: Path, photos: Path, cameras: Cameras, seed: int) -> List[str]:
    """Map a database by COLMAP, and measure the largest model.

    Args:
        database: the file.
        photos: folder of the photographs.
        cameras: the true cameras.
        seed: seed of the mapping.

    Returns:
        The cells of MODEL. A model of fewer than three photographs has no errors.
    """
    import pycolmap

    pycolmap.logging.minloglevel = 2  # errors
    pycolmap.set_random_seed(seed)
    folder = database.with_name(f"model-{seed}")
    folder.mkdir()
    models = pycolmap.incremental_mapping(database, photos, folder)
    model = max(models.values(), key=lambda model: model.num_reg_images(), default=None)
    registered = model.num_reg_images() if model else 0
    cells = [f"{registered} of {len(cameras)}", *[""] * (len(MODEL) - 1)]
    if registered >= 3:
        center, percent, rotation = measure_model_errors(model, cameras)
        cells[1:] = [
            f"{model.num_points3D():,}",
            f"{model.compute_mean_track_length():.2f}",
            f"{model.compute_mean_reprojection_error():.2f}",
            f"{100 * center:.1f}",
            f"{percent:.2f}",
            f"{rotation:.2f}",
        ]
    return cells


def measure_model_errors(model: Any, cameras: Cameras) -> Tuple[float, float, float]:
    """Measure a pycolmap.Reconstruction's cameras, after the best similarity of their centers.

    Returns:
        The mean distance of the centers in the units of `cameras`, the same in percent of the
        largest distance between two true cameras, and the mean angle of rotations in degrees.
    """
    import pycolmap

    images = [image for image in model.images.values() if image.has_pose]
    poses = {image.name: image.cam_from_world() for image in images}
    centers = np.array([pose.inverse().translation for pose in poses.values()])
    true = np.array([cameras[name].C for name in poses])
    similarity = pycolmap.estimate_sim3d(centers, true)
    if similarity is None:
        # All cameras are at one position.
        return np.inf, np.inf, np.inf
    distance = float(np.linalg.norm(similarity * centers - true, axis=1).mean())
    largest = float(pdist([camera.C for camera in cameras.values()]).max())
    back = similarity.rotation.matrix().T
    turns = [pose.rotation.matrix() @ back @ cameras[name].R.T for name, pose in poses.items()]
    rotation = float(np.degrees(Rotation.from_matrix(turns).magnitude()).mean())
    return distance, 100 * distance / largest, rotation


def count_pairs(database: Path, cameras: Cameras) -> Tuple[int, int]:
    """Count the verified pairs of a database, and the false ones among them."""
    import pycolmap

    verified = false = 0
    with pycolmap.Database.open(str(database)) as content:
        for pair, geometry in zip(*content.read_two_view_geometries()):
            matches = geometry.inlier_matches
            if not len(matches):
                continue
            keys = pycolmap.pair_id_to_image_pair(pair)
            F = compute_fundamental(*(cameras[content.read_image(key).name] for key in keys))
            both = (
                content.read_keypoints(key)[index, :2].astype(float) - CENTER
                for key, index in zip(keys, matches.T)
            )
            verified += 1
            false += bool((two_view.compute_epipolar_distances(F, *both) <= RIGHT_PX).mean() < 0.5)
    return verified, false


def measure_scene(scene: str, cameras: Cameras, way: str, seeds: int) -> List[str]:
    """Match a scene in one way, and map it with several seeds.

    Returns:
        The cells of a row: the scene, the way, the model of median error, the pairs, and the
        seconds.
    """
    photos = find_photos(scene)
    database = photos.parent / way / "database.db"
    shutil.rmtree(database.parent, ignore_errors=True)
    database.parent.mkdir()
    started = time.perf_counter()
    # Processor seconds of this process, and of the children that have ended
    used = sum(os.times()[:4])
    build_database(database, photos, way)
    wall = time.perf_counter() - started
    seconds = f"{wall:.0f} / {sum(os.times()[:4]) - used:.0f}"
    rows = [map_scene(database, photos, cameras, seed) for seed in range(seeds)]
    rows.sort(key=lambda row: float(row[CENTERS] or "inf"))
    median = rows[len(rows) // 2][:]
    if len(rows) > 1:
        median[CENTERS] += f" ({rows[0][CENTERS]} to {rows[-1][CENTERS]})"
    return [scene, way, *median, *map(str, count_pairs(database, cameras)), seconds]


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Measure every scene in each way, and print the results as a table."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("images", type=Path, metavar="DIR", help="photographs: the name of a scene and a number")
    add("--cameras", type=Path, required=True, help="`name fx fy cx cy R(9) C(3)` in each line")
    add("--only", default="", metavar="SCENE", help="this scene alone")
    add("--ways", nargs="+", default=["superglue", "colmap"], choices=WAYS)
    add("--seeds", type=int, default=1, help="of mapping; shows the median error and its range")
    options = parser.parse_args(argv)
    scenes = write_scenes(options.images, options.cameras, options.only)
    # Each row of the Markdown table is printed as soon as it is measured.
    head = ["scene", "way", *MODEL, "pairs", "false", "seconds"]
    print("|", " | ".join(head), "|")
    print("|---" * len(head) + "|")
    for (scene, cameras), way in itertools.product(scenes.items(), options.ways):
        print("|", " | ".join(measure_scene(scene, cameras, way, options.seeds)), "|", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
