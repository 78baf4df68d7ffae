"""Compare a view reduced in keypoint space (`train.zoom`) with the same view reduced in pixels.

    python -m benchmarks.dev.smaller /path/to/photographs --count 50

Each photograph is resized to a height of 384 px and reduced by area averaging; SIFT then runs on it, extended by its
mirror images so that it has surroundings. A keypoint is found again if another lies within 1.5 px and its scale differs
by less than 1.5 times. Printed for each factor: the number of keypoints of either way; the fraction of moved keypoints
that are found in the pixels, and of keypoints in the pixels that are among the moved; and their median differences in
position (px of the smaller view), scale (octaves) and descriptor (distance of unit vectors).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Dict, List, Optional, Sequence

import cv2
import numpy as np

from pipeline import errors
from pipeline.fetch.containers import open_container
from superglue_sift import sift
from superglue_sift.descriptors import root_sift_of
from superglue_sift.geometry import resizing, transform
from superglue_sift.images import read_gray
from superglue_sift.progress import Progress

FACTORS = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
HEIGHT, MAX_KEYPOINTS = 384, 1024  # of a view: px, and the strongest keypoints that a store keeps
NEAR_PX, NEAR_SCALE = 1.5, 1.5
MARGIN = 4.0  # px from the edge of the smaller view that are ignored: a detector may see the mirror image differently
ALL = 1 << 14  # keypoints: more than a view has


def compare(view: np.ndarray, keypoints: np.ndarray, factor: float) -> Dict[str, np.ndarray]:
    """Of a view (H, W) uint8 and its keypoints: `moved` and `real` (bool: found the other way), and how much these
    differ, `position`, `scale`, `descriptor`."""
    height, width = view.shape
    size = round(width / factor), round(height / factor)
    moved = keypoints.copy()
    H = resizing((width, height), size)
    moved["x"], moved["y"] = transform(sift.positions(moved).astype(np.float64), H).T
    moved["scale"] *= np.sqrt(H[0, 0] * H[1, 1])
    moved = moved[moved["scale"] >= sift.MIN_SCALE]
    left, top = (width - size[0]) // 2, (height - size[1]) // 2
    small = cv2.resize(view, size, interpolation=cv2.INTER_AREA)
    around = (top, height - size[1] - top), (left, width - size[0] - left)
    small = np.pad(small, around, mode="reflect")
    real = sift.extract(small, ALL)
    real["x"] -= left
    real["y"] -= top
    moved, real = (_inside(records, size) for records in (moved, real))
    if not (len(moved) and len(real)):
        return {"moved": np.zeros(len(moved), bool), "real": np.zeros(len(real), bool)}
    away = np.linalg.norm(sift.positions(moved)[:, None] - sift.positions(real)[None], axis=-1)
    octaves = np.abs(np.log2(moved["scale"][:, None] / real["scale"][None]))
    cost = np.where(octaves < np.log2(NEAR_SCALE), away, np.inf)
    nearest, found = cost.argmin(1), cost.min(1) < NEAR_PX
    rows, columns = np.flatnonzero(found), nearest[found]
    first = [root_sift_of(records["descriptor"]) for records in (moved[rows], real[columns])]
    second = root_sift_of(real["second_descriptor"][columns])  # zero, so far away, without a second orientation
    apart = np.minimum(*(np.linalg.norm(first[0] - other, axis=1) for other in (first[1], second)))
    differences = {"position": cost[rows, columns], "scale": octaves[rows, columns], "descriptor": apart}
    return {"moved": found, "real": cost.min(0) < NEAR_PX, **differences}


def _inside(records: np.ndarray, size: Sequence[int]) -> np.ndarray:
    inside = [(records[n] >= MARGIN) & (records[n] <= side - 1 - MARGIN) for n, side in zip("xy", size)]
    return records[inside[0] & inside[1]]


def line(factor: float, found: List[Dict[str, np.ndarray]]) -> str:
    """The printed line of a factor, over all photographs."""
    joined = {name: np.concatenate([one.get(name, np.zeros(0)) for one in found]) for name in found[0]}
    counts = [len(joined[name]) / len(found) for name in ("moved", "real")]
    shares = [100 * joined[name].mean() for name in ("moved", "real")]
    medians = [np.median(joined[name]) for name in ("position", "scale", "descriptor")]
    cells = [f"{counts[0]:>9.0f}{counts[1]:>9.0f}", *(f"{share:>11.1f}" for share in shares)]
    return f"{factor:>6g}" + "".join(cells) + "".join(f"{value:>11.2f}" for value in medians)


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dev.smaller", description=str(__doc__).splitlines()[0])
    parser.add_argument("photographs", type=Path, help="a folder, a zip or a list")
    parser.add_argument("--count", type=int, default=50)
    args = parser.parse_args(argv)
    container = open_container(args.photographs)
    found: Dict[float, List[Dict[str, np.ndarray]]] = {factor: [] for factor in FACTORS}
    names = container.names[: args.count]
    for name in Progress(names, desc="made smaller", unit="photograph", total=len(names)):
        gray = read_gray(args.photographs / name)
        view = cv2.resize(gray, (round(gray.shape[1] * HEIGHT / gray.shape[0]), HEIGHT), interpolation=cv2.INTER_AREA)
        keypoints = sift.extract(view, MAX_KEYPOINTS)
        for factor in FACTORS:
            found[factor].append(compare(view, keypoints, factor))
    print(f"{'':>6}{'moved':>9}{'real':>9}{'moved %':>11}{'real %':>11}{'px':>11}{'octaves':>11}{'descriptor':>11}")
    print("\n".join(line(factor, found[factor]) for factor in FACTORS))
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
