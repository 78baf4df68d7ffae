"""Learn the weights by which a scene accepts pairs (`superglue_sift.geometry.verification`).

    python -m benchmarks.dev.verification coco/val coco/train

Pairs are made of the first 16 photographs of the first folder. The last 100 of the second folder
are other places. The kinds are views of one plane (`plane`), of several planes at different depths
(`depth`), of a court whose four walls have equal windows (`court`), and of mirror images
(`mirrored`). The two views of a court may show one wall or two. A pair is right if most matches
that agree with its geometry are right, and wrong otherwise.

Printed are the weights, to be copied into that module; how often pairs of a given probability are
right; and for each kind, how many right pairs are refused and how many wrong ones are accepted, at
several limits. For the last two, each photograph is judged by weights learned without it. Right and
wrong pairs weigh the same in total. Pairs without a geometry are always refused, and teach nothing.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import cv2
import numpy as np
import pandas as pd
from scipy.optimize import minimize
from scipy.special import expit

from benchmarks.command import make_parser
from pipeline import errors
from pipeline.keypoints.views import distort, generator, render, sample_view
from pipeline.params import Homography, Photometric
from superglue_sift import Matcher
from superglue_sift.features.images import read_gray
from superglue_sift.geometry import verification
from superglue_sift.geometry.guided_matching import positions_of
from superglue_sift.geometry.two_view import compose, inverse, normalize, transform
from superglue_sift.progress import Progress

Random = np.random.Generator
Gray = np.ndarray  # a photograph (H, W) uint8
Made = Tuple[Gray, Gray, Sequence[np.ndarray]]  # two images, homographies of planes that both show

PLACES = 16
OTHERS = 100
VIEW = (640, 480)  # px, width and height
# Wider than in training: little overlap, strong tilt and zoom
WIDE = Homography(scale_min=0.25, perspective=0.3, rotation_deg=60, tilt_deg=70, max_upscale=4)
MILD = Homography(scale_min=0.7, perspective=0.15, rotation_deg=20, tilt_deg=30, max_upscale=4)
LIGHT = Photometric(brightness=0.2, contrast=0.3, gamma=0.2, blur=1.5, noise=0.03, jpeg=0.5)
LARGE = (1024, 768)  # of a view of a court
WALL = (960, 640)  # px, of a court
WINDOW = 120  # px
RIGHT_PX = 4.0  # error up to which a match is right
PARTS = 8  # of the photographs, each judged by weights of the others
PENALTY = 0.05  # of the squares of the weights, per deviation of the number that is weighed
BINS = (0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98, 1)
LIMITS = (0.5, 0.8, 0.9, 0.95)


# Made pairs


def plane(rng: Random, photo: Gray, _other: Gray) -> Made:
    """Two views of a photograph."""
    (image0, H0), (image1, H1) = (view(rng, photo, WIDE) for _ in range(2))
    return image0, image1, [compose(H1, inverse(H0))]


def depth(rng: Random, photo: Gray, other: Gray) -> Made:
    """A photograph cut into planes at different depths, seen by a camera that moved.

    Behind the planes in front is another photograph, which the first camera does not see.
    """
    first = mild_part(rng, photo)
    K, turn, moved = _motion(rng)
    fronts = [_outline(rng) for _ in range(rng.integers(2, 13))]
    # in units of the depth of the last plane
    depths = [1.0, *np.sort(rng.uniform(0.4, 0.9, len(fronts)))[::-1]]
    layer = np.zeros(first.shape, np.uint8)  # of each pixel, the nearest plane
    for number, outline in enumerate(fronts, 1):
        cv2.fillConvexPoly(layer, outline, number)
    behind = np.where(layer == 0, first, cv2.resize(other, VIEW, interpolation=cv2.INTER_AREA))
    second = np.zeros_like(first)
    planes = []
    for number, far in enumerate(depths):
        normal = np.append(rng.uniform(-0.4, 0.4, 2), 1.0)
        planes.append(normalize(K @ (turn + np.outer(moved, normal) / far) @ np.linalg.inv(K)))
        mask = np.uint8(255) * (layer == number) if number else np.full_like(layer, 255)
        shown = cv2.warpPerspective(mask, planes[-1], VIEW) > 127
        seen = cv2.warpPerspective(first if number else behind, planes[-1], VIEW)
        second[shown] = seen[shown]
    second, H = view(rng, second, WIDE)
    return distort(first, rng, LIGHT), second, [compose(H, each) for each in planes]


def court(rng: Random, photo: Gray, other: Gray) -> Made:
    """Two views from within a court, whose four walls have the same windows.

    Each wall is a quarter of the other photograph, with the middle of the first one many times on
    it. The truth are the homographies of all walls.
    """
    quarters = [part for half in np.array_split(other, 2) for part in np.array_split(half, 2, 1)]
    walls = [hang_windows(rng, photo, np.ascontiguousarray(part)) for part in quarters]
    side, height = WALL
    x, y = np.meshgrid(*map(np.arange, LARGE))
    K = np.array([[0.9 * LARGE[0], 0, LARGE[0] / 2], [0, 0.9 * LARGE[0], LARGE[1] / 2], [0, 0, 1]])
    turns = rng.uniform(-math.pi, math.pi, 2)
    images: List[Gray] = []
    maps: List[np.ndarray] = []
    for heading in (turns[0], turns.sum()):
        # a pixel of a wall is the unit of length, and the third axis points down
        ahead = np.array([math.cos(heading), math.sin(heading), 0])
        R = np.stack([[-ahead[1], ahead[0], 0], [0, 0, 1], ahead])
        eye = rng.uniform(-0.08, 0.08, 3) * side - rng.uniform(0.16, 0.38) * side * ahead
        image = np.full(LARGE[::-1], 190, np.uint8)
        for number, wall in enumerate(walls):
            along = np.roll([1, 0], number) * (1 - number // 2 * 2)
            start = [along[1] - along[0], -along[1] - along[0], -height / side] * np.array(side / 2)
            H = K @ R @ np.column_stack([[*along, 0], [0, 0, 1], start - eye])
            back = np.linalg.inv(H)
            in_front = back[2, 0] * x + back[2, 1] * y + back[2, 2] > 0
            shown = in_front & (cv2.warpPerspective(np.full_like(wall, 255), H, LARGE) > 127)
            image[shown] = cv2.warpPerspective(wall, H, LARGE)[shown]
            maps.append(H)
        images.append(distort(image, rng, LIGHT))
    planes = [compose(map1, inverse(map0)) for map0, map1 in zip(maps[:4], maps[4:])]
    return images[0], images[1], planes


def mirrored(rng: Random, photo: Gray, _other: Gray) -> Made:
    """A view of a photograph, and one of its mirror image."""
    mirror = np.ascontiguousarray(photo[:, ::-1])
    return view(rng, photo, MILD)[0], view(rng, mirror, MILD)[0], []


KINDS = {plane: 2, depth: 2, court: 4, mirrored: 1}  # how often of a photograph


def view(
    rng: Random, photo: Gray, limits: Homography, size: Tuple[int, int] = VIEW
) -> Tuple[Gray, np.ndarray]:
    """A random view of a photograph, and its homography (3, 3)."""
    H = sample_view(rng, photo.shape[::-1], size, limits)
    return distort(render(photo, H, size), rng, LIGHT), H


def mild_part(rng: Random, photo: Gray) -> Gray:
    """What a mild view shows, as it is."""
    return render(photo, sample_view(rng, photo.shape[::-1], VIEW, MILD), VIEW)


def hang_windows(rng: Random, photo: Gray, back: Gray) -> Gray:
    """A wall of equal windows, in rows: the middle of one photograph, many times on another."""
    out = cv2.resize(back, WALL, interpolation=cv2.INTER_AREA)
    y, x = np.array(photo.shape) // 2 - WINDOW
    middle = photo[y : y + 2 * WINDOW, x : x + 2 * WINDOW]
    window = cv2.resize(middle, (WINDOW, WINDOW), interpolation=cv2.INTER_AREA)
    right, down = (WINDOW * rng.uniform(1.15, 1.6, 2)).astype(int)
    for y in range(rng.integers(0, down - WINDOW + 1), WALL[1] - WINDOW, down):
        for x in range(rng.integers(0, right - WINDOW + 1), WALL[0] - WINDOW, right):
            light = rng.normal(0, 4, window.shape) + rng.uniform(-12, 12)
            out[y : y + WINDOW, x : x + WINDOW] = (window + light).clip(0, 255)
    return out


def _motion(rng: Random) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """K (3, 3) of a camera, and its motion: R (3, 3), t (3,) for a place at depth 1."""
    width, height = VIEW
    focal = width * rng.uniform(0.8, 1.6)
    K = np.array([[focal, 0, width / 2], [0, focal, height / 2], [0, 0, 1]])
    turn = cv2.Rodrigues(np.radians(rng.uniform([-15, -30, -25], [15, 30, 25])))[0]
    moved = -turn @ rng.uniform([-0.5, -0.2, -0.3], [0.5, 0.2, 0.3])
    ahead = np.array([0, 0, 1.0])
    # it still looks at a part of the place
    return K, turn, moved + rng.uniform(0.3, 1) * (ahead - turn @ ahead)


def _outline(rng: Random) -> np.ndarray:
    """A convex outline within a view, (n, 2) int32."""
    middle = rng.uniform(0.1, 0.9, 2) * VIEW
    points = middle + rng.uniform(0.08, 0.35) * rng.uniform(-1, 1, (8, 2)) * VIEW
    return cv2.convexHull(points.astype(np.int32))[:, 0]


# Learning


def examine(matcher: Matcher, made: Made) -> Tuple[np.ndarray, bool]:
    """Measure the evidence (3,) of a made pair, and whether most of its matches are right."""
    pair = [matcher.extract(image) for image in made[:2]]
    _, kept = verification.first_look(pair, matcher.resize)
    one, other = (view.select(index) for view, index in zip(pair, kept))
    _, network, mutual, _ = matcher.match_network([(one, other)])[0]
    points = verification.reduced_points((one, other), matcher.resize)
    F, measured = verification.verify_pair(network, mutual, points)
    if F is None:
        return measured, False
    network = network.above(verification.COUNTED)
    found = verification.add_matches_near_lines(F, network, mutual, points)
    points0, points1 = positions_of(points, found)
    right = np.zeros(len(found), bool)
    for H in made[2]:
        right |= np.linalg.norm(transform(points0, H) - points1, axis=1) < RIGHT_PX
    return measured, bool(len(right) and right.mean() > 0.5)


def examine_all(files: Sequence[Path], others: Sequence[Path]) -> pd.DataFrame:
    """A row for each made pair: photo, kind, right, and the numbers of its evidence."""
    matcher = Matcher.load(device="cpu", scene=True)
    names = [path.name for path in (*files, *others)]
    photos = [read_gray(path) for path in (*files, *others)]
    matcher.side_by_side()
    asked = [
        (place, make, index)
        for place in range(len(files))
        for make, often in KINDS.items()
        for index in range(often)
    ]

    def row(item: Tuple[int, Any, int]) -> Dict[str, Any]:
        place, make, index = item
        rng = generator(0, f"{make.__name__} {names[place]}", index)
        other = (place + 1 + rng.integers(len(names) - 1)) % len(names)
        measured, right = examine(matcher, make(rng, photos[place], photos[other]))
        return {"photo": place, "kind": make.__name__, "right": right, **dict(enumerate(measured))}

    with ThreadPoolExecutor(matcher.workers) as pool:
        rows = pool.map(row, asked)
        return pd.DataFrame(Progress(rows, total=len(asked), desc="pairs", unit="pairs"))


def learn(evidence: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Logistic regression of (n, k) on (n,) bool: k weights and the bias."""
    deviation = np.append(evidence.std(0) + 1e-9, 1.0)
    rows = np.column_stack([evidence, np.ones(len(evidence))]) / deviation
    signs = np.where(right, 1.0, -1.0)
    each = np.where(right, 0.5 / right.mean(), 0.5 / (1 - right.mean()))

    def loss(weights: np.ndarray) -> float:
        wrong = each @ np.logaddexp(0.0, -signs * (rows @ weights))
        return float(wrong + 0.5 * PENALTY * weights[:-1] @ weights[:-1])

    return minimize(loss, np.zeros(rows.shape[1])).x / deviation


def report(pairs: pd.DataFrame) -> List[str]:
    """The lines to print. pairs: of `examine_all`."""
    evidence = pairs.drop(columns=["photo", "kind", "right"]).to_numpy(float)
    pairs = pairs[evidence.any(1)].reset_index(drop=True)  # the others are always refused
    evidence = evidence[evidence.any(1)]
    right = pairs.right.to_numpy(bool)
    weights = learn(evidence, right)
    held_out = np.zeros(len(pairs))
    for part in range(PARTS):
        here = (pairs.photo % PARTS == part).to_numpy()
        if here.any():
            learned = learn(evidence[~here], right[~here])
            held_out[here] = expit(evidence[here] @ learned[:-1] + learned[-1])
    bins = pd.cut(held_out, BINS, include_lowest=True)
    shares = pd.DataFrame({"mean": held_out, "right": right}).groupby(bins, observed=True)
    counts = {"pairs": right | True, "right": right}
    for limit in LIMITS:
        counts[f"refused {limit}"] = right & (held_out < limit)
        counts[f"false {limit}"] = ~right & (held_out >= limit)
    kinds = pd.DataFrame(counts).groupby(pairs.kind, sort=False).sum()
    kinds.loc["all"] = kinds.sum()
    values = ", ".join(f"{weight:.2f}" for weight in weights[:-1])
    return [
        f"WEIGHTS = np.array([{values}])",
        f"BIAS = {weights[-1]:.2f}",
        shares.agg(pairs=("right", "size"), mean=("mean", "mean"), right=("right", "mean"))
        .round(3)
        .to_string(),
        kinds.to_string(),
    ]


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Make the pairs, learn, and print."""
    parser = make_parser("dev.verification", __doc__)
    parser.add_argument("places", type=Path, metavar="PLACES", help="folder of photographs")
    parser.add_argument("others", type=Path, metavar="OTHERS", help="folder of more photographs")
    options = parser.parse_args(argv)
    files = sorted(options.places.glob("*.jpg"))[:PLACES]
    print("\n\n".join(report(examine_all(files, sorted(options.others.glob("*.jpg"))[-OTHERS:]))))
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
