"""Convert matches and features for other libraries: OpenCV, LightGlue and glue-factory."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence

import cv2
import numpy as np
import torch
from torch import Tensor

from superglue_sift.errors import RequestError
from superglue_sift.features.descriptors import to_root_sift, to_sift
from superglue_sift.features.features import TYPICAL_SCORE, Features
from superglue_sift.match_result import MatchResult
from superglue_sift.matches import Matches


def to_dmatches(result: MatchResult) -> List[cv2.DMatch]:
    """Convert to OpenCV's matches, for `cv2.drawMatches` and others. Distances are 1 - score."""
    return [
        cv2.DMatch(int(index0), int(index1), float(1.0 - score))
        for (index0, index1), score in zip(result.matches, result.scores)
    ]


def from_dmatches(
    matches: Sequence[cv2.DMatch], features0: Features, features1: Features
) -> MatchResult:
    """Convert OpenCV's matches to a result. This is the inverse of `to_dmatches`.

    Args:
        matches: OpenCV's matches, whose distances are 1 - score.
        features0: the features of image 0, to which `queryIdx` belongs.
        features1: the features of image 1, to which `trainIdx` belongs.
    """
    indices = [(match.queryIdx, match.trainIdx) for match in matches]
    scores = [1.0 - match.distance for match in matches]
    # Without matches the array has the shape (0,) before it is reshaped.
    scored_matches = Matches(
        np.array(indices, np.int64).reshape(-1, 2), np.array(scores, np.float32)
    )
    return MatchResult.of(features0, features1, scored_matches)


def to_keypoints(features: Features) -> List[cv2.KeyPoint]:
    """Convert to OpenCV's keypoints with their first orientation, in the same order."""
    columns = features.keypoints, features.scales, features.oris[:, 0], features.scores
    return [
        cv2.KeyPoint(*map(float, (x, y, scale, ori, score)))
        for (x, y), scale, ori, score in zip(*columns)
    ]


def to_lightglue(features: Features) -> Dict[str, Tensor]:
    """Convert SIFT features of an image to the input of LightGlue and glue-factory.

    The input is a batch of one, float32.

    keypoints: (1, N, 2) pixels.
    descriptors: (1, N, 128) RootSIFT.
    keypoint_scores, scales, oris: (1, N). Scales are in pixels, and oris in radians.
    image_size: (1, 2), width and height.

    Raises:
        RequestError: For other features than SIFT.
    """
    if not features.is_sift:
        raise RequestError(
            "LightGlue and hloc: only SIFT features can be converted, these are others"
        )
    # Convert to RootSIFT and radians. Scales stay diameters in pixels.
    values = {
        "keypoints": features.keypoints,
        "keypoint_scores": features.scores,
        "descriptors": to_root_sift(features.descriptors[:, 0]),
        "scales": features.scales,
        "oris": np.deg2rad(features.oris[:, 0]),
        "image_size": np.array(features.image_size),
    }
    return {
        name: torch.from_numpy(np.array(value, np.float32))[None] for name, value in values.items()
    }


def from_lightglue(data: Mapping[str, Any]) -> Features:
    """Convert LightGlue's features. This is the inverse of `to_lightglue`.

    SIFT of other programs can be converted, too. Scores that are missing or 0 become the typical
    score.

    Args:
        data: tensors or arrays of a batch of one, with the names and units of `to_lightglue`.

    Raises:
        RequestError: If an array has a wrong shape or a value out of range.
    """
    # (1, ...) tensors or arrays -> (...) arrays
    values = {name: torch.as_tensor(value, device="cpu")[0].numpy() for name, value in data.items()}
    # Convert to OpenCV's units, degrees from 0 to 360 and descriptors from 0 to 255.
    scores = values.get("keypoint_scores", np.zeros(len(values["keypoints"])))
    width, height = values["image_size"]
    return Features.of(
        values["keypoints"],
        values["scales"],
        np.mod(np.rad2deg(values["oris"]), 360.0),
        np.where(scores > 0, scores, np.float32(TYPICAL_SCORE)),
        to_sift(values["descriptors"]),
        (int(width), int(height)),
    )


def to_lightglue_matches(result: MatchResult) -> Dict[str, Any]:
    """Convert to the output of LightGlue for a batch of one.

    matches0, matches1: (1, M) and (1, N) int64. An entry is -1 if the keypoint has no match.
    matching_scores0, matching_scores1: (1, M) and (1, N) float32. An entry is 0 without a match.
    matches, scores: lists of one array, (K, 2) and (K,).
    """
    output: Dict[str, Any] = {
        "matches": [torch.from_numpy(result.matches)],
        "scores": [torch.from_numpy(result.scores)],
    }
    # (K, 2) -> (1, M) and (1, N)
    for image in (0, 1):
        indices, scores = (torch.from_numpy(values)[None] for values in result.to_dense(image))
        output[f"matches{image}"] = indices
        output[f"matching_scores{image}"] = scores
    return output


def from_lightglue_matches(
    data: Mapping[str, Any], features0: Features, features1: Features
) -> MatchResult:
    """Convert the output of LightGlue, glue-factory or a similar matcher to a result.

    Args:
        data: tensors or arrays for a pair, alone or as a batch of one. `matches0` is (M,) or
            (1, M), and -1 for a keypoint without a match. `matching_scores0` has the same shape.
        features0: the features of image 0.
        features1: the features of image 1.
    """
    matches0, scores0 = (
        torch.as_tensor(data[name], device="cpu").detach().reshape(-1)
        for name in ("matches0", "matching_scores0")
    )
    # (M,) -> (K, 2)
    matches = Matches.from_dense(matches0.long().numpy(), scores0.float().numpy())
    return MatchResult.of(features0, features1, matches)
