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
from scipy.sparse.csgraph import connected_components

from pipeline.errors import RequestError
from pipeline.evaluate import hpatches
from pipeline.evaluate.estimators import Points
from pipeline.evaluate.inputs import Pose, Scene, Source, ViewPair
from superglue_sift.geometry.two_view import (
    MIN_ESSENTIAL,
    POSE_PX,
    inverse,
    relative_pose,
    to_homogeneous,
    transform,
)

NUMBERS = 2 + 9 + 9 + 16  # on a line, after the two names
# Two images and their cameras, intrinsics in pixels of the stored images
Line = Tuple[str, str, Pose]
Motion = Tuple[np.ndarray, np.ndarray]  # R (3, 3), t (3,)
# A match is correct below this symmetric epipolar distance, squared, in normalized coordinates.
EPIPOLAR_LIMIT = 5e-4
RANSAC_PX = 1.0  # inlier threshold in pixels, divided by the mean focal length
CONFIDENCE = 0.99999
FAR = 1e9  # depth, in baselines, beyond which points do not decide between the four motions
RULES = {  # for protocol.json
    "truth": (
        f"symmetric epipolar distance, squared, below {EPIPOLAR_LIMIT} in normalized coordinates"
    ),
    "estimator": (
        f"cv2.findEssentialMat, RANSAC at {RANSAC_PX:g} px over the focal length, probability"
        f" {CONFIDENCE}"
    ),
    "refined": f"PoseLib's LO-RANSAC at {POSE_PX:g} px",
}


class PosePairs(Source):
    """Pairs of a `pairs_with_gt.txt`, with their scenes from `scene_names`. short_side: see
    `HPatchesPairs`.
    """

    def __init__(self, file: Path, folder: Path, short_side: int = 480):
        self.pairs = read_pairs(file)
        self.folder = folder
        self.short_side = short_side
        self.scenes = [(name, 1) for name in scene_names([pair[:2] for pair in self.pairs])]

    def load(self, index: int) -> Scene:
        """Read one pair. Raises RequestError for an unreadable image: no pair is skipped
        silently.
        """
        name0, name1, pose = self.pairs[index]
        images = []
        intrinsics = []
        for name, K in ((name0, pose.K0), (name1, pose.K1)):
            image, scaling = hpatches.read_resized(self.folder / name, self.short_side)
            images.append(image)
            intrinsics.append(scaling @ K)
        K0, K1 = intrinsics
        known = ViewPair(f"{name0} {name1}", 0, 1, Pose(K0, K1, pose.T_0to1))
        return Scene(self.scenes[index][0], images, [known])

    def in_color(self, index: int, image: int, gray: np.ndarray) -> np.ndarray:
        name0, name1, _ = self.pairs[index]
        return hpatches.in_color(self.folder / (name0, name1)[image], gray)


def scene_names(pairs: Sequence[Sequence[str]]) -> List[str]:
    """The scene of each pair of images: a connected component of the pairs; with several folders,
    also of the folders.

    Its name: that folder, or the first of its images.
    """
    folders = {name: str(Path(name).parent) for pair in pairs for name in pair}
    several = len(set(folders.values())) > 1
    links = [*pairs, *(folders.items() if several else ())]
    names, ends = np.unique(np.array(links, str), return_inverse=True)
    firsts, seconds = ends.reshape(-1, 2).T
    graph = np.zeros((len(names), len(names)), bool)
    graph[firsts, seconds] = True
    _, labels = connected_components(graph, directed=False)
    scenes = labels[firsts[: len(pairs)]]
    starts: Dict[int, str] = {}
    for scene, (first, _) in zip(scenes, pairs):
        starts.setdefault(scene, folders[first] if several else first)
    return [starts[scene] for scene in scenes]


def read_pairs(path: Path) -> List[Line]:
    """Read the pairs of a `pairs_with_gt.txt`. Raises RequestError naming the line that is
    wrong.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--poses {path}: cannot be read as text: {error}") from None
    pairs = [read_line(path, n, line.split()) for n, line in enumerate(lines, 1) if line.strip()]
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
        values = np.array(words[2:], np.float64)
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


def normalize(points: np.ndarray, K: np.ndarray) -> np.ndarray:
    """(N, 2) pixels -> (N, 2) coordinates on the plane at depth one."""
    return transform(points, inverse(K))


def epipolar_errors(points0: np.ndarray, points1: np.ndarray, T_0to1: np.ndarray) -> np.ndarray:
    """Symmetric epipolar distance, squared, of normalized points (K, 2); inf where a line is
    undefined.
    """
    x, y, z = T_0to1[:3, 3] / max(np.linalg.norm(T_0to1[:3, 3]), 1e-12)
    # the essential matrix, [t]x R with t of length one
    E = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]]) @ T_0to1[:3, :3]
    p0 = to_homogeneous(points0)
    p1 = to_homogeneous(points1)
    lines1 = p0 @ E.T
    lines0 = p1 @ E
    product = np.sum(p1 * lines1, axis=1)
    with np.errstate(all="ignore"):
        error = product**2 * sum(1 / (lines[:, :2] ** 2).sum(1) for lines in (lines1, lines0))
    return np.where(np.isfinite(error), error, np.inf)


def estimate(found: Points, cameras: Pose) -> Optional[Motion]:
    """RANSAC over essential matrices, from the intrinsics of `cameras`."""
    if len(found.points0) < MIN_ESSENTIAL:
        return None
    K0 = cameras.K0
    K1 = cameras.K1
    flat = normalize(found.points0, K0), normalize(found.points1, K1)
    threshold = RANSAC_PX / float(np.mean([K0[0, 0], K0[1, 1], K1[0, 0], K1[1, 1]]))
    stacked, mask = cv2.findEssentialMat(*flat, np.eye(3), cv2.RANSAC, CONFIDENCE, threshold)
    best = None
    most = 0
    for E in np.split(stacked, len(stacked) // 3) if stacked is not None else []:
        inliers, R, t, *_ = cv2.recoverPose(E, *flat, np.eye(3), FAR, mask=mask.copy())
        if inliers > most:
            best = R, t.ravel()
            most = inliers
    return best


def estimate_refined(found: Points, cameras: Pose) -> Optional[Motion]:
    """That of `MatchResult.relative_pose`."""
    pose = relative_pose(found.points0, found.points1, cameras.K0, cameras.K1)
    return None if pose.R is None or pose.t is None else (pose.R, pose.t)


ESTIMATORS = {"pose": estimate, "refined": estimate_refined}


def pose_error(estimated: Optional[Motion], truth: Pose) -> float:
    """Degrees: the larger of the errors of rotation and of translation direction; inf without an
    estimate.
    """
    if estimated is None:
        return float("inf")
    R, t = estimated
    true_t = truth.T_0to1[:3, 3]
    rotation = (np.trace(R.T @ truth.T_0to1[:3, :3]) - 1) / 2
    lengths = np.linalg.norm(t) * np.linalg.norm(true_t)
    direction = abs(t @ true_t) / lengths if lengths > 0 else 1.0
    return float(np.degrees(np.arccos(np.clip(np.array([rotation, direction]), -1, 1)).max()))


def correct_matches(points0: np.ndarray, points1: np.ndarray, pose: Pose) -> np.ndarray:
    """(K,) bool: matches with an epipolar error below the limit. points: (K, 2) pixels."""
    flat = normalize(points0, pose.K0), normalize(points1, pose.K1)
    return epipolar_errors(*flat, pose.T_0to1) < EPIPOLAR_LIMIT
