"""Matches of pairs of images by the network, from their keypoints."""

from __future__ import annotations

from typing import List, NamedTuple, Sequence, Tuple

import numpy as np
import torch

from superglue_sift.network.batch import Pair, from_pairs, size_class
from superglue_sift.network.superglue import SuperGlue, mutual_matches


class PairMatches(NamedTuple):
    """Matches of one pair. matches0: (M,) int64, index in image 1 or -1; scores0: (M,), 0 to 1."""

    matches0: np.ndarray
    scores0: np.ndarray

    def above(self, threshold: float) -> PairMatches:
        """The matches with a score above `threshold`."""
        keep = self.scores0 > threshold
        return PairMatches(np.where(keep, self.matches0, -1), np.where(keep, self.scores0, 0.0))


@torch.no_grad()
def match_pairs(
    model: SuperGlue, pairs: Sequence[Pair], device: str, chosen: Sequence[Sequence[np.ndarray]]
) -> List[PairMatches]:
    """All mutual matches of the network for each pair, whatever their scores, in one batch.

    chosen: for each pair, ascending indices of the keypoints of both images that the network sees
    (`likely.choose`).
    """
    if not pairs:
        return []
    seen = [
        Pair(pair.records0[index0], pair.records1[index1], pair.size0, pair.size1)
        for pair, (index0, index1) in zip(pairs, chosen)
    ]
    order, batches = from_pairs(seen).to(device).size_classes()
    if model.compiled:
        batches = [part.pad(len(part), size_class(part.width)) for part in batches]
    rows = []
    for log_P in model.assign(batches)[0]:
        matches = mutual_matches(log_P, threshold=0.0)
        rows += zip(matches.matches0.cpu().numpy(), matches.matching_scores0.cpu().numpy())
    found = dict(zip(order, rows))
    return [
        _of_all(found[place], len(pair.records0), chosen[place]) for place, pair in enumerate(pairs)
    ]


def _of_all(
    found: Tuple[np.ndarray, np.ndarray], count: int, chosen: Sequence[np.ndarray]
) -> PairMatches:
    """Matches and scores of the chosen of `count` keypoints, before padding, as those of all."""
    index0, index1 = chosen
    of_chosen, scores = (values[: len(index0)] for values in found)
    matches0 = np.full(count, -1)
    scores0 = np.zeros(count, np.float32)
    matches0[index0] = np.append(index1, -1)[of_chosen]  # the last is for -1, no match
    scores0[index0] = scores
    return PairMatches(matches0, scores0)
