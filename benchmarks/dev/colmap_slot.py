"""Our network in COLMAP's place, on COLMAP's SIFT, pair by pair: `python -m
benchmarks.dev.colmap_slot superglue-colmap.onnx --pairs DIR --poses FILE`.

COLMAP extracts the keypoints on a CPU. `slot`: the file of `python -m superglue_sift.onnx --for
colmap`, run by ONNX Runtime on what COLMAP hands over. `ratio`: COLMAP's own matcher on the same
keypoints. `opencv`: `Matcher` on OpenCV's SIFT, with as many keypoints and the responses;
`opencv-ratio` the ratio test there.
Columns, means of a pair: keypoints of image 0; matches; P, percent of them that are right, within
3 px of the true place or epipolar line in both images; right ones; R@P, right ones above the
threshold at which all matches are as precise as those of the ratio test on the same keypoints; AUC
of the pose error up to 5, 10, 20 degrees, or of the homography's corners up to 1, 3, 5 px.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import cv2
import numpy as np

from benchmarks.dev import colmap
from benchmarks.dev.colmap import Side, library
from benchmarks.dev.command import make_parser
from pipeline import errors
from pipeline.bootstrap import auc_by_pair
from pipeline.errors import RequestError
from pipeline.evaluate import estimators, poses
from pipeline.evaluate.estimators import Matches
from pipeline.evaluate.hpatches import HPatchesPairs
from pipeline.evaluate.inputs import Pose, Source, Truth
from pipeline.evaluate.poses import PosePairs
from pipeline.evaluate.scoring import CORRECT_PX, reprojection_errors
from superglue_sift import Matcher, classical, geometry
from superglue_sift.interop.colmap import CENTRE

WAYS = ("slot", "ratio", "opencv", "opencv-ratio")


class View(NamedTuple):
    """Two images by name, and their true geometry."""

    first: str
    second: str
    truth: Truth


class Found(NamedTuple):
    """Keypoints (n, 2) px of both images, matches (K, 2) of them, and their scores (K,)."""

    keypoints: Sequence[np.ndarray]
    matches: np.ndarray
    scores: np.ndarray


class Scored(NamedTuple):
    """Of one pair: number of keypoints of image 0, scores and truth (K,) of matches, error."""

    keypoints: int
    scores: np.ndarray
    right: np.ndarray
    error: float


def load(source: Source, every: int) -> Tuple[Dict[str, np.ndarray], List[View]]:
    """Each `every`-th pair of a source, and their gray images by name."""
    known = []
    for number in range(len(source)):
        scene = source.load(number)
        known += [(number, scene.images, pair) for pair in scene.pairs]
    images: Dict[str, np.ndarray] = {}
    views = []
    for number, shown, pair in known[::every]:
        names = [f"{number:04d}-{image}.png" for image in (pair.first, pair.second)]
        images.update(zip(names, (shown[pair.first], shown[pair.second])))
        views.append(View(*names, pair.truth))
    return images, views


def extract_and_match(
    images: Dict[str, np.ndarray], views: Sequence[View], most: int
) -> Tuple[Dict[str, Side], List[np.ndarray]]:
    """COLMAP's features of images, and its own matches (K, 2) of each pair."""
    pycolmap = library()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        database = folder / "database.db"
        listed = folder / "pairs.txt"
        (folder / "images").mkdir()
        for file, image in images.items():
            cv2.imwrite(str(folder / "images" / file), image)
        listed.write_text("\n".join(f"{view.first} {view.second}" for view in views))
        colmap.extract(database, folder / "images", most)
        matching = pycolmap.FeatureMatchingOptions()
        matching.skip_geometric_verification = True
        pairing = pycolmap.ImportedPairingOptions(match_list_path=str(listed))
        pycolmap.match_image_pairs(database, matching, pairing, device=pycolmap.Device.cpu)
        with pycolmap.Database.open(str(database)) as content:
            stored = colmap.read_sides(content)
            ids = {file: image.image_id for file, (image, _) in stored.items()}
            own = [content.read_matches(ids[view.first], ids[view.second]) for view in views]
    return {file: side for file, (_, side) in stored.items()}, own


def answers(
    source: Source, options: argparse.Namespace
) -> Iterator[Tuple[Truth, Tuple[int, int], Dict[str, Found]]]:
    """The truth of each pair, the size of image 0, and the matches of each way."""
    images, views = load(source, options.every)
    stored, own = extract_and_match(images, views, options.keypoints)
    slot = colmap.load_slot(options.file)
    most = options.keypoints
    matcher = Matcher.load(device="cpu", max_keypoints=most, network_keypoints=most, refine=False)
    features = {name: matcher.extract_gray(image) for name, image in images.items()}
    for view, ratio in zip(views, own):
        sides = [stored[name] for name in (view.first, view.second)]
        theirs = [side.keypoints[:, :2] - CENTRE for side in sides]
        both = [features[name] for name in (view.first, view.second)]
        ours = [side.keypoints for side in both]
        found = matcher.match(*both)
        tested = classical.ratio_matches(*(side.records for side in both))
        table = {
            "slot": Found(theirs, *colmap.match(slot, *sides)),
            "ratio": Found(theirs, ratio, np.ones(len(ratio))),
            "opencv": Found(ours, found.matches, found.scores),
            "opencv-ratio": Found(ours, *tested),
        }
        yield view.truth, images[view.first].shape[::-1], table


def score(found: Found, truth: Truth, size: Tuple[int, int]) -> Scored:
    """Check matches, and fit a pose or a homography to them."""
    points = [xy[index].astype(np.float64) for xy, index in zip(found.keypoints, found.matches.T)]
    given = Matches(*points, found.scores, found.scores > 0, seed=0)
    if isinstance(truth, Pose):
        away = geometry.epipolar_distances(colmap.fundamental(truth), *points)
        error = poses.pose_error(poses.estimate_refined(given, truth), truth)
    else:
        away = reprojection_errors(*points, truth)
        enough = len(found.scores) >= geometry.MIN_POINTS
        H = estimators.ransac(given) if enough else None
        error = geometry.corner_error(H, truth, size)
    return Scored(len(found.keypoints[0]), found.scores, away < CORRECT_PX, error)


def right_at(scored: Sequence[Scored], precision: float) -> float:
    """Right matches of a pair above the threshold at which all have at least this precision."""
    scores = np.concatenate([each.scores for each in scored])
    right = np.concatenate([each.right for each in scored])
    right = right[np.argsort(-scores, kind="stable")].cumsum()
    reached = right / np.arange(1, len(right) + 1) >= precision
    return float(right[reached].max(initial=0)) / len(scored)


def show(way: str, scored: Sequence[Scored], precision: float, limits: Sequence[int]) -> str:
    """A line of the table."""
    keypoints = np.mean([each.keypoints for each in scored])
    matches = np.mean([len(each.scores) for each in scored])
    right = np.mean([each.right.sum() for each in scored])
    cells = f"{keypoints:9.0f} {matches:8.0f} {100 * right / max(matches, 1e-9):6.1f} {right:6.0f}"
    at = "-" if way.endswith("ratio") else f"{right_at(scored, precision):.0f}"
    auc = [100 * auc_by_pair([each.error for each in scored], limit).mean() for limit in limits]
    return f"{way:13} {cells} {at:>6}   " + " ".join(f"{value:5.1f}" for value in auc)


def compare(title: str, source: Source, options: argparse.Namespace) -> None:
    """Print the table of one source."""
    limits = (5, 10, 20) if isinstance(source, PosePairs) else (1, 3, 5)
    rows: Dict[str, List[Scored]] = {way: [] for way in WAYS}
    for truth, size, table in answers(source, options):
        for way, found in table.items():
            rows[way].append(score(found, truth, size))
    heads = " ".join(f"@{limit:<4}" for limit in limits)
    print(f"{title}: {len(rows['slot'])} pairs")
    print(f"{'way':13} keypoints  matches      P  right    R@P   {heads}")
    for way, scored in rows.items():
        rivals = rows["opencv-ratio" if way == "opencv" else "ratio"]
        precision = np.concatenate([each.right for each in rivals]).mean()
        print(show(way, scored, float(precision), limits), flush=True)


def parse(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    """The command line."""
    parser = make_parser("colmap_slot", __doc__)
    add = parser.add_argument
    add("file", type=Path, help="of `python -m superglue_sift.onnx --for colmap`")
    add("--pairs", type=Path, metavar="DIR", help="sequences with homographies, as HPatches")
    add("--poses", type=Path, metavar="FILE", help="pairs_with_gt.txt, beside its images")
    add("--keypoints", type=int, default=2048, help="of an image (default 2048)")
    add("--every", type=int, default=1, metavar="N", help="each N-th pair")
    add("--resize", type=int, default=0, help="shorter side of the images of --poses (0: as is)")
    options = parser.parse_args(argv)
    if not (options.pairs or options.poses):
        raise RequestError("name the pairs: --pairs DIR or --poses FILE")
    return options


def main(argv: Optional[Sequence[str]] = None) -> int:
    options = parse(argv)
    library().logging.minloglevel = 2  # errors alone
    sources: Dict[str, Any] = {}
    if options.pairs:
        sources[options.pairs.name] = HPatchesPairs(options.pairs, 0)
    if options.poses:
        folder = options.poses.parent
        sources[folder.name] = PosePairs(options.poses, folder, options.resize)
    for title, source in sources.items():
        compare(title, source, options)
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
