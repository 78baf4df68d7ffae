"""Find photographs that look alike, by VLAD of their SIFT descriptors (Jegou et al. 2010).

The vocabulary comes from OpenCV's k-means of RootSIFT of all images. The vector of an image sums
the offsets of its descriptors from their words. It is normalised by word and as a whole
(Arandjelovic and Zisserman 2013), and images are compared by cosine. Pairs that accepted pairs
propose (`Expansion`) are correct far more often than pairs of the next best cosines.
"""

from __future__ import annotations

import collections
import itertools
from typing import Any, Callable, Dict, List, Sequence, Tuple

import cv2
import numpy as np

from superglue_sift.features.sift import root_sift_of

WORDS = 64
PROPOSED = 10  # a round of `Expansion` proposes up to so many pairs of each image
ROUNDS = 2
SAMPLE = 20_000  # number of descriptors for the vocabulary, equally many of each image


def nearest_pairs(
    images: Sequence[Any], descriptors: Callable[[Any], np.ndarray], k: int
) -> List[Tuple[int, int]]:
    """Pair each image with the k (at least 1) most similar others.

    descriptors: returns SIFT (n, 128) uint8 of an image. It is called twice for each image, with
        one result in memory at a time.

    Returns pairs (i, j) with i < j, sorted and unique.
    """
    if len(images) < 2:
        return []
    words = vocabulary([_sample(descriptors(name), SAMPLE // len(images) + 1) for name in images])
    described = np.stack([vlad(root_sift_of(descriptors(name)), words) for name in images])
    # Take the k largest cosines of each image, but not the image itself.
    pairs = set()
    for i, vector in enumerate(described):
        similarity = described @ vector
        similarity[i] = -np.inf
        for j in np.argsort(-similarity, kind="stable")[: min(k, len(images) - 1)]:
            pairs.add((min(i, int(j)), max(i, int(j))))
    return sorted(pairs)


class Expansion:
    """Propose pairs of images that are both accepted with a third one.

    This is query expansion (Chum et al. 2007). Call it with every matched pair of `images` and its
    `MatchResult`.
    """

    def __init__(self, images: Sequence[Any]) -> None:
        self._images = list(images)
        self._number = {image: number for number, image in enumerate(images)}
        self._scores: Dict[Tuple[int, int], float] = {}  # a rejected pair has 0

    def __call__(self, image0: Any, image1: Any, result: Any) -> None:
        """Note whether a pair was accepted, and its score."""
        i, j = sorted((self._number[image0], self._number[image1]))
        self._scores[i, j] = result.pair_score if result.accepted else 0

    def propose(self, k: int = PROPOSED) -> List[Tuple[Any, Any]]:
        """Propose pairs that are not matched yet, in the order of the images.

        The score of a pair is the lower of the scores of both with a third image, for the best
        third image. Up to k pairs of the highest scores are proposed for each image.
        """
        # Neighbours of each image: those that it is accepted with
        near: Dict[int, Dict[int, float]] = collections.defaultdict(dict)
        for (i, j), score in self._scores.items():
            if score:
                near[i][j] = near[j][i] = score
        # Score of each new pair, by the best third image
        best: Dict[Tuple[int, int], float] = {}
        for known in near.values():
            for i, j in itertools.combinations(sorted(known), 2):
                if (i, j) not in self._scores:
                    best[i, j] = max(best.get((i, j), 0), min(known[i], known[j]))
        # Take pairs by falling score, as long as an image has fewer than k.
        counts: Dict[int, int] = collections.Counter()
        chosen = []
        for i, j in sorted(best, key=lambda pair: (-best[pair], pair)):
            if min(counts[i], counts[j]) < k:
                chosen.append((i, j))
                counts[i] += 1
                counts[j] += 1
        return [(self._images[i], self._images[j]) for i, j in sorted(chosen)]


def _sample(descriptors: np.ndarray, count: int) -> np.ndarray:
    """Take at most `count` descriptors at regular intervals; return them as RootSIFT (n, 128)."""
    picked = np.linspace(0, len(descriptors) - 1, min(count, len(descriptors))).astype(int)
    return root_sift_of(descriptors[picked])


def vocabulary(samples: Sequence[np.ndarray]) -> np.ndarray:
    """Cluster RootSIFT samples (n, 128) into at most 64 words (W, 128) float32.

    Equal samples give equal words.
    """
    together = np.concatenate(samples)
    if len(together) <= WORDS:
        return together
    cv2.setRNGSeed(0)
    criteria = (cv2.TERM_CRITERIA_EPS + cv2.TERM_CRITERIA_MAX_ITER, 30, 1e-4)
    no_labels: Any = None
    return cv2.kmeans(together, WORDS, no_labels, criteria, 1, cv2.KMEANS_PP_CENTERS)[2]


def vlad(descriptors: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Compute the vector of an image, (W * 128,) float32 of unit length, or zeros without
    keypoints.
    """
    sums = np.zeros_like(words)
    if len(descriptors) and len(words):
        # The nearest word of each descriptor, (n,), since |d - w|^2 = |d|^2 - 2 d w + |w|^2
        word = np.argmax(descriptors @ words.T - (words**2).sum(1) / 2, axis=1)
        np.add.at(sums, word, descriptors - words[word])
    sums /= np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-12)
    return sums.ravel() / max(float(np.linalg.norm(sums)), 1e-12)
