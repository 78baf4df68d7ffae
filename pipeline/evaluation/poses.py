"""Relative camera poses: pairs of images with intrinsics and the true pose, as SuperGlue's paper evaluates them.

A line of `pairs_with_gt.txt`: two image names, two EXIF rotations, K0 and K1 (nine numbers each), T_0to1 (sixteen),
row by row. Pose error: the larger of the angles between true and estimated rotation and translation direction, in
degrees (the sign of the translation is not observable from an essential matrix). A pair without an estimate has an
infinite error. Source: arXiv 1911.11763, sections 5.2 and 5.3.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

import cv2
import numpy as np

from pipeline.errors import RequestError
from pipeline.evaluation import hpatches, metrics
from pipeline.evaluation.pairs import image_size

NUMBERS = 2 + 9 + 9 + 16  # on a line, after the two names
AUC_DEGREES = (5, 10, 20)
EPIPOLAR_LIMIT = (
    5e-4  # a match is right below this symmetric epipolar distance, squared, in normalized coordinates
)
RANSAC_PX = 1.0  # inlier threshold in pixels, divided by the mean focal length
CONFIDENCE = 0.99999
RULES = {  # for protocol.json
    "truth": f"symmetric epipolar distance, squared, below {EPIPOLAR_LIMIT} in normalized coordinates",
    "estimator": f"cv2.findEssentialMat, RANSAC at {RANSAC_PX:g} px over the focal length, probability {CONFIDENCE}",
}
LEAST = 5  # matches an essential matrix needs


@dataclass(frozen=True)
class PosePair:
    """Two images and what is known of their cameras. K0, K1: (3, 3) pixels; T_0to1: (4, 4), points 0 -> 1."""

    name0: str
    name1: str
    K0: np.ndarray
    K1: np.ndarray
    T_0to1: np.ndarray


@dataclass(frozen=True)
class PoseRow:
    """Figures of one matcher on one pair. error: degrees, inf without an estimate."""

    pair: str
    matcher: str
    keypoints: int
    matches: int
    correct: int
    error: float

    @property
    def precision(self) -> float:
        """Right matches among the matches; 0 without any."""
        return self.correct / self.matches if self.matches else 0.0

    @property
    def matching_score(self) -> float:
        """Right matches among the keypoints of image 0; 0 without any."""
        return self.correct / self.keypoints if self.keypoints else 0.0


def read_pairs(path: Path) -> List[PosePair]:
    """Pairs of a `pairs_with_gt.txt`. Raises RequestError naming the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise RequestError(f"--poses {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RequestError(f"--poses {path}: is no text; one pair on each line is expected") from None
    found = [read_line(path, number, line.split()) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise RequestError(f"--poses {path}: holds no pair")
    return found


def read_line(path: Path, number: int, words: Sequence[str]) -> PosePair:
    """One line. Raises RequestError."""
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
            f"{where}: EXIF rotation {words[2]} {words[3]}: turn the images first and write 0 0"
        )
    K0, K1, T = values[2:11].reshape(3, 3), values[11:20].reshape(3, 3), values[20:].reshape(4, 4)
    R = T[:3, :3]
    if (
        not np.isfinite(values).all()
        or not np.allclose(R @ R.T, np.eye(3), atol=1e-3)
        or np.linalg.det(R) < 0
    ):
        raise RequestError(f"{where}: T_0to1 does not hold a rotation")
    if min(K0[0, 0], K0[1, 1], K1[0, 0], K1[1, 1]) <= 0:
        raise RequestError(f"{where}: focal lengths must be positive")
    return PosePair(words[0], words[1], K0, K1, T)


def load_view(folder: Path, name: str, K: np.ndarray, short_side: int) -> Tuple[np.ndarray, np.ndarray]:
    """Image (H, W) uint8 with a shorter side of `short_side` (0: as it is) and its intrinsics."""
    original = hpatches.read_image(folder / name)
    image = hpatches.resize_short_side(original, short_side, folder / name)
    return image, hpatches.scaling(image_size(original), image_size(image)) @ K


def normalized(points: np.ndarray, K: np.ndarray) -> np.ndarray:
    """(N, 2) pixels -> (N, 2) coordinates on the plane at depth one."""
    return (points - K[:2, 2]) / np.array([K[0, 0], K[1, 1]])


def essential(T_0to1: np.ndarray) -> np.ndarray:
    """(3, 3) essential matrix of a pose: [t]x R with t of length one."""
    R, t = T_0to1[:3, :3], T_0to1[:3, 3]
    x, y, z = t / max(np.linalg.norm(t), 1e-12)
    return np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]]) @ R


def epipolar_errors(points0: np.ndarray, points1: np.ndarray, T_0to1: np.ndarray) -> np.ndarray:
    """Symmetric epipolar distance, squared, of normalized points (K, 2); inf where a line is undefined."""
    E = essential(T_0to1)
    p0, p1 = (np.concatenate([points, np.ones((len(points), 1))], axis=1) for points in (points0, points1))
    lines1, lines0 = p0 @ E.T, p1 @ E
    product = np.sum(p1 * lines1, axis=1)
    with np.errstate(all="ignore"):
        error = product**2 * (1 / (lines1[:, :2] ** 2).sum(1) + 1 / (lines0[:, :2] ** 2).sum(1))
    return np.where(np.isfinite(error), error, np.inf)


def estimate(points0: np.ndarray, points1: np.ndarray, threshold: float, seed: int) -> Optional[Tuple]:
    """(R, t) of normalized points by RANSAC over essential matrices, or None. threshold: in those coordinates."""
    if len(points0) < LEAST:
        return None
    cv2.setRNGSeed(seed)
    stacked, mask = cv2.findEssentialMat(
        points0, points1, np.eye(3), threshold=threshold, prob=CONFIDENCE, method=cv2.RANSAC
    )
    best, most = None, 0
    for E in np.split(stacked, len(stacked) // 3) if stacked is not None else []:
        inliers, R, t, _ = cv2.recoverPose(E, points0, points1, np.eye(3), 1e9, mask=mask.copy())[:4]
        if inliers > most:
            best, most = (R, t.ravel()), inliers
    return best


def pose_error(pose: Optional[Tuple[np.ndarray, np.ndarray]], T_0to1: np.ndarray) -> float:
    """Degrees: the larger of the errors of rotation and of translation direction; inf without an estimate."""
    if pose is None:
        return float("inf")
    R, t = pose
    true = T_0to1[:3, 3]
    turn = np.clip((np.trace(R.T @ T_0to1[:3, :3]) - 1) / 2, -1, 1)
    lengths = np.linalg.norm(t) * np.linalg.norm(true)
    along = np.clip(abs(t @ true) / lengths, 0, 1) if lengths > 0 else 1.0
    return float(np.degrees(max(np.arccos(turn), np.arccos(along))))


def score(
    name: str,
    matcher: str,
    keypoints: int,
    points: Sequence[np.ndarray],
    K: Sequence[np.ndarray],
    T_0to1: np.ndarray,
) -> PoseRow:
    """The row of one matcher. points: matched pixels (K, 2) in both images; K: both intrinsics."""
    flat0, flat1 = (normalized(side, intrinsics) for side, intrinsics in zip(points, K))
    focal = float(np.mean([K[0][0, 0], K[0][1, 1], K[1][0, 0], K[1][1, 1]]))
    pose = estimate(flat0, flat1, RANSAC_PX / focal, zlib.crc32(name.encode()) & 0x7FFFFFFF)
    correct = int(right_matches(points, K, T_0to1).sum())
    return PoseRow(name, matcher, keypoints, len(flat0), correct, pose_error(pose, T_0to1))


def right_matches(points: Sequence[np.ndarray], K: Sequence[np.ndarray], T_0to1: np.ndarray) -> np.ndarray:
    """(N,) bool: matches whose epipolar error is below the limit. points: pixels (N, 2) in both images."""
    flat0, flat1 = (normalized(side, intrinsics) for side, intrinsics in zip(points, K))
    return epipolar_errors(flat0, flat1, T_0to1) < EPIPOLAR_LIMIT


def values_of(rows: Sequence[PoseRow]) -> Dict[str, np.ndarray]:
    """One value per pair of each figure, (P,) float64, as the intervals take them."""
    errors = np.array([row.error for row in rows], np.float64)
    return {
        "precision": np.array([row.precision for row in rows], np.float64),
        "matching_score": np.array([row.matching_score for row in rows], np.float64),
        **{f"auc_pose_{degrees}": np.maximum(0.0, 1.0 - errors / degrees) for degrees in AUC_DEGREES},
    }


def summarize(rows: Sequence[PoseRow], matchers: Sequence[str]) -> Dict[str, object]:
    """Flat names for metrics.json: pairs, matches, precision, matching_score, auc_pose_5, _10, _20."""
    figures: Dict[str, object] = {}
    for matcher in matchers:
        own = [row for row in rows if row.matcher == matcher]
        values = {
            "pairs": len(own),
            "matches": np.mean([row.matches for row in own]),
            "precision": np.mean([row.precision for row in own]),
            "matching_score": np.mean([row.matching_score for row in own]),
            **{
                f"auc_pose_{degrees}": metrics.auc([row.error for row in own], degrees)
                for degrees in AUC_DEGREES
            },
        }
        figures.update({f"{matcher}.{name}": round(float(value), 6) for name, value in values.items()})
        figures[f"{matcher}.pairs"] = len(own)
    return figures
