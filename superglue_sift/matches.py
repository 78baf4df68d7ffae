"""The type `Matches` holds the matches of two images everywhere in the library.

The ratio test, the network, guided matching, verification, refinement and scoring take and return
it. It holds indices of keypoints and scores, but no positions, which belong to the features.
"""

from __future__ import annotations

import dataclasses
from typing import Tuple

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Matches:
    """K matches of two images with M and N keypoints.

    Each keypoint has at most one match. Only in the result of `nearest.match_nearest`, a keypoint
    of image 1 may have several.

    Attributes:
        indices: (K, 2) int64, the keypoint in image 0 and its match in image 1.
        scores: (K,) float32, from 0 to 1, the confidence of each match.
    """

    indices: np.ndarray
    scores: np.ndarray

    def __len__(self) -> int:
        """Return the number of matches, K."""
        return len(self.indices)

    def select(self, index: np.ndarray) -> Matches:
        """Keep some of the matches.

        Args:
            index: (K,) bool, whether each match is kept, or (k,) indices of the matches.
        """
        return Matches(self.indices[index], self.scores[index])

    def keep_above(self, threshold: float) -> Matches:
        """Keep the matches with a score above `threshold`."""
        return self.select(self.scores > threshold)

    def sort(self) -> Matches:
        """Return the matches in the order of image 0's keypoints."""
        return self.select(np.argsort(self.indices[:, 0], kind="stable"))

    def join(self, other: Matches) -> Matches:
        """Join two sets of matches, sorted. A match that is in both has the score of the first."""
        indices = np.concatenate([self.indices, other.indices])
        scores = np.concatenate([self.scores, other.scores])
        # `np.unique` returns the first of equal rows.
        distinct, rows = np.unique(indices, axis=0, return_index=True)
        return Matches(distinct, scores[rows])

    def drop_keypoints_of(self, other: Matches) -> Matches:
        """Drop the matches that share a keypoint with a match of `other`."""
        is_taken0, is_taken1 = map(np.isin, self.indices.T, other.indices.T)
        return self.select(~(is_taken0 | is_taken1))

    def get_points(self, keypoints: Tuple[np.ndarray, np.ndarray]) -> Tuple[np.ndarray, np.ndarray]:
        """Return the positions of the matches in both images, (K, 2) float64 px each.

        Args:
            keypoints: (M, 2) and (N, 2) px, positions of all keypoints.
        """
        index0, index1 = self.indices.T
        return keypoints[0][index0].astype(np.float64), keypoints[1][index1].astype(np.float64)

    def renumber(self, index0: np.ndarray, index1: np.ndarray) -> Matches:
        """Convert matches of selected keypoints to matches of all keypoints.

        Args:
            index0, index1: (m,) and (n,), indices of the keypoints that were selected.
        """
        row0, row1 = self.indices.T  # (K,), rows of index0 and index1
        return Matches(np.stack([index0[row0], index1[row1]], axis=1), self.scores)

    @classmethod
    def none(cls) -> Matches:
        """Return zero matches."""
        return cls(np.empty((0, 2), np.int64), np.empty(0, np.float32))

    @classmethod
    def from_dense(cls, matches0: np.ndarray, scores0: np.ndarray) -> Matches:
        """Build matches from the form of the paper's code, one row for each keypoint of image 0.

        Args:
            matches0: (M,), the index of the match in image 1, or -1 for a keypoint without a match.
            scores0: (M,), the confidence of each match.
        """
        # (M,) with -1 -> (K, 2) without -1
        index0 = np.flatnonzero(matches0 >= 0)
        indices = np.stack([index0, matches0[index0]], axis=1).astype(np.int64)
        return cls(indices, np.asarray(scores0)[index0].astype(np.float32))

    def to_dense(self, count0: int) -> Tuple[np.ndarray, np.ndarray]:
        """Convert to the form of the paper's code, which `from_dense` takes.

        Args:
            count0: number M of keypoints of image 0.

        Returns:
            The indices (M,) int64 of the matches in image 1, and their scores (M,) float32. A
            keypoint without a match has -1 and 0.
        """
        matches0 = np.full(count0, -1, np.int64)
        scores0 = np.zeros(count0, np.float32)
        matches0[self.indices[:, 0]] = self.indices[:, 1]
        scores0[self.indices[:, 0]] = self.scores
        return matches0, scores0
