"""The matchers that are compared, on the same keypoints: ours, and nearest neighbours of RootSIFT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Iterator, List, Sequence, Tuple

import numpy as np
import torch

from pipeline.evaluation.pairs import Pair
from superglue_sift import batch as pair_batch
from superglue_sift import superglue

OURS = "superglue"
BASELINES = ("nn", "mutual_nn", "ratio_test")
MATCHERS = (OURS, *BASELINES)  # always there, in the order of every table


@dataclass(frozen=True)
class PairMatches:
    """A matcher's answer. matches0: (M,) int64, index in image 1 or -1; scores0: (M,) float in 0..1."""

    matches0: np.ndarray
    scores0: np.ndarray

    def above(self, threshold: float) -> PairMatches:
        """The same without matches whose score is not above `threshold`."""
        keep = self.scores0 > threshold
        return PairMatches(np.where(keep, self.matches0, -1), np.where(keep, self.scores0, 0.0))


def root_sift(descriptors: np.ndarray) -> np.ndarray:
    """(N, 128) uint8 -> float32 rows of length 1 (Arandjelovic and Zisserman 2012)."""
    values = descriptors.astype(np.float32)
    shares = values / np.maximum(values.sum(axis=1, keepdims=True), 1.0)
    return np.sqrt(shares)


def distances(descriptors0: np.ndarray, descriptors1: np.ndarray) -> np.ndarray:
    """Euclidean distances of RootSIFT. (M, 128), (N, 128) uint8 -> (M, N) float32 in 0..sqrt(2)."""
    similarity = root_sift(descriptors0) @ root_sift(descriptors1).T
    return np.sqrt(np.maximum(2.0 - 2.0 * similarity, 0.0))


def match_neighbours(distance: np.ndarray, mutual: bool, ratio: float = 1.0) -> PairMatches:
    """Nearest neighbours in a (M, N) distance matrix, each with score 1.

    mutual: keep a match only when each is the other's nearest. ratio: keep it only when the nearest is closer
    than `ratio` times the second nearest (Lowe 2004); 1 means no such test. With one keypoint in image 1
    there is no second, and the test cannot be passed.
    """
    count0, count1 = distance.shape
    if count0 == 0 or count1 == 0:
        return PairMatches(np.full(count0, -1, np.int64), np.zeros(count0, np.float32))
    nearest = distance.argmin(axis=1)
    keep = np.ones(count0, bool)
    if mutual:
        keep &= distance.argmin(axis=0)[nearest] == np.arange(count0)
    if ratio < 1.0:
        second = np.partition(distance, 1, axis=1)[:, 1] if count1 > 1 else np.zeros(count0, np.float32)
        keep &= distance[np.arange(count0), nearest] < ratio * second
    return PairMatches(np.where(keep, nearest, -1).astype(np.int64), keep.astype(np.float32))


def match_baselines(pair: Pair, ratio: float) -> Dict[str, PairMatches]:
    """All nearest-neighbour matchers on one pair, by name."""
    distance = distances(pair.keypoints0["descriptor"], pair.keypoints1["descriptor"])
    return {
        "nn": match_neighbours(distance, mutual=False),
        "mutual_nn": match_neighbours(distance, mutual=True),
        "ratio_test": match_neighbours(distance, mutual=True, ratio=ratio),
    }


def batch_of(pairs: Sequence[Pair]) -> pair_batch.PairBatch:
    """A padded batch for the network."""
    return pair_batch.from_pairs(
        [pair_batch.Pair(pair.keypoints0, pair.keypoints1, pair.size0, pair.size1) for pair in pairs]
    )


def match_superglue(
    model: torch.nn.Module, batches: Sequence[Sequence[Pair]], device: str
) -> Iterator[Tuple[Pair, PairMatches]]:
    """Ours, batch by batch, with every mutual match whatever its score (see `PairMatches.above`).

    Batches are given, not made here: the same batches give the same bits, however they are shared out.
    """
    for pairs in batches:
        batch = batch_of(pairs).to(device)
        with torch.no_grad():
            size = (batch.keypoints0.shape[1], batch.keypoints1.shape[1])
            found = superglue.mutual_matches(model(batch), size, threshold=0.0)
        matches0, scores0 = found.matches0.cpu().numpy(), found.matching_scores0.cpu().numpy()
        for row, pair in enumerate(pairs):
            count = len(pair.keypoints0)
            yield pair, PairMatches(matches0[row, :count].astype(np.int64), scores0[row, :count])


def batches_of(pairs: Sequence[Pair], size: int) -> List[Sequence[Pair]]:
    """Consecutive groups of `size` pairs; the last may be smaller."""
    return [pairs[start : start + size] for start in range(0, len(pairs), size)]
