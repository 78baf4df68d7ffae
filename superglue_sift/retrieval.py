"""Which photographs of many show the same: the nearest by VLAD of their SIFT (Jegou et al. 2010).

A vocabulary of OpenCV's k-means over RootSIFT of all images; of each image the sum of its descriptors' distances to
their words, normalised by word and as a whole (Arandjelovic and Zisserman 2013); then the largest cosine.
"""

from __future__ import annotations

from typing import Any, Callable, List, Sequence, Tuple

import cv2
import numpy as np

from superglue_sift.descriptors import root_sift_of

WORDS = 64
SAMPLE = 20_000  # descriptors that the vocabulary is made of, as many of each image


def nearest_pairs(images: Sequence[Any], descriptors: Callable[[Any], np.ndarray], k: int) -> List[Tuple[int, int]]:
    """Each image with the k (at least 1) most similar others: pairs (i, j), i < j, sorted, each once.

    descriptors: SIFT (n, 128) uint8 of an image, asked for twice; one image's at a time is held.
    """
    if len(images) < 2:
        return []
    words = vocabulary([_sample(descriptors(name), SAMPLE // len(images) + 1) for name in images])
    described = np.stack([vlad(root_sift_of(descriptors(name)), words) for name in images])
    found = set()
    for i, own in enumerate(described):
        similarity = described @ own
        similarity[i] = -np.inf
        for j in np.argsort(-similarity, kind="stable")[: min(k, len(images) - 1)]:
            found.add((min(i, int(j)), max(i, int(j))))
    return sorted(found)


def _sample(descriptors: np.ndarray, count: int) -> np.ndarray:
    """At most `count`, spread evenly over the keypoints' order of strength."""
    picked = np.linspace(0, len(descriptors) - 1, min(count, len(descriptors))).astype(int)
    return root_sift_of(descriptors[picked])


def vocabulary(samples: Sequence[np.ndarray]) -> np.ndarray:
    """Words (W, 128) float32, W at most 64, of RootSIFT (n, 128) each; the same for the same samples."""
    together = np.concatenate(samples)
    if len(together) <= WORDS:
        return together
    cv2.setRNGSeed(0)
    criteria = (cv2.TERM_CRITERIA_EPS + cv2.TERM_CRITERIA_MAX_ITER, 30, 1e-4)
    trainer = cv2.BOWKMeansTrainer(WORDS, criteria, 1, cv2.KMEANS_PP_CENTERS)
    trainer.add(together)
    return trainer.cluster()


def vlad(descriptors: np.ndarray, words: np.ndarray) -> np.ndarray:
    """(W * 128,) float32 of unit length, zeros of an image without keypoints."""
    sums = np.zeros_like(words)
    if len(descriptors) and len(words):
        word = np.argmax(descriptors @ words.T - (words**2).sum(1) / 2, axis=1)
        np.add.at(sums, word, descriptors - words[word])
    sums /= np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-12)
    return sums.ravel() / max(float(np.linalg.norm(sums)), 1e-12)
