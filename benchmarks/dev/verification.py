"""Learn the weights by which a scene accepts pairs (`superglue_sift.geometry.verification`).

    python -m benchmarks.dev.verification coco/val coco/train

A photograph of the first folder and one of the second make places of three kinds:

- `halves`: both halves of the first photograph
- `court`: a court whose four walls have equal windows
- `facade`: a long facade with equal windows

Behind the windows, the walls show the second photograph, often so faintly that hardly anything but
the windows is seen. Any two views of a place are a pair. Both may show the same half, wall or part
of the facade, or each may show another one. A pair is right if most matches that
agree with its geometry are right, and wrong otherwise.

The command prints the constants of the module, learned from nine places of each kind. For each
kind, it prints how many right pairs are refused and how many wrong pairs are accepted at several
limits. It counts first on these places, then on four others from which nothing was learned. Pairs
that the first look skips, and pairs without a geometry, are always refused. They are left out when
the weights are learned.

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

from benchmarks.dev import scenes
from pipeline import errors
from pipeline.keypoints.views import distort, make_generator, render, sample_view
from pipeline.params import Homography, Photometric
from superglue_sift import Matcher, scene
from superglue_sift.features.features import Features
from superglue_sift.features.images import read_gray
from superglue_sift.geometry import verification
from superglue_sift.geometry.two_view import (
    Size,
    compose,
    compute_epipolar_distances,
    inverse,
    transform,
)
from superglue_sift.progress import Progress

Random = np.random.Generator
Gray = np.ndarray  # a photograph (H, W) uint8
# A view: the image, and the homographies (3, 3) of all planes of the place to it
View = Tuple[Gray, List[np.ndarray]]
Errors = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (k,) px, of matches (k, 2) and (k, 2)
LabeledPair = Tuple[Any, str, Tuple[Features, Features], Errors]  # with its place and its kind

PLACES = 13  # number of photographs of the first folder that make places
LEARNED = 9  # number of places that teach the weights; the others test them
OTHERS = -24  # the second folder's photographs from here on
VIEW = (640, 480)  # px, width and height
# Wider than in training: little overlap, strong tilt and zoom
WIDE = Homography(scale_min=0.25, perspective=0.3, rotation_deg=60, tilt_deg=70, max_upscale=4)
LIGHT = Photometric(brightness=0.2, contrast=0.3, gamma=0.2, blur=1.5, noise=0.03, jpeg=0.5)
LARGE = (1024, 768)  # of a view of a court
COURT = (960, 640)  # px, one of its walls
FACADE = (2880, 640)  # px
COURT_VIEWS = 6
FACADE_VIEWS = 5
WINDOW = (70, 160)  # px, the smallest and the largest
PRIOR = 2 / 3  # part of the pairs with a geometry that are right in a collection
PENALTY = 0.05  # of the squares of the weights, per deviation of the number that is weighed
LIMITS = (0.5, 0.7, 0.9, 0.95, 0.98)
EVIDENCE = ["log_inlier_ratio", "support"]


# Made pairs


def make_halves(rng: Random, photo: Gray, _other: Gray) -> List[View]:
    """Take two views of each half of a photograph. Each half counts as a place of its own."""
    width = photo.shape[1] // 2
    views = []
    for left in (0, 0, width, width):
        half = photo[:, left : left + width]
        H = sample_view(rng, half.shape[::-1], VIEW, WIDE)
        to_half = np.array([[1, 0, -left], [0, 1, 0], [0, 0, 1.0]])
        views.append((distort(render(half, H, VIEW), rng, LIGHT), [H @ to_half]))
    return views


def make_court(rng: Random, photo: Gray, other: Gray) -> List[View]:
    """Take views within a court, whose four walls have the same windows.

    Behind the windows, each wall shows another quarter of the other photograph.
    """
    quarters = [part for half in np.array_split(other, 2) for part in np.array_split(half, 2, 1)]
    side, height = COURT
    frames = []
    for turn in range(4):
        x, y = np.roll([1, 0], turn) * (1 - turn // 2 * 2)
        start = [(y - x) * side / 2, (-x - y) * side / 2, -height / 2]
        frames.append(np.column_stack([[x, y, 0], [0, 0, 1], start]))
    walls = hang_windows(rng, photo, quarters, COURT)
    views = []
    for _ in range(COURT_VIEWS):
        heading = rng.uniform(-math.pi, math.pi)
        ahead = np.array([math.cos(heading), math.sin(heading), 0])
        eye = rng.uniform(-0.08, 0.08, 3) * side - rng.uniform(0.16, 0.38) * side * ahead
        views.append(take_view(rng, walls, frames, eye, ahead))
    return views


def make_facade(rng: Random, photo: Gray, other: Gray) -> List[View]:
    """Take views along a facade with equal windows. The other photograph is its background."""
    walls = hang_windows(rng, photo, [other], FACADE)
    frame = np.column_stack([[1, 0, 0], [0, 0, 1], [-FACADE[0] / 2, 0, -FACADE[1] / 2]])
    views = []
    for _ in range(FACADE_VIEWS):
        heading = rng.uniform(-0.6, 0.6)
        ahead = np.array([math.sin(heading), -math.cos(heading), 0])
        eye = np.array([rng.uniform(-0.4, 0.4) * FACADE[0], rng.uniform(500, 1000), 0])
        views.append(take_view(rng, walls, [frame], eye, ahead))
    return views


def hang_windows(rng: Random, photo: Gray, backs: Sequence[Gray], size: Size) -> List[Gray]:
    """Draw walls with rows of equal windows on faint backgrounds.

    A window is the middle of a photograph. The background shines through it, as a reflection does.

    Args:
        rng: decides the windows, the contrast and the noise.
        photo: the photograph of the windows.
        backs: the background of each wall.
        size: width and height of a wall in px.
    """
    window = rng.integers(*WINDOW)
    y, x = np.array(photo.shape) // 2 - 120
    middle = photo[y : y + 240, x : x + 240]
    middle = cv2.resize(middle, (window, window), interpolation=cv2.INTER_AREA).astype(float)
    contrast = 10 ** rng.uniform(-1, 0)
    right, down = (window * rng.uniform(1.0, 1.6, 2)).astype(int)
    walls = []
    for back in backs:
        wall = cv2.resize(back, size).astype(float)
        wall = wall.mean() + contrast * (wall - wall.mean())
        for y in range(rng.integers(0, down - window + 1), size[1] - window, down):
            for x in range(rng.integers(0, right - window + 1), size[0] - window, right):
                part = wall[y : y + window, x : x + window]
                part[:] = middle + rng.uniform(0, 0.5) * (part - part.mean()) + rng.uniform(-12, 12)
        walls.append((wall + rng.normal(0, 4, wall.shape)).clip(0, 255).astype(np.uint8))
    return walls


def take_view(
    rng: Random,
    walls: Sequence[Gray],
    frames: Sequence[np.ndarray],
    eye: np.ndarray,
    ahead: np.ndarray,
) -> View:
    """Take a view of walls.

    Args:
        rng: decides the focal length and the light.
        walls: images of the walls.
        frames: for each wall, a matrix (3, 3). Its columns are the direction of x, the direction of
            y, and the position of the first pixel. A pixel of a wall is the unit of length, and
            the third axis points down.
        eye, ahead: (3,), position and direction of the camera.
    """
    focal = LARGE[0] * rng.uniform(0.7, 1.2)
    K = np.array([[focal, 0, LARGE[0] / 2], [0, focal, LARGE[1] / 2], [0, 0, 1]])
    R = np.stack([[-ahead[1], ahead[0], 0], [0, 0, 1], ahead])
    x, y = np.meshgrid(*map(np.arange, LARGE))
    image = np.full(LARGE[::-1], 190, np.uint8)
    planes = []
    for wall, frame in zip(walls, frames):
        H = K @ R @ (frame - np.outer(eye, [0, 0, 1]))
        back = np.linalg.inv(H)
        in_front = back[2, 0] * x + back[2, 1] * y + back[2, 2] > 0
        shown = in_front & (cv2.warpPerspective(np.full_like(wall, 255), H, LARGE) > 127)
        image[shown] = cv2.warpPerspective(wall, H, LARGE)[shown]
        planes.append(H)
    return distort(image, rng, LIGHT), planes


KINDS = {"halves": make_halves, "court": make_court, "facade": make_facade}


def measure_distances(
    planes: Sequence[np.ndarray], points0: np.ndarray, points1: np.ndarray
) -> np.ndarray:
    """Measure the errors of matches of a place whose planes have one homography each.

    Args:
        planes: homographies (3, 3) from image 0 to image 1.
        points0, points1: positions of the matches in both images, (k, 2) px.

    Returns:
        (k,) px, the distance from `points1` to the nearest of the mapped `points0`.
    """
    return np.min([np.linalg.norm(transform(points0, H) - points1, axis=1) for H in planes], 0)


def make_pairs(
    matcher: Matcher, files: Sequence[Path], others: Sequence[Path]
) -> Iterator[LabeledPair]:
    """Make the pairs of all places."""
    for place, paths in enumerate(zip(files, others)):
        for kind, make_views in KINDS.items():
            rng = make_generator(0, f"{kind} {paths[0].name}", 0)
            images = make_views(rng, *map(read_gray, paths))
            views = [(matcher.extract(image), maps) for image, maps in images]
            for (features0, maps0), (features1, maps1) in itertools.combinations(views, 2):
                planes = [compose(H1, inverse(H0)) for H0, H1 in zip(maps0, maps1)]
                measure_errors = functools.partial(measure_distances, planes)
                yield place, kind, (features0, features1), measure_errors


def extract_real_pairs(matcher: Matcher, images: Path, cameras: Path) -> Iterator[LabeledPair]:
    """Pair all photographs with known cameras. Between two places no match is right."""
    views = [
        (name, camera, matcher.extract(scenes.find_photos(name) / file))
        for name, scene_cameras in scenes.write_scenes(images, cameras).items()
        for file, camera in scene_cameras.items()
    ]
    for view0, view1 in itertools.combinations(views, 2):
        place0, camera0, features0 = view0
        place1, camera1, features1 = view1
        pair = features0, features1
        if place0 == place1:
            F = scenes.compute_fundamental(camera0, camera1)
            yield place0, place0, pair, functools.partial(compute_epipolar_distances, F)
        else:
            yield place0, "across", pair, lambda points0, _: np.full(len(points0), np.inf)


# Learning


def measure_pair(matcher: Matcher, labeled_pair: LabeledPair) -> Tuple[Any, ...]:
    """Return a row of `measure_pairs`. The evidence is zero for a pair without a geometry."""
    place, kind, pair, measure_errors = labeled_pair
    no_geometry = place, kind, False, 0.0, 0.0
    factors = matcher.get_limit_factors(pair)
    inliers, indices = scene.verify_ratio_matches(pair, factors)
    if inliers < scene.MIN_MATCHES:
        return no_geometry
    features0, features1 = (features.select(rows) for features, rows in zip(pair, indices))
    network_matches, mutual_matches, _ = matcher.match_network([(features0, features1)])[0]
    keypoints = features0.keypoints, features1.keypoints
    F, evidence = scene.fit_geometry(network_matches, mutual_matches, keypoints, factors)
    if F is None:
        return no_geometry
    confident = network_matches.keep_above(scene.MIN_CONFIDENCE)
    matches = scene.select_epipolar_matches(F, confident, mutual_matches, keypoints, factors)
    right = measure_errors(*matches.get_points(keypoints)) < scenes.RIGHT_PX
    return (place, kind, bool(len(right) and right.mean() > 0.5), *evidence)


def measure_pairs(matcher: Matcher, pairs: Iterator[LabeledPair]) -> pd.DataFrame:
    """Measure each pair in a row of a table, and leave out pairs without a geometry.

    Returns:
        The place and the kind of each pair, whether most of its matches are right, and its
        evidence.
    """
    matcher = matcher.use_one_core_per_pair()
    with ThreadPoolExecutor(matcher.workers) as pool:
        # One pair is made while others are measured.
        shown = Progress(pairs, desc="pairs", unit="pairs")
        rows = pool.map(functools.partial(measure_pair, matcher), shown)
        table = pd.DataFrame(rows, columns=["place", "kind", "right", *EVIDENCE])
    return table[table[EVIDENCE].any(axis=1)].reset_index(drop=True)


def learn_weights(pairs: pd.DataFrame) -> np.ndarray:
    """Learn the weights of the evidence, at least 0, and the bias by logistic regression.

    Args:
        pairs: the table of `measure_pairs`.

    Returns:
        The weights of EVIDENCE, then the bias.
    """
    right = pairs.right.to_numpy(bool)
    rows = np.column_stack([pairs[EVIDENCE], np.ones(len(pairs))])
    deviation = np.append(rows.std(0)[:-1] + 1e-9, 1.0)
    rows = rows / deviation
    signs = np.where(right, 1.0, -1.0)
    pair_weights = np.where(right, PRIOR / right.mean(), (1 - PRIOR) / (1 - right.mean()))

    def compute_loss(weights: np.ndarray) -> float:
        error = pair_weights @ np.logaddexp(0.0, -signs * (rows @ weights))
        return float(error + 0.5 * PENALTY * weights[:-1] @ weights[:-1])

    # More of any evidence never makes a pair less probable.
    bounds = [(0, None)] * len(EVIDENCE) + [(None, None)]
    return minimize(compute_loss, np.zeros(len(bounds)), bounds=bounds).x / deviation


def tabulate_errors(pairs: pd.DataFrame, weights: Sequence[float]) -> str:
    """Tabulate how many right pairs are refused, and wrong ones accepted, at each limit.

    Args:
        pairs: the table of `measure_pairs`.
        weights: the weights of the evidence, then the bias.
    """
    scores = expit(pairs[EVIDENCE].to_numpy(float) @ weights[:-1] + weights[-1])
    right = pairs.right.to_numpy(bool)
    counts = {"pairs": right | True, "right": right}
    for limit in LIMITS:
        counts[f"refused {limit}"] = right & (scores < limit)
        counts[f"false {limit}"] = ~right & (scores >= limit)
    kinds = pd.DataFrame(counts).groupby(pairs.kind.to_numpy(), sort=False).sum()
    kinds.loc["all"] = kinds.sum()
    return kinds.to_string()


def format_report(pairs: pd.DataFrame) -> str:
    """Format the constants, and the counts for the places they were learned from and for others."""
    learned = pairs.place < LEARNED
    weights = learn_weights(pairs[learned]).round(1).tolist()
    counts = [tabulate_errors(part, weights) for part in (pairs[learned], pairs[~learned])]
    return "\n\n".join([f"WEIGHTS = np.array({weights[:-1]})\nBIAS = {weights[-1]}", *counts])


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Make the pairs, learn, and print; or check the weights of the module."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("places", type=Path, help="folder of photographs")
    parser.add_argument("others", type=Path, help="folder of more photographs")
    parser.add_argument("--check", action="store_true", help="others is a file of cameras")
    options = parser.parse_args(argv)
    matcher = Matcher.load(device="cpu", scene=True)
    if options.check:
        pairs = measure_pairs(matcher, extract_real_pairs(matcher, options.places, options.others))
        print(tabulate_errors(pairs, [*verification.WEIGHTS, verification.BIAS]))
        return 0
    files = sorted(options.places.glob("*.jpg"))[:PLACES]
    others = sorted(options.others.glob("*.jpg"))[OTHERS:]
    print(format_report(measure_pairs(matcher, make_pairs(matcher, files, others))))
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
