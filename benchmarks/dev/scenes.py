"""Models of places with known cameras, from our matches and from COLMAP's own: `python -m
benchmarks.dev.scenes`.

  python -m benchmarks.dev.scenes /data/strecha --cameras /data/strecha/cameras_gt.txt
  python -m benchmarks.dev.scenes DIR --cameras FILE --only entry-P10 --every 3 --ways ours

Ways to build a database, all mapped by pycolmap: `ours`, the command `superglue-match --colmap`;
`colmap`, its own SIFT and exhaustive matcher; `held`, the same limited to 1,024 features; `stored`,
its SIFT matched by `superglue-match --colmap` into that database; `slot`, its SIFT matched by the
file of --slot, as COLMAP would (`colmap_slot`). Photographs are first reduced to --width.
Columns: photographs registered in the largest model; its points, their mean track length and
reprojection error in pixels; mean error of camera centres (in the units of FILE, and in percent of
the largest distance between two cameras) and of rotations (degrees) after a similarity; verified
pairs, and how many of them are false: fewer than half of the matches lie within 4 px of the true
epipolar lines; wall and processor seconds of extraction and matching, and seconds of mapping. With
--seeds N each database is mapped N times: registered is the minimum, the rest are means, and the
range of the centres follows the row.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import cv2
import numpy as np

from benchmarks.dev import colmap_slot, scene_errors
from benchmarks.dev.scene_errors import Camera
from pipeline import errors
from pipeline.errors import RequestError
from pipeline.files import write_atomic
from superglue_sift import geometry
from superglue_sift.images import read_gray

RIGHT_PX = 4.0  # from the true epipolar lines
# COLMAP's features; in `held` as many as the network matches
WAYS = {"ours": 0, "colmap": 8192, "held": 1024, "stored": 8192, "slot": 8192}
USUAL = ["ours", "colmap", "held"]
# key and format of the columns
COLUMNS = {
    "scene": "18", "way": "6", "registered": "10", "points": "8.0f", "track": "7.2f", "px": "7.3f",
    "centre": "8.4f", "percent": "8.3f", "rotation": "8.3f", "pairs": "6", "false": "6",
    "matching": "9.0f", "cpu": "6.0f", "mapping": "8.0f",
}  # fmt: skip


class Scene(NamedTuple):
    """Photographs of one place in `folder`, reduced by `scale`, with their cameras by name."""

    name: str
    folder: Path
    scale: float
    cameras: Dict[str, Camera]


def parse(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    """The command line."""
    title, _, more = str(__doc__).partition("\n\n")
    parser = argparse.ArgumentParser(
        "python -m benchmarks.dev.scenes",
        description=title,
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("images", type=Path, metavar="DIR", help="photographs: the name of a scene and a number")
    add("--cameras", type=Path, required=True, help="`name fx fy cx cy R(9) C(3)` in each line")
    add("--only", action="append", metavar="SCENE", help="this scene alone; may be repeated")
    add("--every", type=int, nargs="+", default=[1], metavar="N", help="each N-th photograph")
    add("--width", type=int, default=1024, help="of the reduced photographs, pixels")
    add("--ways", nargs="+", default=USUAL, choices=list(WAYS), help="what is compared")
    add("--slot", type=Path, metavar="FILE", help="of `python -m superglue_sift.onnx --for colmap`")
    add("--seeds", type=int, default=1, metavar="N", help="of the mapper, 0 to N - 1")
    add("--work", type=Path, default=Path("scenes"), help="folder of databases and models")
    options = parser.parse_args(argv)
    if options.width < 64 or min(options.every) < 1 or options.seeds < 1:
        raise RequestError("--width must be 64 or more, --every and --seeds 1 or more")
    if "slot" in options.ways and not options.slot:
        raise RequestError("--ways slot: name the file, --slot superglue-colmap.onnx")
    return options


def write_scenes(options: argparse.Namespace) -> Iterator[Scene]:
    """The scenes asked for, their photographs written below --work. Raises RequestError."""
    cameras = scene_errors.read_cameras(options.cameras)
    found = scene_errors.scenes_of([name for name in cameras if (options.images / name).is_file()])
    chosen = options.only or list(found)
    if not chosen or not set(chosen) <= set(found):
        raise RequestError(f"{options.images}: no photographs of {options.only or options.cameras}")
    for name, every in itertools.product(chosen, options.every):
        title = name if every == 1 else f"{name} 1/{every}"
        folder = options.work / f"{name}-{every}-{options.width}" / "photos"
        files = found[name][::every]
        scales = [reduce(options.images / file, folder / file, options.width) for file in files]
        yield Scene(title, folder, scales[0], {file: cameras[file] for file in files})


def reduce(source: Path, target: Path, width: int) -> float:
    """Write a photograph in gray, reduced to `width`; returns the scale."""
    image = read_gray(source)
    scale = min(1.0, width / image.shape[1])
    size = (round(image.shape[1] * scale), round(image.shape[0] * scale))
    small = cv2.resize(image, size, interpolation=cv2.INTER_AREA) if scale < 1 else image
    target.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(target), small, [cv2.IMWRITE_JPEG_QUALITY, 95])
    return scale


def match(scene: Scene, way: str, folder: Path, slot: Optional[Path]) -> Path:
    """Build a database: ours with the users' command, COLMAP's with its defaults."""
    database = folder / "database.db"
    if way == "ours":
        run_ours(str(scene.folder), "--out-dir", str(folder / "found"), "--colmap", str(database))
        return database
    import pycolmap

    extraction = pycolmap.FeatureExtractionOptions()
    extraction.sift.max_num_features = WAYS[way]
    device = pycolmap.Device.cpu
    pycolmap.extract_features(database, scene.folder, extraction_options=extraction, device=device)
    if way == "stored":
        run_ours("--colmap", str(database))
    elif way == "slot" and slot:
        colmap_slot.match_database(database, slot)
    else:
        pycolmap.match_exhaustive(database, device=device)
    return database


def run_ours(*words: str) -> None:
    """Run `superglue-match`. Raises RequestError with the last line of what it says."""
    command = [sys.executable, "-m", "superglue_sift", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RequestError(f"superglue-match: {done.stderr.strip().splitlines()[-1:]}")


def map_scene(database: Path, scene: Scene, folder: Path, seed: int) -> Dict[str, float]:
    """Metrics of the largest model and the seconds of mapping; 0 registered without a model."""
    import pycolmap

    pycolmap.set_random_seed(seed)
    (folder / f"model-{seed}").mkdir()
    started = time.perf_counter()
    models = pycolmap.incremental_mapping(database, scene.folder, folder / f"model-{seed}")
    found: Dict[str, float] = {"registered": 0, "mapping": time.perf_counter() - started}
    model = max(models.values(), key=lambda model: model.num_reg_images(), default=None)
    if model is not None:
        found.update(registered=model.num_reg_images(), points=model.num_points3D())
        found.update(
            track=model.compute_mean_track_length(), px=model.compute_mean_reprojection_error()
        )
        found.update(scene_errors.model_errors(model, scene.cameras))
    return found


def count_pairs(database: Path, scene: Scene) -> Tuple[int, int]:
    """Numbers of verified pairs of a database and of the false ones among them."""
    import pycolmap

    verified = false = 0
    with pycolmap.Database.open(str(database)) as content:
        images = {image.image_id: image.name for image in content.read_all_images()}
        points = {key: content.read_keypoints(key)[:, :2].astype(float) - 0.5 for key in images}
        for pair, found in zip(*content.read_two_view_geometries()):
            matches = found.inlier_matches
            if not len(matches):
                continue
            keys = pycolmap.pair_id_to_image_pair(pair)
            cameras = [scene.cameras[images[key]] for key in keys]
            F = scene_errors.true_fundamental(*cameras, scene.scale)
            both = [points[key][matches[:, side]] for side, key in enumerate(keys)]
            verified += 1
            false += bool((geometry.epipolar_distances(F, *both) <= RIGHT_PX).mean() < 0.5)
    return verified, false


def measure(scene: Scene, way: str, options: argparse.Namespace) -> Dict[str, Any]:
    """The row of one scene matched in one way."""
    folder = scene.folder.parent / way
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    started = time.perf_counter()
    used = sum(os.times()[:4])  # of this process and of the children it waited for
    database = match(scene, way, folder, options.slot)
    row: Dict[str, Any] = {
        "scene": scene.name,
        "way": way,
        "of": len(scene.cameras),
        "matching": time.perf_counter() - started,
        "cpu": sum(os.times()[:4]) - used,
    }
    models = [map_scene(database, scene, folder, seed) for seed in range(options.seeds)]
    for name in set().union(*models):
        row[name] = float(np.mean([each[name] for each in models if name in each]))
    row["registered"] = min(each["registered"] for each in models)
    centres = [each["centre"] for each in models if "centre" in each]
    if len(centres) > 1:
        row["centre_range"] = [min(centres), max(centres)]
    row["pairs"], row["false"] = count_pairs(database, scene)
    return row


def show(row: Dict[str, Any]) -> str:
    """A line of the table."""
    shown = {**row, "registered": f"{row['registered']}/{row['of']}"}
    cells = [format(shown.get(key, float("nan")), how) for key, how in COLUMNS.items()]
    spread = "centre {:.4f} to {:.4f}".format(*row["centre_range"]) if "centre_range" in row else ""
    return " ".join([*cells, spread]).rstrip()


def main(argv: Optional[Sequence[str]] = None) -> int:
    options = parse(argv)
    try:
        import pycolmap
    except ImportError:
        raise RequestError(
            "mapping needs one more package: pip install 'superglue-sift[colmap]'"
        ) from None
    pycolmap.logging.minloglevel = 2  # errors alone
    print(" ".join(f"{key:{how.split('.')[0]}}" for key, how in COLUMNS.items()), flush=True)
    rows: List[Dict[str, Any]] = []
    for scene, way in itertools.product(write_scenes(options), options.ways):
        rows.append(measure(scene, way, options))
        print(show(rows[-1]), flush=True)
    write_atomic(options.work / "rows.json", json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
