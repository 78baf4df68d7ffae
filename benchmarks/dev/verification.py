"""Learn the weights by which a scene accepts pairs (`superglue_sift.geometry.verification`).

    python -m benchmarks.dev.verification coco/val coco/train

Each of the first 16 photographs of the first folder is a place. The last 16 photographs of the
second folder are what else is seen there. The kinds are views of one plane (`plane`), and of a
court whose four walls have equal windows (`court`). In some courts the windows nearly touch, like a
wallpaper. Any two views of a court are a pair: they may show one wall or two. A pair is right if
most matches that agree with its geometry are right, and wrong otherwise.

Printed are the weights; and for each kind, how many right pairs are refused and how many wrong ones
are accepted, at several limits. First each place is judged by weights learned without it, then by
the weights of the module, which were learned from other pairs. Right and wrong pairs weigh the same
in total. Pairs that the first look skips, and those without a geometry, are always refused. They
teach nothing and are left out.

    python -m benchmarks.dev.verification --check /data/strecha /data/strecha/cameras_gt.txt

counts the same for the weights of the module, on all pairs of photographs with known cameras.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

import cv2
import numpy as np
import pandas as pd
from scipy.optimize import minimize
from scipy.special import expit

from benchmarks.command import make_parser
from benchmarks.dev import scenes
from pipeline import errors
from pipeline.keypoints.views import distort, generator, render, sample_view
from pipeline.params import Homography, Photometric
from superglue_sift import Matcher
from superglue_sift.features.features import Features
from superglue_sift.features.images import read_gray
from superglue_sift.geometry import verification
from superglue_sift.geometry.guided_matching import positions_of
from superglue_sift.geometry.two_view import compose, epipolar_distances, inverse, transform
from superglue_sift.progress import Progress

Random = np.random.Generator
Gray = np.ndarray  # a photograph (H, W) uint8
# A view: the image, and the homographies (3, 3) of all planes of the place to it
View = Tuple[Gray, List[np.ndarray]]
Errors = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (k,) px, of matches (k, 2) and (k, 2)
Pair = Tuple[Any, str, Tuple[Features, Features], Errors]  # with its place and its kind

PLACES = 16
VIEW = (640, 480)  # px, width and height
# Wider than in training: little overlap, strong tilt and zoom
WIDE = Homography(scale_min=0.25, perspective=0.3, rotation_deg=60, tilt_deg=70, max_upscale=4)
LIGHT = Photometric(brightness=0.2, contrast=0.3, gamma=0.2, blur=1.5, noise=0.03, jpeg=0.5)
LARGE = (1024, 768)  # of a view of a court
WALL = (960, 640)  # px, of a court
WINDOW = (70, 160)  # px, the smallest and the largest
VIEWS = 6  # of a court
PENALTY = 0.05  # of the squares of the weights, per deviation of the number that is weighed
LIMITS = (0.5, 0.7, 0.9, 0.95, 0.98)
EVIDENCE = ["agreement", "order", "support"]


# Made pairs


def plane(rng: Random, photo: Gray, _other: Gray) -> List[View]:
    """Three views of a photograph."""
    maps = [sample_view(rng, photo.shape[::-1], VIEW, WIDE) for _ in range(3)]
    return [(distort(render(photo, H, VIEW), rng, LIGHT), [H]) for H in maps]


def court(rng: Random, photo: Gray, other: Gray) -> List[View]:
    """Views from within a court, whose four walls have the same windows.

    Each wall is a quarter of the other photograph, with the middle of the first one many times on
    it.
    """
    quarters = [part for half in np.array_split(other, 2) for part in np.array_split(half, 2, 1)]
    window = rng.integers(*WINDOW)
    walls = [hang_windows(rng, photo, part, window) for part in quarters]
    side, height = WALL
    x, y = np.meshgrid(*map(np.arange, LARGE))
    views: List[View] = []
    for _ in range(VIEWS):
        focal = LARGE[0] * rng.uniform(0.7, 1.2)
        K = np.array([[focal, 0, LARGE[0] / 2], [0, focal, LARGE[1] / 2], [0, 0, 1]])
        # a pixel of a wall is the unit of length, and the third axis points down
        heading = rng.uniform(-math.pi, math.pi)
        ahead = np.array([math.cos(heading), math.sin(heading), 0])
        R = np.stack([[-ahead[1], ahead[0], 0], [0, 0, 1], ahead])
        eye = rng.uniform(-0.08, 0.08, 3) * side - rng.uniform(0.16, 0.38) * side * ahead
        image = np.full(LARGE[::-1], 190, np.uint8)
        planes: List[np.ndarray] = []
        for number, wall in enumerate(walls):
            along = np.roll([1, 0], number) * (1 - number // 2 * 2)
            start = [along[1] - along[0], -along[1] - along[0], -height / side] * np.array(side / 2)
            H = K @ R @ np.column_stack([[*along, 0], [0, 0, 1], start - eye])
            back = np.linalg.inv(H)
            in_front = back[2, 0] * x + back[2, 1] * y + back[2, 2] > 0
            shown = in_front & (cv2.warpPerspective(np.full_like(wall, 255), H, LARGE) > 127)
            image[shown] = cv2.warpPerspective(wall, H, LARGE)[shown]
            planes.append(H)
        views.append((distort(image, rng, LIGHT), planes))
    return views


def hang_windows(rng: Random, photo: Gray, back: Gray, size: int) -> Gray:
    """A wall of equal windows, in rows: the middle of one photograph, many times on another."""
    out = cv2.resize(back, WALL, interpolation=cv2.INTER_AREA)
    y, x = np.array(photo.shape) // 2 - 120
    middle = photo[y : y + 240, x : x + 240]
    window = cv2.resize(middle, (size, size), interpolation=cv2.INTER_AREA)
    right, down = (size * rng.uniform(1.0, 1.6, 2)).astype(int)
    for y in range(rng.integers(0, down - size + 1), WALL[1] - size, down):
        for x in range(rng.integers(0, right - size + 1), WALL[0] - size, right):
            light = rng.normal(0, 4, window.shape) + rng.uniform(-12, 12)
            out[y : y + size, x : x + size] = (window + light).clip(0, 255)
    return out


KINDS = (plane, court)


def away(planes: Sequence[np.ndarray], points0: np.ndarray, points1: np.ndarray) -> np.ndarray:
    """Distances (k,) of `points1` from where the nearest of the homographies maps `points0`."""
    return np.min([np.linalg.norm(transform(points0, H) - points1, axis=1) for H in planes], 0)


def made_pairs(matcher: Matcher, files: Sequence[Path], others: Sequence[Path]) -> Iterator[Pair]:
    """The pairs to learn from, of all places."""
    for place, paths in enumerate(zip(files, others)):
        for make in KINDS:
            rng = generator(0, f"{make.__name__} {paths[0].name}", 0)
            made = make(rng, *map(read_gray, paths))
            views = [(matcher.extract(image), maps) for image, maps in made]
            for (one, maps0), (other, maps1) in itertools.combinations(views, 2):
                planes = [compose(H1, inverse(H0)) for H0, H1 in zip(maps0, maps1)]
                yield place, make.__name__, (one, other), functools.partial(away, planes)


def real_pairs(matcher: Matcher, images: Path, cameras: Path) -> Iterator[Pair]:
    """All pairs of photographs with known cameras. Between two places no match is right."""
    asked = argparse.Namespace(images=images, cameras=cameras, only=None, every=1)
    views = [
        (name, camera, matcher.extract(scenes.photos_of(name) / file))
        for name, each in scenes.write_scenes(asked).items()
        for file, camera in each.items()
    ]
    for (place0, camera0, one), (place1, camera1, other) in itertools.combinations(views, 2):
        if place0 == place1:
            F = scenes.fundamental(camera0, camera1)
            yield place0, place0, (one, other), functools.partial(epipolar_distances, F)
        else:
            yield place0, "across", (one, other), lambda points0, _: np.full(len(points0), np.inf)


# Learning


def examine(matcher: Matcher, asked: Pair) -> Tuple[Any, ...]:
    """A row of `examine_all`. The evidence is zero for a pair without a geometry."""
    place, kind, pair, errors_of = asked
    nothing = place, kind, False, 0.0, 0.0, 0.0
    agreeing, kept = verification.first_look(pair, matcher.resize)
    if agreeing < verification.LIKELY:
        return nothing
    one, other = (view.select(index) for view, index in zip(pair, kept))
    _, network, mutual, _ = matcher.match_network([(one, other)])[0]
    points = verification.reduced_points((one, other), matcher.resize)
    F, measured = verification.verify_pair(network, mutual, points)
    if F is None:
        return nothing
    counted = network.above(verification.COUNTED)
    found = verification.add_matches_near_lines(F, counted, mutual, points)
    right = errors_of(*positions_of(points, found)) < scenes.RIGHT_PX
    return (place, kind, bool(len(right) and right.mean() > 0.5), *measured)


def examine_all(matcher: Matcher, pairs: Iterator[Pair]) -> pd.DataFrame:
    """A row for each pair with a geometry: its place and kind, whether most of its matches are
    right, and its evidence.
    """
    matcher.side_by_side()
    with ThreadPoolExecutor(matcher.workers) as pool:
        # one pair is made while others are measured
        shown = Progress(pairs, desc="pairs", unit="pairs")
        rows = pool.map(functools.partial(examine, matcher), shown)
        table = pd.DataFrame(rows, columns=["place", "kind", "right", *EVIDENCE])
    return table[table[EVIDENCE].any(axis=1)].reset_index(drop=True)


def learn(evidence: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Logistic regression of (n, k) on (n,) bool: k weights, at least 0, and the bias."""
    deviation = np.append(evidence.std(0) + 1e-9, 1.0)
    rows = np.column_stack([evidence, np.ones(len(evidence))]) / deviation
    signs = np.where(right, 1.0, -1.0)
    each = np.where(right, 0.5 / right.mean(), 0.5 / (1 - right.mean()))

    def loss(weights: np.ndarray) -> float:
        wrong = each @ np.logaddexp(0.0, -signs * (rows @ weights))
        return float(wrong + 0.5 * PENALTY * weights[:-1] @ weights[:-1])

    # more of any evidence never makes a pair less probable
    bounds = [(0, None)] * evidence.shape[1] + [(None, None)]
    return minimize(loss, np.zeros(len(bounds)), bounds=bounds).x / deviation


def count(pairs: pd.DataFrame, scores: np.ndarray) -> str:
    """The table of how many right pairs are refused, and wrong ones accepted, at each limit."""
    right = pairs.right.to_numpy(bool)
    counts = {"pairs": right | True, "right": right}
    for limit in LIMITS:
        counts[f"refused {limit}"] = right & (scores < limit)
        counts[f"false {limit}"] = ~right & (scores >= limit)
    kinds = pd.DataFrame(counts).groupby(pairs.kind, sort=False).sum()
    kinds.loc["all"] = kinds.sum()
    return kinds.to_string()


def report(pairs: pd.DataFrame) -> str:
    """What to print. pairs: of `examine_all`."""
    evidence = pairs[EVIDENCE].to_numpy(float)
    right = pairs.right.to_numpy(bool)
    *weights, bias = learn(evidence, right).round(1).tolist()
    scores = np.zeros(len(pairs))
    for place in pairs.place.unique():
        here = (pairs.place == place).to_numpy()
        learned = learn(evidence[~here], right[~here])
        scores[here] = expit(evidence[here] @ learned[:-1] + learned[-1])
    constants = f"WEIGHTS = np.array({weights})\nBIAS = {bias}"
    return "\n\n".join([constants, count(pairs, scores), count(pairs, shipped(evidence))])


def shipped(evidence: np.ndarray) -> np.ndarray:
    """Probabilities (n,) by the weights of the module."""
    return expit(evidence @ verification.WEIGHTS + verification.BIAS)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Make the pairs, learn, and print; or check the weights of the module."""
    parser = make_parser("dev.verification", __doc__)
    parser.add_argument("places", type=Path, help="folder of photographs")
    parser.add_argument("others", type=Path, help="folder of more photographs")
    parser.add_argument("--check", action="store_true", help="others is a file of cameras")
    options = parser.parse_args(argv)
    matcher = Matcher.load(device="cpu", scene=True)
    if options.check:
        pairs = examine_all(matcher, real_pairs(matcher, options.places, options.others))
        print(count(pairs, shipped(pairs[EVIDENCE].to_numpy(float))))
        return 0
    files = sorted(options.places.glob("*.jpg"))[:PLACES]
    others = sorted(options.others.glob("*.jpg"))[-PLACES:]
    print(report(examine_all(matcher, made_pairs(matcher, files, others))))
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
