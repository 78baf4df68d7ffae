"""Models of places with known cameras, from our matches and from COLMAP's own: `python -m
benchmarks.dev.scenes`.

  python -m benchmarks.dev.scenes /data/strecha --cameras /data/strecha/cameras_gt.txt
  python -m benchmarks.dev.scenes DIR --cameras FILE --only entry-P10 --every 3 --ways ours

Ways to build a database, all mapped by pycolmap: `ours`, the command `superglue-match --colmap`;
`colmap`, its own SIFT and exhaustive matcher; `held`, the same limited to 1,024 features; `stored`,
its SIFT matched by `superglue-match --colmap` into that database; `slot`, its SIFT matched by the
file of --slot, as COLMAP would. Photographs are first reduced to 1,024 px.
Columns: photographs registered in the largest model; its points, their mean track length and
reprojection error; mean error of camera centres (in cm if FILE is in metres, and in percent of the
largest distance between two cameras) and of rotations (degrees) after a similarity; verified pairs,
and how many of them are false: fewer than half of the matches lie within 4 px of the true epipolar
lines; wall and processor seconds of extraction and matching.
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
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import cv2
import numpy as np
from scipy.spatial.distance import pdist

from benchmarks.dev import colmap
from benchmarks.dev.colmap import Camera, library
from benchmarks.dev.command import make_parser, print_head, print_row
from pipeline import errors
from pipeline.errors import RequestError
from pipeline.evaluate.inputs import image_size
from superglue_sift.features.images import read_gray, reduce
from superglue_sift.geometry import two_view
from superglue_sift.interop.colmap import CENTRE, write_pair

WORK = Path("scenes")  # databases and models
RIGHT_PX = 4.0  # from the true epipolar lines
LONGER = 1024  # px, side of the photographs
# COLMAP's features; in `held` as many as the network matches
WAYS = {"ours": 0, "colmap": 8192, "held": 1024, "stored": 8192, "slot": 8192}
USUAL = ["ours", "colmap", "held"]
CENTRES = "centres, cm"
MODEL = ["registered", "points", "track", "reprojection, px", CENTRES, "%", "rotations"]
COLUMNS = ["scene", "way", *MODEL, "pairs", "false", "seconds"]


class Scene(NamedTuple):
    """Photographs of one place in `folder`, with their cameras by name."""

    name: str
    folder: Path
    cameras: Dict[str, Camera]


def parse(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    """The command line. Raises RequestError."""
    parser = make_parser("scenes", __doc__)
    add = parser.add_argument
    add("images", type=Path, metavar="DIR", help="photographs: the name of a scene and a number")
    add("--cameras", type=Path, required=True, help="`name fx fy cx cy R(9) C(3)` in each line")
    add("--only", metavar="SCENE", help="this scene alone")
    add("--every", type=int, default=1, metavar="N", help="each N-th photograph")
    add("--ways", nargs="+", default=USUAL, choices=list(WAYS), help="what is compared")
    add("--slot", type=Path, metavar="FILE", help="of `python -m superglue_sift.onnx --for colmap`")
    add("--seeds", type=int, default=1, help="of mapping; shows the median error and its range")
    options = parser.parse_args(argv)
    if "slot" in options.ways and not options.slot:
        raise RequestError("--ways slot: name the file, --slot superglue-colmap.onnx")
    return options


def write_scenes(options: argparse.Namespace) -> Iterator[Scene]:
    """The scenes asked for, their photographs written below WORK. Raises RequestError."""
    cameras = colmap.read_cameras(options.cameras)
    scenes: Dict[str, List[str]] = {}
    for file in sorted(cameras):
        if (options.images / file).is_file():
            # castle_0007.jpg belongs to castle
            scenes.setdefault(re.sub(r"[-_]?\d+\.\w+$", "", file), []).append(file)
    if options.only:
        scenes = {name: files for name, files in scenes.items() if name == options.only}
    if not scenes:
        raise RequestError(f"{options.images}: no photographs of {options.only or options.cameras}")
    for name, files in scenes.items():
        title = name if options.every == 1 else f"{name} 1/{options.every}"
        folder = WORK / title.replace("/", "-") / "photos"
        folder.mkdir(parents=True, exist_ok=True)
        chosen = files[:: options.every]
        written = {f: write_reduced(options.images / f, folder / f, cameras[f]) for f in chosen}
        yield Scene(title, folder, written)


def write_reduced(source: Path, target: Path, camera: Camera) -> Camera:
    """Write a photograph in gray, reduced; returns its camera there."""
    image = read_gray(source)
    small = reduce(image, LONGER)
    cv2.imwrite(str(target), small, [cv2.IMWRITE_JPEG_QUALITY, 95])
    scaling = two_view.resizing(image_size(image), image_size(small))
    return camera._replace(K=scaling @ camera.K)


def match(scene: Scene, way: str, folder: Path, slot: Optional[Path]) -> Path:
    """Build a database: ours with the users' command, COLMAP's with its defaults."""
    pycolmap = library()
    database = folder / "database.db"
    if way == "ours":
        run_ours(str(scene.folder), "--out-dir", str(folder / "found"), "--colmap", str(database))
        return database
    colmap.extract(database, scene.folder, WAYS[way])
    if way == "stored":
        run_ours("--colmap", str(database))
    elif way == "slot" and slot:
        match_by_slot(database, slot)
    else:
        pycolmap.match_exhaustive(database, device=pycolmap.Device.cpu)
    return database


def run_ours(*words: str) -> None:
    """Run `superglue-match`. Raises RequestError with the last line of what it says."""
    command = [sys.executable, "-m", "superglue_sift", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RequestError(f"superglue-match: {done.stderr.strip().splitlines()[-1:]}")


def match_by_slot(path: Path, file: Path) -> None:
    """Match all pairs of a database as COLMAP's exhaustive matcher would, and verify them."""
    pycolmap = library()
    slot = colmap.load_slot(file)
    with pycolmap.Database.open(str(path)) as content:
        for pair in itertools.combinations(colmap.read_sides(content).values(), 2):
            matches = colmap.match(slot, *(side for _, side in pair))
            both = []
            for image, side in pair:
                camera = content.read_camera(image.camera_id)
                both.append((image.image_id, camera, side.keypoints[:, :2].astype(np.float64)))
            write_pair(pycolmap, content, both, matches.astype(np.uint32))


def map_scene(database: Path, scene: Scene, folder: Path, seed: int) -> List[str]:
    """Map a database; returns the cells of MODEL for the largest model, errors from three
    photographs on.
    """
    pycolmap = library()
    pycolmap.set_random_seed(seed)
    folder.mkdir()
    models = pycolmap.incremental_mapping(database, scene.folder, folder)
    model = max(models.values(), key=lambda model: model.num_reg_images(), default=None)
    registered = model.num_reg_images() if model else 0
    cells = [f"{registered} of {len(scene.cameras)}"]
    if registered >= 3:
        centre, percent, rotation = model_errors(model, scene.cameras)
        cells += [f"{model.num_points3D():,}", f"{model.compute_mean_track_length():.2f}"]
        cells += [f"{model.compute_mean_reprojection_error():.2f}"]
        cells += [f"{100 * centre:.1f}", f"{percent:.2f}", f"{rotation:.2f}"]
    return cells + [""] * (len(MODEL) - len(cells))


def model_errors(model: Any, cameras: Dict[str, Camera]) -> Tuple[float, float, float]:
    """Errors of a pycolmap.Reconstruction's cameras, after the best similarity of their centres.

    Mean distance of the centres, in the units of `cameras`; the same in percent of the largest
    distance between two true cameras of the scene; mean angle of rotations in degrees.
    """
    poses = {each.name: each.cam_from_world() for each in model.images.values() if each.has_pose}
    centres = np.array([pose.inverse().translation for pose in poses.values()])
    true = np.array([cameras[name].C for name in poses])
    moved = library().estimate_sim3d(centres, true)
    if moved is None:  # cameras at one place
        return np.inf, np.inf, np.inf
    distance = float(np.linalg.norm(moved * centres - true, axis=1).mean())
    largest = float(pdist([camera.C for camera in cameras.values()]).max())
    back = moved.rotation.matrix().T
    turns = [pose.rotation.matrix() @ back @ cameras[name].R.T for name, pose in poses.items()]
    cosines = [(np.trace(turn) - 1) / 2 for turn in turns]
    rotation = float(np.degrees(np.arccos(np.clip(cosines, -1, 1))).mean())
    return distance, 100 * distance / largest, rotation


def count_pairs(database: Path, scene: Scene) -> Tuple[int, int]:
    """Numbers of verified pairs of a database and of the false ones among them."""
    pycolmap = library()
    verified = false = 0
    with pycolmap.Database.open(str(database)) as content:
        images = {image.image_id: image.name for image in content.read_all_images()}
        points = {key: content.read_keypoints(key)[:, :2].astype(float) - CENTRE for key in images}
        for pair, found in zip(*content.read_two_view_geometries()):
            matches = found.inlier_matches
            if not len(matches):
                continue
            keys = pycolmap.pair_id_to_image_pair(pair)
            truth = colmap.pose_between(*(scene.cameras[images[key]] for key in keys))
            both = [points[key][index] for key, index in zip(keys, matches.T)]
            away = two_view.epipolar_distances(colmap.fundamental(truth), *both)
            verified += 1
            false += bool((away <= RIGHT_PX).mean() < 0.5)
    return verified, false


def map_often(database: Path, scene: Scene, folder: Path, seeds: int) -> List[str]:
    """The cells of the model of median error among those of several seeds, with the range."""
    rows = [map_scene(database, scene, folder / f"model-{seed}", seed) for seed in range(seeds)]
    place = MODEL.index(CENTRES)
    rows.sort(key=lambda row: float(row[place] or "inf"))
    median = list(rows[seeds // 2])
    if seeds > 1:
        median[place] += f" ({rows[0][place]} to {rows[-1][place]})"
    return median


def measure(scene: Scene, way: str, slot: Optional[Path], seeds: int) -> List[str]:
    """The cells of one scene matched in one way."""
    folder = scene.folder.parent / way
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    started = time.perf_counter()
    used = sum(os.times()[:4])  # of this process and of the children it waited for
    database = match(scene, way, folder, slot)
    wall = time.perf_counter() - started
    seconds = f"{wall:.0f} / {sum(os.times()[:4]) - used:.0f}"
    pairs = map(str, count_pairs(database, scene))
    return [scene.name, way, *map_often(database, scene, folder, seeds), *pairs, seconds]


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Print the table."""
    options = parse(argv)
    library().logging.minloglevel = 2  # errors alone
    print_head(COLUMNS)
    for scene, way in itertools.product(write_scenes(options), options.ways):
        print_row(measure(scene, way, options.slot, options.seeds))
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
