"""Two images in, matches out: SIFT keypoints, SuperGlue, mutual matches.

    from superglue_sift import Matcher

    matcher = Matcher.load()                         # the weights that ship with the library; a GPU where there is one
    found = matcher.match("A.jpg", "B.jpg")
    found.points0, found.points1, found.scores        # (K, 2), (K, 2) pixels, (K,) probabilities

Features of an image that is matched several times are computed once: `a = matcher.extract("A.jpg")`, then
`matcher.match(a, "B.jpg")`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import cv2
import numpy as np
import torch

from superglue_sift import sift
from superglue_sift.batch import Pair, from_pairs
from superglue_sift.errors import RequestError
from superglue_sift.images import read_gray
from superglue_sift.inference import fuse_for_inference
from superglue_sift.sift import KEYPOINT
from superglue_sift.superglue import SuperGlue, mutual_matches
from superglue_sift.weights import choose_device, load_model, shipped_weights

THRESHOLD = 0.2  # probability of a match, of a model that does not bring its own (SuperGlue, section 5)
DESCRIPTOR = KEYPOINT["descriptor"].shape[0]


def match_threshold(info: Mapping[str, Any]) -> float:
    """The probability above which matches of a model count: what its description states, else THRESHOLD."""
    return float(info.get("match_threshold", THRESHOLD))


class Features(NamedTuple):
    """What is matched of one image.

    records: (n,) of dtype `sift.KEYPOINT`, positions and scales in pixels of the image; size: its (width, height).
    """

    records: np.ndarray
    size: Tuple[int, int]

    @property
    def keypoints(self) -> np.ndarray:
        """(n, 2) float32, pixels: x right, y down, centre of the first pixel at (0, 0)."""
        return sift.positions(self.records)

    @classmethod
    def of(
        cls,
        keypoints: np.ndarray,
        scales: np.ndarray,
        angles: np.ndarray,
        scores: np.ndarray,
        descriptors: np.ndarray,
        size: Tuple[int, int],
    ) -> Features:
        """Features of your own SIFT.

        Args:
            keypoints: (n, 2) pixels, one at each position.
            scales, angles, scores: (n,) diameter in pixels, degrees, response: OpenCV's `size`, `angle`, `response`.
            descriptors: (n, 128) SIFT with entries from 0 to 255, as OpenCV gives them.
            size: (width, height) of the image.

        Raises:
            RequestError: another shape or range.
        """
        keypoints, descriptors = np.asarray(keypoints), np.asarray(descriptors)
        count = len(keypoints)
        if keypoints.shape != (count, 2):
            raise RequestError(f"keypoints of shape {keypoints.shape}: must be (n, 2)")
        if descriptors.shape != (count, DESCRIPTOR):
            raise RequestError(
                f"descriptors of shape {descriptors.shape}: must be SIFT's, ({count}, {DESCRIPTOR})"
            )
        if count and (descriptors.min() < 0 or descriptors.max() > 255 or descriptors.max() <= 1):
            raise RequestError("descriptors must be whole numbers from 0 to 255, not normalised")
        records = np.zeros(count, KEYPOINT)
        records["x"], records["y"] = keypoints.T
        records["scale"], records["angle"], records["score"] = scales, angles, scores
        records["descriptor"] = descriptors
        return cls(records, size)


Image = Union[str, Path, np.ndarray]  # a file, or its pixels (H, W) gray or (H, W, 3) BGR, uint8


class MatchResult(NamedTuple):
    """Matches of two images, in the order of image 0's keypoints.

    keypoints0 (M, 2), keypoints1 (N, 2): float32 pixels of the images as they were given.
    matches: (K, 2) int64, index into keypoints0 and into keypoints1; each index at most once.
    scores: (K,) float32, probability of each match.
    size0, size1: (width, height).
    """

    keypoints0: np.ndarray
    keypoints1: np.ndarray
    matches: np.ndarray
    scores: np.ndarray
    size0: Tuple[int, int]
    size1: Tuple[int, int]

    @property
    def points0(self) -> np.ndarray:
        """(K, 2) float32: the matched keypoints of image 0."""
        return self.keypoints0[self.matches[:, 0]]

    @property
    def points1(self) -> np.ndarray:
        """(K, 2) float32: their partners in image 1."""
        return self.keypoints1[self.matches[:, 1]]


class PairMatches(NamedTuple):
    """A matcher's answer for one pair. matches0: (M,) int64, index in image 1 or -1; scores0: (M,) float, 0 to 1."""

    matches0: np.ndarray
    scores0: np.ndarray

    def above(self, threshold: float) -> PairMatches:
        """The same without matches whose score is not above `threshold`."""
        keep = self.scores0 > threshold
        return PairMatches(np.where(keep, self.matches0, -1), np.where(keep, self.scores0, 0.0))


def match_pairs(model: torch.nn.Module, pairs: Sequence[Pair], device: str) -> List[PairMatches]:
    """The network's matches of these pairs, in one batch: every mutual one, whatever its score."""
    batch = from_pairs(pairs).to(device)
    with torch.no_grad():
        size = (batch.records0.shape[1], batch.records1.shape[1])
        found = mutual_matches(model(batch), size, threshold=0.0)
    matches0, scores0 = found.matches0.cpu().numpy(), found.matching_scores0.cpu().numpy()
    counts = [len(pair.records0) for pair in pairs]
    return [PairMatches(m[:count], s[:count]) for m, s, count in zip(matches0, scores0, counts)]


class Matcher:
    """A trained network and how images are read for it. `Matcher.load` makes one.

    Attributes: `model`, ready for inference; `device`; `max_keypoints`, `resize`, `threshold` as given to `load`.
    """

    def __init__(
        self,
        model: SuperGlue,
        device: str = "cpu",
        max_keypoints: int = 1024,
        resize: int = 1024,
        threshold: float = THRESHOLD,
    ) -> None:
        """model: on `device`, for inference, such as `fuse_for_inference` gives; for the others see `load`."""
        self.model, self.device = model, device
        self.max_keypoints, self.resize, self.threshold = max_keypoints, resize, threshold

    @classmethod
    def load(
        cls,
        path: Union[str, Path, None] = None,
        device: str = "auto",
        *,
        max_keypoints: int = 1024,
        resize: int = 1024,
        threshold: Optional[float] = None,
        precision: str = "float32",
    ) -> Matcher:
        """A matcher from a model file.

        Args:
            path: models/superglue.safetensors of a training, or any checkpoint; None: the weights that ship with the
                library.
            device: "auto" (a GPU where there is one), "cpu", "cuda", "cuda:1".
            max_keypoints: the strongest so many of each image.
            resize: SIFT runs on the image reduced to this longer side in pixels; 0: never. Keypoints are always in
                pixels of the image as given.
            threshold: least probability of a match; None: the model's own, else 0.2.
            precision: of the layers: float32, bfloat16 (faster on GPUs and on CPUs with AMX) or float16.

        Raises:
            RequestError: no such file or device, or a file that is no model of this project; one line.
        """
        device = choose_device(device)
        model, info = load_model(Path(path) if path else shipped_weights(), device)
        if threshold is None:
            threshold = match_threshold(info)
        return cls(fuse_for_inference(model, precision), device, max_keypoints, resize, threshold)

    def extract(self, image: Image) -> Features:
        """SIFT keypoints of an image, for `match`. Raises RequestError for one that cannot be read."""
        gray = _gray(image) if isinstance(image, np.ndarray) else read_gray(image)
        return extract(gray, self.max_keypoints, self.resize)

    def extract_all(self, images: Sequence[Union[Image, Features]]) -> List[Features]:
        """`extract` of several images, two at a time; of what is extracted already nothing is done."""

        def features(image: Union[Image, Features]) -> Features:
            return image if isinstance(image, Features) else self.extract(image)

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(features, images))

    def match(self, image0: Union[Image, Features], image1: Union[Image, Features]) -> MatchResult:
        """Matches of two images, each a file, its pixels or what `extract` gave of it.

        An image without keypoints gives no match. Raises RequestError for one that cannot be read.
        """
        side0, side1 = self.extract_all((image0, image1))
        pair = Pair(side0.records, side1.records, side0.size, side1.size)
        found = match_pairs(self.model, [pair], self.device)[0].above(self.threshold)
        index0 = np.flatnonzero(found.matches0 >= 0)
        matches = np.stack([index0, found.matches0[index0]], axis=1)
        return MatchResult(
            side0.keypoints, side1.keypoints, matches, found.scores0[index0], side0.size, side1.size
        )


def extract(gray: np.ndarray, max_keypoints: int, resize: int = 0) -> Features:
    """SIFT of a gray image (H, W) uint8, found on it reduced to a longer side of `resize` pixels (0: as it is)."""
    size = (gray.shape[1], gray.shape[0])
    shrink = min(1.0, resize / max(size)) if resize else 1.0
    if shrink == 1.0:
        return Features(sift.extract(gray, max_keypoints), size)
    small = [max(1, round(side * shrink)) for side in size]
    records = sift.extract(cv2.resize(gray, small, interpolation=cv2.INTER_AREA), max_keypoints)
    for name, side, before in zip(("x", "y"), small, size):
        records[name] = (records[name] + 0.5) * (before / side) - 0.5
    records["scale"] /= shrink
    return Features(records, size)


def _gray(pixels: np.ndarray) -> np.ndarray:
    gray, color = pixels.ndim == 2, pixels.ndim == 3 and pixels.shape[-1] == 3
    if pixels.dtype != np.uint8 or not (gray or color) or 0 in pixels.shape:
        raise RequestError(
            f"an image of {pixels.dtype} {pixels.shape}: must be uint8, (H, W) gray or (H, W, 3) BGR"
        )
    return pixels if gray else cv2.cvtColor(pixels, cv2.COLOR_BGR2GRAY)
