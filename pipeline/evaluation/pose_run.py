"""The command behind `evaluate --poses`: all matchers on pairs with known cameras."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, List

import numpy as np
import torch

from pipeline.evaluation import matchers, poses, scoring
from pipeline.evaluation.matchers import MATCHERS, OURS
from pipeline.evaluation.pairs import Pair, image_size
from pipeline.evaluation.run import Settings
from pipeline.features import sift
from pipeline.runtime.progress import progress


def evaluate(
    listing: Path, folder: Path, short_side: int, model: torch.nn.Module, device: str, settings: Settings
) -> List[poses.PoseRow]:
    """Rows of all matchers on all pairs of a `pairs_with_gt.txt`; images lie in `folder`.

    Raises RequestError for a wrong line or an unreadable image.
    """
    rows: List[poses.PoseRow] = []
    for number, known in enumerate(progress(poses.read_pairs(listing), desc="evaluate", unit="pair")):
        views = [
            poses.load_view(folder, name, K, short_side)
            for name, K in ((known.name0, known.K0), (known.name1, known.K1))
        ]
        keypoints = [sift.extract(image, settings.max_keypoints) for image, _ in views]
        sizes = [image_size(image) for image, _ in views]
        name = f"{known.name0} {known.name1}"
        pair = Pair(name, name, number, 0, *keypoints, *sizes, np.eye(3), {})
        answers = matchers.match_baselines(pair, settings.ratio)
        _, ours = next(matchers.match_superglue(model, [[pair]], device))
        answers[OURS] = ours.above(settings.threshold)
        for matcher in MATCHERS:
            points = scoring.matched_points(pair, answers[matcher])[:2]
            intrinsics = [K for _, K in views]
            rows.append(poses.score(name, matcher, len(keypoints[0]), points, intrinsics, known.T_0to1))
    return rows


def lines_of(rows: List[poses.PoseRow]) -> List[Dict[str, object]]:
    """Lines of pairs.csv; error_pose in degrees, `inf` without an estimate."""
    return [
        {
            "pair": row.pair,
            "matcher": row.matcher,
            "keypoints0": row.keypoints,
            "matches": row.matches,
            "correct": row.correct,
            "precision": round(row.precision, 6),
            "matching_score": round(row.matching_score, 6),
            "error_pose": round(row.error, 6),
        }
        for row in rows
    ]
