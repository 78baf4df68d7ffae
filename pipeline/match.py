"""Match two images with a trained model.

    python -m pipeline.match A.jpg B.jpg --out matches.png --json matches.json

Prints how many keypoints and matches there are, and how many of the matches one homography and one fundamental
matrix explain. Keypoints are pixels of the images as stored (EXIF orientation is ignored).
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional, Tuple

import cv2
import numpy as np

from pipeline import errors
from pipeline.errors import RequestError
from pipeline.evaluation import matchers, scoring
from pipeline.evaluation.matchers import PairMatches
from pipeline.evaluation.pairs import Pair, image_size
from pipeline.features.tuning import tune_process
from superglue_sift import drawing, geometry, sift
from superglue_sift.images import decode_color, read_gray
from superglue_sift.inference import folded
from superglue_sift.weights import choose_device, load_model

INLIER_PX = 3.0
LEAST_FUNDAMENTAL = 8  # matches that a fundamental matrix needs


@dataclass(frozen=True)
class Geometry:
    """What a robust fit says of K matches. model: (3, 3) or None; inliers: (K,) bool."""

    model: Optional[np.ndarray]
    inliers: np.ndarray


def parse(argv: Optional[List[str]]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.match", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("image0", type=Path)
    add("image1", type=Path)
    add("--out", type=Path, help="picture of the matches (png, jpg or webp)")
    add("--json", type=Path, help="keypoints and matches")
    add("--model", type=Path, default=Path("models/superglue.safetensors"))
    add("--max-keypoints", type=int, default=1024, help="strongest keypoints of each image (default 1024)")
    add("--threshold", type=float, default=0.2, help="smallest probability of a match (default 0.2)")
    add("--resize", type=int, default=1024, help="longer side is reduced to this (default 1024; 0: never)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add(
        "--precision",
        default="float32",
        choices=("float32", "bfloat16"),
        help="of the network's layers; bfloat16 is faster on GPUs and on CPUs with AMX",
    )
    args = parser.parse_args(argv)
    if args.max_keypoints < 1:
        raise RequestError(f"--max-keypoints {args.max_keypoints}: must be 1 or more")
    if not 0.0 <= args.threshold <= 1.0:
        raise RequestError(f"--threshold {args.threshold}: must be between 0 and 1")
    if args.resize < 0:
        raise RequestError(f"--resize {args.resize}: must be 0 (never) or a side in pixels")
    if args.out and args.out.suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
        raise RequestError(f"--out {args.out}: must end in .png, .jpg or .webp")
    return args


def keypoints_of(path: Path, max_keypoints: int, resize: int) -> Tuple[np.ndarray, Tuple[int, int]]:
    """KEYPOINT records in pixels of the stored image, and its (width, height).

    Detection runs on the image reduced to a longer side of `resize` pixels; 0 or a smaller image: as it is.
    Raises RequestError for an image that cannot be read.
    """
    image = read_gray(path)
    size = image_size(image)
    shrink = min(1.0, resize / max(size)) if resize else 1.0
    if shrink < 1.0:
        small = tuple(max(1, round(side * shrink)) for side in size)
        image = cv2.resize(image, small, interpolation=cv2.INTER_AREA)
    records = sift.extract(image, max_keypoints)
    for name, side, before in zip(("x", "y"), image_size(image), size):
        records[name] = (records[name] + 0.5) * (before / side) - 0.5
    records["scale"] /= shrink
    return records, size


def fit(points0: np.ndarray, points1: np.ndarray) -> Dict[str, Geometry]:
    """RANSAC homography and fundamental matrix of matched points, (K, 2) pixels each."""
    H = geometry.fit_ransac(points0, points1, INLIER_PX)
    fits = np.zeros(len(points0), bool)
    if H is not None:
        fits = np.linalg.norm(geometry.transform(points0, H) - points1, axis=1) <= INLIER_PX
    F, mask = None, None
    if len(points0) >= LEAST_FUNDAMENTAL:
        cv2.setRNGSeed(0)
        F, mask = cv2.findFundamentalMat(points0, points1, cv2.FM_RANSAC, INLIER_PX, 0.999, 3000)
    lies = np.zeros(len(points0), bool) if F is None else mask.ravel().astype(bool)
    return {"homography": Geometry(H, fits), "fundamental": Geometry(F, lies)}


def to_json(args: argparse.Namespace, pair: Pair, answer: PairMatches, geometry: Dict[str, Geometry]) -> dict:
    """Plain values under the names SuperGlue's users know; `matches` holds [index0, index1, score]."""
    index0 = np.flatnonzero(answer.matches0 >= 0)
    H_0to1 = geometry["homography"].model
    return {
        "image0": str(args.image0),
        "image1": str(args.image1),
        "image_size0": list(pair.size0),
        "image_size1": list(pair.size1),
        "keypoints0": scoring.points_of(pair.keypoints0).round(3).tolist(),
        "keypoints1": scoring.points_of(pair.keypoints1).round(3).tolist(),
        "matches0": answer.matches0.tolist(),
        "matching_scores0": [round(float(score), 6) for score in answer.scores0],
        "matches": [[int(i), int(answer.matches0[i]), round(float(answer.scores0[i]), 6)] for i in index0],
        "inliers": {name: int(found.inliers.sum()) for name, found in geometry.items()},
        "H_0to1": None if H_0to1 is None else H_0to1.tolist(),
        "model": str(args.model),
    }


def draw(args: argparse.Namespace, pair: Pair, answer: PairMatches, geometry: Dict[str, Geometry]) -> None:
    """Write the picture: green the matches that the better of both geometries explains, red the others."""
    name = max(geometry, key=lambda key: int(geometry[key].inliers.sum()))
    inliers = geometry[name].inliers
    points0, points1, _ = scoring.matched_points(pair, answer)
    heading = f"{len(points0)} matches; green: {int(inliers.sum())} that fit one {name}"
    images = [decode_color(path.read_bytes(), path.name) for path in (args.image0, args.image1)]
    drawing.write(args.out, drawing.draw(*images, [drawing.Panel(heading, points0, points1, inliers)]))


def write_results(
    args: argparse.Namespace, pair: Pair, answer: PairMatches, geometry: Dict[str, Geometry]
) -> None:
    """The files asked for. Raises RequestError when one cannot be written."""
    try:
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(to_json(args, pair, answer, geometry)) + "\n", encoding="utf-8")
            print(f"written {args.json}")
        if args.out:
            draw(args, pair, answer, geometry)
            print(f"written {args.out}")
    except OSError as error:
        raise RequestError(f"{error.filename or args.out}: cannot be written: {error.strerror}") from error


def main(argv: Optional[List[str]] = None) -> int:
    """Entry of the command line."""
    args = parse(argv)
    device = choose_device(args.device)
    model = folded(load_model(args.model, device)[0], args.precision)
    tune_process()
    started = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        extract = functools.partial(keypoints_of, max_keypoints=args.max_keypoints, resize=args.resize)
        sides = list(pool.map(extract, (args.image0, args.image1)))
    pair = Pair("pair", "pair", 0, 0, sides[0][0], sides[1][0], sides[0][1], sides[1][1], np.eye(3), {})
    extracted = time.perf_counter()
    _, answer = next(matchers.match_superglue(model, [[pair]], device))
    answer = answer.above(args.threshold)
    matched = time.perf_counter()
    points0, points1, _ = scoring.matched_points(pair, answer)
    geometry = fit(points0, points1)
    print(f"keypoints {len(pair.keypoints0)} and {len(pair.keypoints1)}, matches {len(points0)}")
    print(", ".join(f"{name} inliers {int(found.inliers.sum())}" for name, found in geometry.items()))
    print(f"SIFT {extracted - started:.2f} s, matching {matched - extracted:.2f} s")
    write_results(args, pair, answer, geometry)
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
