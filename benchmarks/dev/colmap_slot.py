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
import itertools
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import cv2
import numpy as np

from pipeline import errors
from pipeline.bootstrap import auc_by_pair
from pipeline.errors import RequestError
from pipeline.evaluate import poses
from pipeline.evaluate.estimators import ITERATIONS, PX
from pipeline.evaluate.hpatches import HPatchesPairs
from pipeline.evaluate.inputs import Pose, Source, Truth
from pipeline.evaluate.poses import PosePairs
from superglue_sift import Matcher, classical, geometry, onnx
from superglue_sift.interop.colmap import CENTRE, write_pair

RIGHT_PX = 3.0
WAYS = ("slot", "ratio", "opencv", "opencv-ratio")
Found = Tuple[np.ndarray, np.ndarray, np.ndarray]  # points (K, 2) of both images, scores (K,)


class Side(NamedTuple):
    """COLMAP's features of an image: keypoints (n, 6), descriptors (n, 128), (width, height)."""

    keypoints: np.ndarray
    descriptors: np.ndarray
    size: Tuple[int, int]


class View(NamedTuple):
    """Two images by their numbers, and their true geometry."""

    first: int
    second: int
    truth: Truth


class Scored(NamedTuple):
    """Of one pair: number of keypoints of image 0, scores and truth (K,) of matches, error."""

    keypoints: int
    scores: np.ndarray
    right: np.ndarray
    error: float


def load(source: Source, every: int) -> Tuple[List[np.ndarray], List[View]]:
    """Each `every`-th pair of a source, and their gray images, each once."""
    pairs = []
    for number in range(len(source)):
        scene = source.load(number)
        pairs += [(scene.images[p.first], scene.images[p.second], p.truth) for p in scene.pairs]
    images: Dict[bytes, Tuple[int, np.ndarray]] = {}
    views = []
    for *both, truth in pairs[::every]:
        places = [images.setdefault(i.tobytes(), (len(images), i))[0] for i in both]
        views.append(View(places[0], places[1], truth))
    return [image for _, image in images.values()], views


def session(file: Path) -> Any:
    """The file in ONNX Runtime, on one core. Raises RequestError without ONNX Runtime."""
    try:
        import onnxruntime
    except ImportError:
        raise RequestError("needs one more package: pip install onnxruntime") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(file), options)


def inputs_of(side: Side) -> Dict[str, np.ndarray]:
    """What COLMAP hands over for an image (its onnx_matchers.cc), by `onnx.COLMAP_SIDE`."""
    a11, a12, a21, a22 = side.keypoints[:, 2:].T
    unit = side.descriptors.astype(np.float32)
    values = {
        "kpts": side.keypoints[:, :2] - CENTRE,
        "desc": unit / np.maximum(np.linalg.norm(unit, axis=1, keepdims=True), 1e-12),
        "image_size": np.array(side.size),
        "scales": (np.hypot(a11, a21) + np.hypot(a12, a22)) / 2,
        "oris": np.arctan2(a21, a11),
    }
    return {name: value.astype(np.float32)[None] for name, value in values.items()}


def match(network: Any, side0: Side, side1: Side) -> Tuple[np.ndarray, np.ndarray]:
    """Matches (K, 2) and their scores (K,). network: see `session`."""
    sides = [inputs_of(side) for side in (side0, side1)]
    inputs = {name + side: sides[int(side)][name] for name in onnx.COLMAP_SIDE for side in "01"}
    matches0, scores0 = network.run(None, inputs)
    index0 = np.flatnonzero(matches0 >= 0)
    return np.stack([index0, matches0[index0]], axis=1), scores0[index0]


def match_database(path: Path, file: Path) -> None:
    """Match all pairs of a database as COLMAP's exhaustive matcher would, and verify them."""
    import pycolmap

    network = session(file)
    with pycolmap.Database.open(str(path)) as content:
        sides = [(image, read_side(content, image)) for image in content.read_all_images()]
        for pair in itertools.combinations(sides, 2):
            matches, _ = match(network, *(side for _, side in pair))
            both = [
                (
                    image.image_id,
                    content.read_camera(image.camera_id),
                    side.keypoints[:, :2].astype(np.float64),
                )
                for image, side in pair
            ]
            write_pair(pycolmap, content, both, matches.astype(np.uint32))


def read_side(content: Any, image: Any) -> Side:
    """The features of an image of a database."""
    camera = content.read_camera(image.camera_id)
    keypoints = content.read_keypoints(image.image_id)
    descriptors = content.read_descriptors(image.image_id).data
    return Side(keypoints, descriptors, (camera.width, camera.height))


def extract_and_match(
    images: Sequence[np.ndarray], views: Sequence[View], most: int
) -> Tuple[List[Side], List[np.ndarray]]:
    """COLMAP's features of images, and its own matches (K, 2) of each pair."""
    import pycolmap

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "images").mkdir()
        for number, image in enumerate(images):
            cv2.imwrite(str(folder / "images" / f"{number:04d}.png"), image)
        lines = [f"{view.first:04d}.png {view.second:04d}.png" for view in views]
        (folder / "pairs.txt").write_text("\n".join(lines))
        extraction = pycolmap.FeatureExtractionOptions(num_threads=1)
        extraction.sift.max_num_features = most
        matching = pycolmap.FeatureMatchingOptions(num_threads=1)
        matching.skip_geometric_verification = True
        listed = pycolmap.ImportedPairingOptions(match_list_path=str(folder / "pairs.txt"))
        database = folder / "database.db"
        where = (database, folder / "images")
        cpu = pycolmap.Device.cpu
        pycolmap.extract_features(*where, extraction_options=extraction, device=cpu)
        pycolmap.match_image_pairs(database, matching, listed, device=cpu)
        with pycolmap.Database.open(str(database)) as content:
            known = sorted(content.read_all_images(), key=lambda image: image.name)
            ids = [image.image_id for image in known]
            sides = [read_side(content, image) for image in known]
            own = [content.read_matches(ids[view.first], ids[view.second]) for view in views]
    return sides, own


def answers(
    source: Source, options: argparse.Namespace
) -> Iterator[Tuple[View, Dict[str, Tuple[int, Found]], Tuple[int, int]]]:
    """Each pair, the matches of each way with the number of keypoints, and the size of image 0."""
    images, views = load(source, options.every)
    stored, own = extract_and_match(images, views, options.keypoints)
    network = session(options.file)
    matcher = Matcher.load(device="cpu", max_keypoints=options.keypoints, refine=False)
    features = [matcher.extract_gray(image) for image in images]
    for view, ratio in zip(views, own):
        sides = [stored[number] for number in view[:2]]
        points = [side.keypoints[:, :2] - CENTRE for side in sides]
        found = {"slot": match(network, *sides), "ratio": (ratio, np.ones(len(ratio)))}
        table = {way: (len(points[0]), of_points(points, *each)) for way, each in found.items()}
        sides = [features[number] for number in view[:2]]
        points = [side.keypoints for side in sides]
        ours = matcher.match(*sides)
        ratio = classical.ratio_matches(*(classical.describe(side.records) for side in sides))
        found = {"opencv": (ours.matches, ours.scores), "opencv-ratio": ratio}
        table.update({w: (len(points[0]), of_points(points, *each)) for w, each in found.items()})
        yield view, table, images[view.first].shape[::-1]


def of_points(points: Sequence[np.ndarray], matches: np.ndarray, scores: np.ndarray) -> Found:
    """The positions of matches (K, 2)."""
    first, second = (xy[index].astype(np.float64) for xy, index in zip(points, matches.T))
    return first, second, scores


def score(keypoints: int, found: Found, truth: Truth, size: Tuple[int, int]) -> Scored:
    """Check matches, and fit a pose or a homography to them."""
    points0, points1, scores = found
    if isinstance(truth, Pose):
        F = fundamental(truth)
        right = geometry.epipolar_distances(F, points0, points1) < RIGHT_PX
        pose = geometry.relative_pose(points0, points1, truth.K0, truth.K1)
        motion = None if pose.R is None or pose.t is None else (pose.R, pose.t)
        error = poses.pose_error(motion, truth)
    else:
        there = geometry.transform(points0, truth) - points1
        back = geometry.transform(points1, np.linalg.inv(truth)) - points0
        right = np.linalg.norm([there, back], axis=-1).max(axis=0) < RIGHT_PX
        enough = len(points0) >= geometry.MIN_POINTS
        H = geometry.fit_ransac(points0, points1, PX, ITERATIONS, 0) if enough else None
        error = geometry.corner_error(H, truth, size)
    return Scored(keypoints, scores, right, error)


def fundamental(truth: Pose) -> np.ndarray:
    """(3, 3) F with x1^T F x0 = 0 in pixels."""
    x, y, z = truth.T_0to1[:3, 3]
    E = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]]) @ truth.T_0to1[:3, :3]
    return np.linalg.inv(truth.K1).T @ E @ np.linalg.inv(truth.K0)


def right_at(scored: Sequence[Scored], precision: float) -> float:
    """Right matches of a pair above the threshold at which all have at least this precision."""
    scores, right = (np.concatenate([getattr(s, n) for s in scored]) for n in ("scores", "right"))
    right = right[np.argsort(-scores, kind="stable")].cumsum()
    reached = right / np.arange(1, len(right) + 1) >= precision
    return float(right[reached].max(initial=0)) / len(scored)


def show(way: str, scored: Sequence[Scored], precision: float, limits: Sequence[int]) -> str:
    """A line of the table."""
    matches = np.mean([len(each.scores) for each in scored])
    right = np.mean([each.right.sum() for each in scored])
    auc = [100 * auc_by_pair([each.error for each in scored], limit).mean() for limit in limits]
    keypoints = np.mean([each.keypoints for each in scored])
    cells = f"{keypoints:9.0f} {matches:8.0f} {100 * right / max(matches, 1e-9):6.1f} {right:6.0f}"
    at = "-" if way.endswith("ratio") else f"{right_at(scored, precision):.0f}"
    return f"{way:13} {cells} {at:>6}   " + " ".join(f"{value:5.1f}" for value in auc)


def compare(title: str, source: Source, options: argparse.Namespace) -> None:
    """Print the table of one source."""
    limits = (5, 10, 20) if isinstance(source, PosePairs) else (1, 3, 5)
    rows: Dict[str, List[Scored]] = {way: [] for way in WAYS}
    for view, found, size in answers(source, options):
        for way, (keypoints, each) in found.items():
            rows[way].append(score(keypoints, each, view.truth, size))
    heads = " ".join(f"@{limit:<4}" for limit in limits)
    print(f"{title}: {len(rows['slot'])} pairs")
    print(f"{'way':13} keypoints  matches      P  right    R@P   {heads}")
    for way, scored in rows.items():
        rivals = rows["opencv-ratio" if way == "opencv" else "ratio"]
        right = np.concatenate([each.right for each in rivals])
        print(show(way, scored, float(right.mean()), limits), flush=True)


def parse(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    """The command line."""
    title, _, more = str(__doc__).partition("\n\n")
    parser = argparse.ArgumentParser(
        "python -m benchmarks.dev.colmap_slot", description=title, epilog=more
    )
    add = parser.add_argument
    add("file", type=Path, help="of `python -m superglue_sift.onnx --for colmap`")
    add("--pairs", type=Path, metavar="DIR", help="sequences with homographies, as HPatches")
    add("--poses", type=Path, metavar="FILE", help="pairs_with_gt.txt, beside its images")
    add("--keypoints", type=int, default=2048, help="of an image (default 2048)")
    add("--every", type=int, default=1, metavar="N", help="each N-th pair")
    add("--resize", type=int, default=0, help="shorter side of the images of --poses (0: as is)")
    options = parser.parse_args(argv)
    if not options.file.is_file() or not (options.pairs or options.poses):
        raise RequestError(f"{options.file}: must exist; name --pairs or --poses too")
    return options


def main(argv: Optional[Sequence[str]] = None) -> int:
    options = parse(argv)
    import pycolmap

    pycolmap.logging.minloglevel = 2  # errors alone
    sources: Dict[str, Any] = {}
    if options.pairs:
        sources[options.pairs.name] = HPatchesPairs(options.pairs, 0)
    if options.poses:
        sources[options.poses.parent.name] = PosePairs(
            options.poses, options.poses.parent, options.resize
        )
    for title, source in sources.items():
        compare(title, source, options)
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
