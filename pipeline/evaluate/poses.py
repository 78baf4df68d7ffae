"""Relative camera poses: pairs of images with intrinsics and the true pose, evaluated as in the
SuperGlue paper.

A line of `pairs_with_gt.txt`: two image names, two EXIF rotations, K0 and K1 (nine numbers each),
T_0to1 (sixteen), row by row. Pose error: the larger of the angles between true and estimated
rotation and translation direction, in degrees (the sign of the translation is not observable from
an essential matrix). A pair without an estimate has an infinite error. Source: arXiv 1911.11763,
sections 5.2 and 5.3.
"""

from __future__ import annotations

from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

import cv2
import numpy as np

from pipeline.errors import RequestError
from pipeline.evaluate import hpatches
from pipeline.evaluate.inputs import Pose, Scene, Source, ViewPair, image_size
from superglue_sift import geometry
from superglue_sift.geometry import resizing
from superglue_sift.images import read_gray

NUMBERS = 2 + 9 + 9 + 16  # on a line, after the two names
# Two images and their cameras, intrinsics in pixels of the stored images
Line = Tuple[str, str, Pose]
NAME = "pose"  # estimator name of the errors of `estimate`
REFINED = "refined"  # of the errors of `estimate_refined`
# A match is correct below this symmetric epipolar distance, squared, in normalized coordinates.
EPIPOLAR_LIMIT = 5e-4
RANSAC_PX = 1.0  # inlier threshold in pixels, divided by the mean focal length
CONFIDENCE = 0.99999
RULES = {  # for protocol.json
    "truth": (
        f"symmetric epipolar distance, squared, below {EPIPOLAR_LIMIT} in normalized coordinates"
    ),
    "estimator": (
        f"cv2.findEssentialMat, RANSAC at {RANSAC_PX:g} px over the focal length, probability"
        f" {CONFIDENCE}"
    ),
    "refined": (
        "cv2.findEssentialMat, USAC_ACCURATE; then scipy's least_squares of Sampson distances,"
        " Cauchy loss"
    ),
}
MIN_MATCHES = 5  # of an essential matrix


def is_pose(estimator: str) -> bool:
    """Whether errors of this name, aligned or not, are those of a pose, in degrees."""
    return estimator.partition("_")[0] in (NAME, REFINED)


class PosePairs(Source):
    """Pairs of a `pairs_with_gt.txt`, with their scenes from `scene_names`. short_side: see
    `HPatchesPairs`.
    """

    def __init__(self, file: Path, folder: Path, short_side: int = 480):
        self.pairs = read_pairs(file)
        self.folder = folder
        self.short_side = short_side
        self.scenes = [
            (name, 1) for name in scene_names([(name0, name1) for name0, name1, _ in self.pairs])
        ]

    def load(self, index: int) -> Scene:
        """Read one pair. Raises RequestError for an unreadable image: no pair is skipped
        silently.
        """
        name0, name1, pose = self.pairs[index]
        images = []
        intrinsics = []
        for name, K in ((name0, pose.K0), (name1, pose.K1)):
            original = read_gray(self.folder / name)
            images.append(hpatches.resize_short_side(original, self.short_side, self.folder / name))
            intrinsics.append(resizing(image_size(original), image_size(images[-1])) @ K)
        known = ViewPair(f"{name0} {name1}", 0, 1, Pose(intrinsics[0], intrinsics[1], pose.T_0to1))
        return Scene(self.scene_name(index), images, [known])

    def in_color(self, index: int, image: int, gray: np.ndarray) -> np.ndarray:
        return hpatches.in_color(self.folder / self.pairs[index][:2][image], gray)


def scene_names(pairs: Sequence[Tuple[str, str]]) -> List[str]:
    """The scene of each pair of images: a connected component of the pairs; with several folders,
    also of the folders.

    Its name: that folder, or the first of its images.
    """
    several = len({Path(name).parent for pair in pairs for name in pair}) > 1
    parent: Dict[str, str] = {}  # union-find over images and folders

    def root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            name = parent[name]
        return name

    for first, second in pairs:
        parent[root(second)] = root(first)
        for name in (first, second) if several else ():
            parent[root(name)] = root(str(Path(name).parent))
    starts: Dict[str, str] = {}
    for first, _ in pairs:
        starts.setdefault(root(first), str(Path(first).parent) if several else first)
    return [starts[root(first)] for first, _ in pairs]


def read_pairs(path: Path) -> List[Line]:
    """Read the pairs of a `pairs_with_gt.txt`. Raises RequestError naming the line that is
    wrong.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise RequestError(f"--poses {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RequestError(
            f"--poses {path}: not a text file; one pair on each line is expected"
        ) from None
    pairs = [
        read_line(path, number, line.split())
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not pairs:
        raise RequestError(f"--poses {path}: contains no pair")
    return pairs


def read_line(path: Path, number: int, words: Sequence[str]) -> Line:
    """Parse one line. Raises RequestError."""
    where = f"--poses {path} line {number}"
    if len(words) != 2 + NUMBERS:
        raise RequestError(
            f"{where}: {len(words)} words; must be 38: two names, two rotations, K0, K1, T_0to1"
        )
    try:
        values = np.array([float(word) for word in words[2:]])
    except ValueError as error:
        raise RequestError(f"{where}: {error}") from None
    if values[:2].any():
        raise RequestError(
            f"{where}: EXIF rotation {words[2]} {words[3]}: rotate the images first and write 0 0"
        )
    K0 = values[2:11].reshape(3, 3)
    K1 = values[11:20].reshape(3, 3)
    T = values[20:].reshape(4, 4)
    R = T[:3, :3]
    if (
        not np.isfinite(values).all()
        or not np.allclose(R @ R.T, np.eye(3), atol=1e-3)
        or np.linalg.det(R) < 0
    ):
        raise RequestError(f"{where}: T_0to1 does not contain a rotation")
    if min(K0[0, 0], K0[1, 1], K1[0, 0], K1[1, 1]) <= 0:
        raise RequestError(f"{where}: focal lengths must be positive")
    return words[0], words[1], Pose(K0, K1, T)


def normalized(points: np.ndarray, K: np.ndarray) -> np.ndarray:
    """(N, 2) pixels -> (N, 2) coordinates on the plane at depth one."""
    return (points - K[:2, 2]) / np.array([K[0, 0], K[1, 1]])


def epipolar_errors(points0: np.ndarray, points1: np.ndarray, T_0to1: np.ndarray) -> np.ndarray:
    """Symmetric epipolar distance, squared, of normalized points (K, 2); inf where a line is
    undefined.
    """
    R = T_0to1[:3, :3]
    t = T_0to1[:3, 3]
    x, y, z = t / max(np.linalg.norm(t), 1e-12)
    # The essential matrix, [t]x R with t of length one
    E = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]]) @ R
    p0, p1 = (
        np.concatenate([points, np.ones((len(points), 1))], axis=1) for points in (points0, points1)
    )
    lines1 = p0 @ E.T
    lines0 = p1 @ E
    product = np.sum(p1 * lines1, axis=1)
    with np.errstate(all="ignore"):
        error = product**2 * (1 / (lines1[:, :2] ** 2).sum(1) + 1 / (lines0[:, :2] ** 2).sum(1))
    return np.where(np.isfinite(error), error, np.inf)


def estimate(
    points0: np.ndarray, points1: np.ndarray, cameras: Pose, seed: int
) -> Optional[Tuple[np.ndarray, np.ndarray]]:
    """(R, t) by RANSAC over essential matrices, or None. points: matched pixels (K, 2); uses only K
    of `cameras`.
    """
    if len(points0) < MIN_MATCHES:
        return None
    K0 = cameras.K0
    K1 = cameras.K1
    points0 = normalized(points0, K0)
    points1 = normalized(points1, K1)
    threshold = RANSAC_PX / float(np.mean([K0[0, 0], K0[1, 1], K1[0, 0], K1[1, 1]]))
    cv2.setRNGSeed(seed)
    stacked, mask = cv2.findEssentialMat(
        points0, points1, np.eye(3), threshold=threshold, prob=CONFIDENCE, method=cv2.RANSAC
    )
    best = None
    max_inliers = 0
    for E in np.split(stacked, len(stacked) // 3) if stacked is not None else []:
        inliers, R, t, _ = cv2.recoverPose(E, points0, points1, np.eye(3), 1e9, mask=mask.copy())[
            :4
        ]
        if inliers > max_inliers:
            best = (R, t.ravel())
            max_inliers = inliers
    return best


def estimate_refined(
    points0: np.ndarray, points1: np.ndarray, cameras: Pose, deviations: Optional[np.ndarray] = None
) -> Optional[Tuple[np.ndarray, np.ndarray]]:
    """(R, t) of `MatchResult.relative_pose`, or None. deviations: (K,) px of aligned matches."""
    pose = geometry.relative_pose(points0, points1, cameras.K0, cameras.K1, RANSAC_PX, deviations)
    return None if pose.R is None or pose.t is None else (pose.R, pose.t)


def pose_error(estimated: Optional[Tuple[np.ndarray, np.ndarray]], truth: Pose) -> float:
    """Degrees: the larger of the errors of rotation and of translation direction; inf without an
    estimate.
    """
    if estimated is None:
        return float("inf")
    R, t = estimated
    true_R = truth.T_0to1[:3, :3]
    true_t = truth.T_0to1[:3, 3]
    rotation_cosine = np.clip((np.trace(R.T @ true_R) - 1) / 2, -1, 1)
    lengths = np.linalg.norm(t) * np.linalg.norm(true_t)
    direction_cosine = np.clip(abs(t @ true_t) / lengths, 0, 1) if lengths > 0 else 1.0
    return float(np.degrees(max(np.arccos(rotation_cosine), np.arccos(direction_cosine))))


def correct_matches(points0: np.ndarray, points1: np.ndarray, pose: Pose) -> np.ndarray:
    """(K,) bool: matches with an epipolar error below the limit. points: (K, 2) pixels."""
    points0 = normalized(points0, pose.K0)
    points1 = normalized(points1, pose.K1)
    return epipolar_errors(points0, points1, pose.T_0to1) < EPIPOLAR_LIMIT
