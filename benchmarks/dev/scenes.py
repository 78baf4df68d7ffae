"""Models of places with known cameras, from our matches and from COLMAP's own: `python -m
benchmarks.dev.scenes`.

  python -m benchmarks.dev.scenes /data/strecha --cameras /data/strecha/cameras_gt.txt
  python -m benchmarks.dev.scenes DIR --cameras FILE --only entry-P10 --every 3 --ways ours
  python -m benchmarks.dev.scenes DIR --cameras FILE --options "--accept 15" --name accept-15

Three ways to build a database, all mapped by pycolmap: `ours`, the command `superglue-match
--colmap`; `colmap`, its own SIFT and exhaustive matcher; `held`, the same limited to 1,024
features. Photographs are first reduced to --width.
Columns: photographs registered in the largest model; its points, their mean track length and
reprojection error in pixels; mean error of camera centres (in the units of FILE, and in percent of
the largest distance between two cameras) and of rotations (degrees) after a similarity; verified
pairs, and how many of them are false: fewer than half of the matches lie within 4 px of the true
epipolar line; wall and processor seconds of extraction and matching, and seconds of mapping. With
--seeds N each database is mapped N times: registered is the minimum, the rest are means, and the
range of the centres follows the row. COLMAP's databases in --work are not computed again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import cv2
import numpy as np

from benchmarks.dev import scene_errors
from benchmarks.dev.scene_errors import Camera
from pipeline import errors
from pipeline.errors import RequestError
from pipeline.files import write_atomic

WAYS = ("ours", "colmap", "held")
HELD = 1024  # COLMAP's features in `held`: as many as the network matches
HEADS = (
    "scene",
    "way",
    "registered",
    "points",
    "track",
    "px",
    "centre",
    "%",
    "rotation",
    "pairs",
    "false",
    "matching s",
    "cpu s",
    "mapping s",
)


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
        "python -m benchmarks.dev.scenes", description=title, epilog=more
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "images",
        type=Path,
        metavar="DIR",
        help="photographs; those of one scene share what is before their number",
    )
    add(
        "--cameras",
        type=Path,
        required=True,
        metavar="FILE",
        help="`name fx fy cx cy R(9) C(3)` in each line",
    )
    add("--only", action="append", metavar="SCENE", help="this scene alone; may be repeated")
    add(
        "--every",
        type=int,
        nargs="+",
        default=[1],
        metavar="N",
        help="each N-th photograph (default 1)",
    )
    add(
        "--width",
        type=int,
        default=1024,
        help="photographs are reduced to this width in pixels (default 1024)",
    )
    add(
        "--ways", nargs="+", default=list(WAYS), choices=WAYS, help="what is compared (default all)"
    )
    add(
        "--seeds",
        type=int,
        default=1,
        metavar="N",
        help="of the mapper's random numbers, 0 to N - 1 (default 1)",
    )
    add("--options", default="", metavar="WORDS", help="more words for superglue-match")
    add(
        "--name",
        default="ours",
        help="what our way is called in the table, where --options change it",
    )
    add(
        "--work",
        type=Path,
        default=Path("scenes"),
        metavar="DIR",
        help="databases and models (default scenes)",
    )
    options = parser.parse_args(argv)
    if options.width < 64 or min(options.every) < 1 or options.seeds < 1:
        raise RequestError("--width must be 64 or more, --every and --seeds 1 or more")
    return options


def scenes(options: argparse.Namespace) -> List[Scene]:
    """The scenes asked for, their photographs written below --work. Raises RequestError."""
    cameras = scene_errors.read_cameras(options.cameras)
    found = scene_errors.scenes_of([name for name in cameras if (options.images / name).is_file()])
    unknown = set(options.only or ()) - set(found)
    if unknown or not found:
        raise RequestError(
            f"{options.images}: no photographs of {sorted(unknown) or options.cameras}"
        )
    chosen = []
    for (name, files), every in itertools.product(found.items(), options.every):
        if options.only and name not in options.only:
            continue
        title = name if every == 1 else f"{name} 1/{every}"
        folder = options.work / f"{name}-{every}-{options.width}" / "photos"
        shrink = [
            reduced(options.images / file, folder / file, options.width) for file in files[::every]
        ]
        chosen.append(
            Scene(title, folder, shrink[0], {file: cameras[file] for file in files[::every]})
        )
    return chosen


def reduced(source: Path, target: Path, width: int) -> float:
    """Write a photograph in gray, reduced to `width`, unless it is there; returns the scale."""
    image = cv2.imread(str(source), cv2.IMREAD_GRAYSCALE)
    if image is None:
        raise RequestError(f"{source}: cannot be read")
    scale = min(1.0, width / image.shape[1])
    if not target.is_file():
        size = (round(image.shape[1] * scale), round(image.shape[0] * scale))
        small = cv2.resize(image, size, interpolation=cv2.INTER_AREA) if scale < 1 else image
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(
            target, cv2.imencode(".jpg", small, [cv2.IMWRITE_JPEG_QUALITY, 95])[1].tobytes()
        )
    return scale


def ours(scene: Scene, folder: Path, words: Sequence[str]) -> Path:
    """Build a database with the users' command."""
    database = folder / "database.db"
    command = [
        sys.executable,
        "-m",
        "superglue_sift.apps.cli",
        str(scene.folder),
        "--out-dir",
        str(folder / "found"),
    ]
    done = subprocess.run(
        [*command, "--colmap", str(database), *words], capture_output=True, text=True
    )
    if done.returncode:
        raise RequestError(f"superglue-match: {done.stderr.strip().splitlines()[-1:]}")
    return database


def colmap(scene: Scene, folder: Path, most: Optional[int]) -> Path:
    """Build a database with COLMAP's own SIFT, at most `most` features, and its exhaustive
    matcher.
    """
    import pycolmap

    database = folder / "database.db"
    extraction = pycolmap.FeatureExtractionOptions()
    if most is not None:
        extraction.sift.max_num_features = most
    on = {"device": pycolmap.Device.cpu}
    pycolmap.extract_features(database, scene.folder, extraction_options=extraction, **on)
    pycolmap.match_exhaustive(database, **on)
    return database


def mapped(database: Path, scene: Scene, folder: Path, seed: int) -> Dict[str, float]:
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


def of_seeds(found: List[Dict[str, float]]) -> Dict[str, Any]:
    """One row for all models of a database: the fewest registered, the range of the centres, means
    of the rest.
    """
    row: Dict[str, Any] = {"registered": min(each["registered"] for each in found)}
    for name in sorted({name for each in found for name in each} - {"registered"}):
        row[name] = float(np.mean([each[name] for each in found if name in each]))
    centres = [each["centre"] for each in found if "centre" in each]
    if len(found) > 1 and centres:
        row["centre_range"] = [min(centres), max(centres)]
    return row


def processor() -> float:
    """Processor seconds of this process and of the children it waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def pairs_of(database: Path, scene: Scene) -> Tuple[int, int]:
    """Numbers of verified pairs of a database and of the false ones among them."""
    import pycolmap

    verified = false = 0
    with pycolmap.Database.open(str(database)) as content:
        images = {image.image_id: image.name for image in content.read_all_images()}
        points = {key: content.read_keypoints(key)[:, :2].astype(float) - 0.5 for key in images}
        for pair, geometry in zip(*content.read_two_view_geometries()):
            matches = geometry.inlier_matches
            if not len(matches):
                continue
            first, second = pycolmap.pair_id_to_image_pair(pair)
            F = scene_errors.true_fundamental(
                *(scene.cameras[images[key]] for key in (first, second)), scene.scale
            )
            verified += 1
            right = scene_errors.right_fraction(
                points[first][matches[:, 0]], points[second][matches[:, 1]], F
            )
            false += right < 0.5
    return verified, false


def measure(scene: Scene, way: str, options: argparse.Namespace) -> Dict[str, Any]:
    """The row of one scene matched in one way."""
    folder = scene.folder.parent / (options.name if way == "ours" else way)
    kept = folder / "row.json"
    before = json.loads(kept.read_text()) if way != "ours" and kept.is_file() else {}
    if before.get("seeds") == options.seeds:
        return before
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    started = time.perf_counter()
    used = processor()
    if way == "ours":
        database = ours(scene, folder, shlex.split(options.options))
    else:
        database = colmap(scene, folder, HELD if way == "held" else None)
    row: Dict[str, Any] = {"matching": time.perf_counter() - started, "cpu": processor() - used}
    row.update(scene=scene.name, way=folder.name, of=len(scene.cameras), seeds=options.seeds)
    row.update(of_seeds([mapped(database, scene, folder, seed) for seed in range(options.seeds)]))
    row["pairs"], row["false"] = pairs_of(database, scene)
    write_atomic(kept, json.dumps(row, indent=1) + "\n")
    return row


def cells(row: Dict[str, Any]) -> List[str]:
    """A row of the table."""
    numbers = (
        ("points", ".0f"),
        ("track", ".2f"),
        ("px", ".3f"),
        ("centre", ".4f"),
        ("centre_percent", ".3f"),
    )
    shown = [
        format(row[key], how) if key in row else "-" for key, how in (*numbers, ("rotation", ".3f"))
    ]
    seconds = [f"{row[key]:.0f}" if key in row else "-" for key in ("matching", "cpu", "mapping")]
    registered = f"{row['registered']}/{row['of']}"
    spread = "centre {:.4f} to {:.4f}".format(*row["centre_range"]) if "centre_range" in row else ""
    counted = [str(row["pairs"]), str(row["false"])]
    return [
        row["scene"],
        row["way"],
        registered,
        *shown,
        *counted,
        *seconds,
        *filter(None, [spread]),
    ]


def line(words: Sequence[str], width: int) -> str:
    """Words in columns; the first is as wide as the longest name of a scene."""
    widths = (width, 8, 10, 6, 5, 5, 7, 6, 8, 5, 5, 10, 5, 9, 0)
    return "  ".join(
        word.rjust(w) if at > 1 else word.ljust(w)
        for at, (word, w) in enumerate(zip(words, widths))
    )


def main(argv: Optional[Sequence[str]] = None) -> int:
    options = parse(argv)
    try:
        import pycolmap
    except ImportError:
        raise RequestError(
            "mapping needs one more package: pip install 'superglue-sift[colmap]'"
        ) from None
    pycolmap.logging.minloglevel = 2  # errors alone
    chosen = scenes(options)
    width = max(len(scene.name) for scene in chosen)
    print(f"photographs at most {options.width} px wide\n{line(HEADS, width)}", flush=True)
    rows = []
    for scene, way in itertools.product(chosen, options.ways):
        rows.append(measure(scene, way, options))
        print(line(cells(rows[-1]), width), flush=True)
    write_atomic(options.work / "rows.json", json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
