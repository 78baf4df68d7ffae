"""Match two images with a trained model: `superglue-match A.jpg B.jpg --out matches.png --json matches.json`.

Prints how many keypoints and matches there are, and how many of the matches one homography and one fundamental
matrix explain. Keypoints are pixels of the images as stored (EXIF orientation is ignored).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Dict, Optional, Sequence

import numpy as np

from superglue_sift import drawing, errors, geometry
from superglue_sift.errors import RequestError
from superglue_sift.geometry import Fit
from superglue_sift.images import read_color
from superglue_sift.matcher import Matcher, MatchResult
from superglue_sift.weights import shipped_weights

INLIER_PX = 3.0


def parse(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="superglue-match", description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("image0", type=Path)
    add("image1", type=Path)
    add("--out", type=Path, help="picture of the matches (png, jpg or webp)")
    add("--json", type=Path, help="keypoints and matches")
    add("--model", type=Path, help="model file (default: the weights that ship with the library)")
    add("--max-keypoints", type=int, default=1024, help="strongest keypoints of each image (default 1024)")
    add("--threshold", type=float, help="least probability of a match (default: the model's own, else 0.2)")
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
    if args.threshold is not None and not 0.0 <= args.threshold <= 1.0:
        raise RequestError(f"--threshold {args.threshold}: must be between 0 and 1")
    if args.resize < 0:
        raise RequestError(f"--resize {args.resize}: must be 0 (never) or a side in pixels")
    if args.out and args.out.suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
        raise RequestError(f"--out {args.out}: must end in .png, .jpg or .webp")
    return args


def fits(found: MatchResult) -> Dict[str, Fit]:
    """By name, the homography and the fundamental matrix that most matches agree on."""
    points = found.points0, found.points1
    return {
        "homography": geometry.homography_with_inliers(*points, INLIER_PX),
        "fundamental": geometry.fundamental_with_inliers(*points, INLIER_PX),
    }


def to_json(args: argparse.Namespace, found: MatchResult, fitted: Dict[str, Fit]) -> dict:
    """Plain values under the names SuperGlue's users know; `matches` holds [index0, index1, score]."""
    matches0, scores0 = np.full(len(found.keypoints0), -1), np.zeros(len(found.keypoints0))
    index0, index1 = found.matches.T
    matches0[index0], scores0[index0] = index1, found.scores
    H_0to1 = fitted["homography"].model
    return {
        "image0": str(args.image0),
        "image1": str(args.image1),
        "image_size0": list(found.size0),
        "image_size1": list(found.size1),
        "keypoints0": found.keypoints0.astype(float).round(3).tolist(),
        "keypoints1": found.keypoints1.astype(float).round(3).tolist(),
        "matches0": matches0.tolist(),
        "matching_scores0": scores0.round(6).tolist(),
        "matches": [
            [int(i), int(j), round(float(score), 6)] for (i, j), score in zip(found.matches, found.scores)
        ],
        "inliers": {name: int(fit.inliers.sum()) for name, fit in fitted.items()},
        "H_0to1": None if H_0to1 is None else H_0to1.tolist(),
        "model": str(args.model or shipped_weights()),
    }


def draw(args: argparse.Namespace, found: MatchResult, fitted: Dict[str, Fit]) -> None:
    """Write the picture: green the matches that the better of both fits explains, red the others."""
    name = max(fitted, key=lambda key: int(fitted[key].inliers.sum()))
    inliers = fitted[name].inliers
    heading = f"{len(found.matches)} matches; green: {int(inliers.sum())} that fit one {name}"
    panel = drawing.Panel(heading, found.points0, found.points1, inliers)
    drawing.write(args.out, drawing.draw(read_color(args.image0), read_color(args.image1), [panel]))


def write_results(args: argparse.Namespace, found: MatchResult, fitted: Dict[str, Fit]) -> None:
    """The files asked for. Raises RequestError when one cannot be written."""
    try:
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(to_json(args, found, fitted)) + "\n", encoding="utf-8")
            print(f"written {args.json}")
        if args.out:
            draw(args, found, fitted)
            print(f"written {args.out}")
    except OSError as error:
        raise RequestError(f"{error.filename or args.out}: cannot be written: {error.strerror}") from error


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Entry of the command line."""
    args = parse(argv)
    matcher = Matcher.load(
        args.model,
        args.device,
        max_keypoints=args.max_keypoints,
        resize=args.resize,
        threshold=args.threshold,
        precision=args.precision,
    )
    started = time.perf_counter()
    sides = matcher.extract_all([args.image0, args.image1])
    extracted = time.perf_counter()
    found = matcher.match(*sides)
    matched = time.perf_counter()
    fitted = fits(found)
    print(f"keypoints {len(found.keypoints0)} and {len(found.keypoints1)}, matches {len(found.matches)}")
    print(", ".join(f"{name} inliers {int(fit.inliers.sum())}" for name, fit in fitted.items()))
    print(f"SIFT {extracted - started:.2f} s, matching {matched - extracted:.2f} s")
    write_results(args, found, fitted)
    return 0


def command() -> int:
    """The entry point `superglue-match`."""
    return errors.exit_code(main)


if __name__ == "__main__":
    raise SystemExit(command())
