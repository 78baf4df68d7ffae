"""An extractor of keypoints is SIFT, or a function of yours with the name `module:function`.

    def function(gray, max_keypoints):  # (H, W) uint8; number of keypoints, more are dropped
        return {
            "keypoints": ...,           # (N, 2) pixels, the center of the first pixel at (0, 0)
            "scores": ...,              # (N,), 0 or more; the highest are kept
            "descriptors": ...,         # (N, D) float32, of any length
            "scales": ...,              # (N,) diameters in pixels, above 0
            "oris": ...,                # (N,) degrees, clockwise; both or neither of the two
        }

Values are arrays, or tensors on the CPU. Equal images must give equal values. The module must be
importable. `superglue_sift.opencv_features` has an example.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any, Callable, Optional, Tuple

import cv2
import numpy as np

from superglue_sift.errors import RequestError
from superglue_sift.features import sift
from superglue_sift.features.features import SIFT_DIM, Features
from superglue_sift.files import compute_file_sha256


@dataclass(frozen=True)
class Extractor:
    """An extractor finds the keypoints of an image. Call it as `sift.extract`.

    Attributes:
        name: "sift" or "module:function".
        descriptor: kind of the descriptors, "sift" or "float".
        descriptor_dim: number of entries of a descriptor.
        scale_angle: whether it provides scale and orientation, which are 0 otherwise.
        function: the function that finds keypoints.
        code: the SHA-256 of the module's file. For SIFT it is its version.
    """

    name: str
    descriptor: str
    descriptor_dim: int
    scale_angle: bool
    function: Callable[..., Any]
    code: str = ""

    def __call__(
        self, gray: np.ndarray, max_keypoints: int, mask: Optional[np.ndarray] = None
    ) -> Features:
        """Extract the keypoints of an image.

        Args:
            gray: (H, W) uint8.
            max_keypoints: maximum number of keypoints, 1 or more.
            mask: (H, W) uint8. No keypoint lies at a pixel where it is 0.

        Returns:
            The keypoints in pixels of `gray`, at distinct positions, highest rank first.

        Raises:
            RequestError: If descriptors are not like those of other images.
        """
        # SIFT takes the mask itself, and its keypoints need no checks.
        if self.name == SIFT.name:
            return self.function(gray, max_keypoints, mask)
        values = dict(self.function(gray, max_keypoints))
        if not len(values["keypoints"]):
            # OpenCV's descriptors are then None.
            empty = np.empty((0, self.descriptor_dim), np.float32)
            values = {"keypoints": np.empty((0, 2)), "scores": [], "descriptors": empty}
        features = _make_features(self.name, values, gray.shape[1::-1])
        # A store has one size of a descriptor, and so has a network.
        if len(features.scales) and _describe_features(features) != (
            self.descriptor_dim,
            self.scale_angle,
        ):
            raise RequestError(f"extractor {self.name}: its descriptors change from image to image")
        if mask is not None:
            # The function knows no masks, so keypoints at masked pixels are dropped here.
            x, y = np.rint(features.keypoints.T).astype(int)
            height, width = mask.shape
            is_inside = mask[y.clip(0, height - 1), x.clip(0, width - 1)] > 0
            features = features.select(np.flatnonzero(is_inside))
        return sift.keep_strongest(features, max_keypoints)


def _make_features(name: str, values: Any, size: Tuple[int, int]) -> Features:
    """Convert the return value of an extractor for an image of `size` (width, height).

    Raises:
        RequestError: For a wrong value. The error names the extractor.
    """
    try:
        features = Features.from_dict(values, size)
    except RequestError as error:
        raise RequestError(f"extractor {name}: {error} (see docs/features.md)") from error
    return features._replace(sift_scale=1.0)


def _describe_features(features: Features) -> Tuple[int, bool]:
    """Return the number of entries of a descriptor, and whether keypoints have a scale."""
    return features.descriptors.shape[2], bool(features.scales[0])


SIFT = Extractor("sift", "sift", SIFT_DIM, True, sift.extract, sift.VERSION)


@functools.lru_cache(maxsize=4)
def load_extractor(name: str) -> Extractor:
    """Load an extractor by name, and run it on a test pattern to learn the size of a descriptor.

    Raises:
        RequestError: If there is no such module or function, or if it returns a wrong value.
    """
    if name == SIFT.name:
        return SIFT
    # The user has named this code, so it may run.
    module, _, attribute = name.partition(":")
    pattern = draw_test_pattern()
    try:
        imported = importlib.import_module(module)
        function = getattr(imported, attribute)
        values = function(pattern, 512)
    except Exception as error:  # Code of the user may raise any error
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        fix = "a module that Python finds, a colon, a function: see docs/features.md"
        raise RequestError(f"extractor {name}: {reason} ({fix})") from error
    features = _make_features(name, values, pattern.shape[1::-1])
    if not len(features.keypoints):
        raise RequestError(f"extractor {name}: finds no keypoint on a pattern full of them")
    code = compute_file_sha256(imported.__file__ or "")
    return Extractor(name, "float", *_describe_features(features), function, code)


def draw_test_pattern() -> np.ndarray:
    """Draw smooth blobs, for any detector; return (480, 640) uint8, always the same."""
    noise = np.random.default_rng(0).integers(0, 256, (48, 64)).astype(np.uint8)
    return cv2.resize(noise, (640, 480), interpolation=cv2.INTER_CUBIC)
