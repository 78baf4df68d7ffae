"""Matches and features as other libraries hold them: OpenCV, kornia, LightGlue and glue-factory, transformers."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence, Tuple

import cv2
import numpy as np
import torch
from torch import Tensor

from superglue_sift.descriptors import kind_of, root_sift_of
from superglue_sift.errors import RequestError
from superglue_sift.features import Features
from superglue_sift.match_result import MatchResult
from superglue_sift.sift import GEOMETRY


def to_dmatches(found: MatchResult) -> List[cv2.DMatch]:
    """OpenCV's matches, for `cv2.drawMatches` and others; distance = 1 - score."""
    return [cv2.DMatch(int(i), int(j), float(1.0 - s)) for (i, j), s in zip(found.matches, found.scores)]


def from_dmatches(matches: Sequence[cv2.DMatch], features0: Features, features1: Features) -> MatchResult:
    """`to_dmatches` back."""
    pairs = np.array([(m.queryIdx, m.trainIdx) for m in matches], np.int64).reshape(-1, 2)
    return MatchResult.of(features0, features1, pairs, np.array([1.0 - m.distance for m in matches], np.float32))


def to_keypoints(features: Features) -> List[cv2.KeyPoint]:
    """OpenCV's keypoints, in the same order."""
    return [cv2.KeyPoint(*(float(record[name]) for name in GEOMETRY)) for record in features.records]


def to_kornia(found: MatchResult) -> Tuple[Tensor, Tensor]:
    """What kornia's matchers return: distances (K, 1) float32, 1 - score, and indices (K, 2) int64."""
    return torch.from_numpy(1.0 - found.scores).reshape(-1, 1), torch.from_numpy(found.matches)


def from_kornia(distances: Tensor, indices: Tensor, features0: Features, features1: Features) -> MatchResult:
    """Matches of kornia's matchers; 1 - distance is taken for the score."""
    return MatchResult.of(features0, features1, indices.cpu().numpy(), 1.0 - distances.cpu().numpy().ravel())


def to_lightglue(features: Features) -> Dict[str, Tensor]:
    """One image of SIFT as LightGlue and glue-factory take it, a batch of one, float32.

    keypoints (1, N, 2) pixels; descriptors (1, N, 128) RootSIFT; keypoint_scores, scales (pixels) and oris (radians)
    (1, N); image_size (1, 2) width, height. Raises RequestError for features of others.
    """
    records = features.records
    if kind_of(records.dtype)[0] != "sift":
        raise RequestError("LightGlue's and hloc's features are written of SIFT alone; these are of another")
    values = {
        "keypoints": features.keypoints,
        "keypoint_scores": records["score"],
        "descriptors": root_sift_of(records["descriptor"]),
        "scales": records["scale"],
        "oris": np.deg2rad(records["angle"]),
        "image_size": np.array(features.size),
    }
    return {name: torch.from_numpy(np.array(value, np.float32))[None] for name, value in values.items()}


def from_lightglue(data: Mapping[str, Any]) -> Features:
    """`to_lightglue` back, or another program's SIFT; a batch of one or none. Raises RequestError as `Features.of`."""

    def plain(name: str, axes: int) -> np.ndarray:
        value = data[name] if name in data else data["keypoint_" + name]
        value = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
        return value[0] if value.ndim > axes else value

    width, height = plain("image_size", 1)
    scales, scores, angles = plain("scales", 1), plain("scores", 1), np.mod(np.rad2deg(plain("oris", 1)), 360.0)
    descriptors, size = whole_sift(plain("descriptors", 2)), (int(width), int(height))
    return Features.of(plain("keypoints", 2), scales, angles, scores, descriptors, size)


def whole_sift(descriptors: np.ndarray) -> np.ndarray:
    """(N, 128) SIFT from 0 to 255 of RootSIFT, entries from 0 to 1; what is SIFT already stays.

    RootSIFT is the square root of SIFT divided by its sum; the length of 512 that OpenCV gives SIFT comes back.
    """
    values = np.asarray(descriptors, np.float32)
    if not values.size or values.max() > 1.0 + 1e-3:
        return values
    squares = np.square(values)
    length = np.maximum(np.linalg.norm(squares, axis=1, keepdims=True), 1e-12)
    return np.minimum(np.rint(512.0 * squares / length), 255.0)


def to_lightglue_matches(found: MatchResult) -> Dict[str, Any]:
    """What LightGlue returns of a batch of one.

    matches0 (1, M), matches1 (1, N) int64, -1 without a match; matching_scores0, matching_scores1 float32, 0 without;
    matches [(K, 2)] and scores [(K,)], a list.
    """
    answer: Dict[str, Any] = {"matches": [torch.from_numpy(found.matches)], "scores": [torch.from_numpy(found.scores)]}
    for side in (0, 1):
        partners, scores = (torch.from_numpy(each)[None] for each in found.dense(side))
        answer[f"matches{side}"], answer[f"matching_scores{side}"] = partners, scores
    return answer


def from_lightglue_matches(data: Mapping[str, Any], features0: Features, features1: Features) -> MatchResult:
    """The matches of LightGlue, glue-factory or any matcher that gives `matches0` and `matching_scores0`."""
    matches0, scores0 = (np.asarray(data[name]).reshape(-1) for name in ("matches0", "matching_scores0"))
    return MatchResult.of(features0, features1, matches0.astype(np.int64), scores0.astype(np.float32))


def to_transformers(found: MatchResult) -> Dict[str, Tensor]:
    """One entry of what `post_process_keypoint_matching` of transformers' image processors returns.

    keypoints0, keypoints1 (K, 2) pixels, int32 as theirs; matching_scores (K,).
    """
    points = [torch.from_numpy(each).round().to(torch.int32) for each in (found.points0, found.points1)]
    return {"keypoints0": points[0], "keypoints1": points[1], "matching_scores": torch.from_numpy(found.scores)}
