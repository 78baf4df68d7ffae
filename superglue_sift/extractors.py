"""What finds the keypoints: SIFT, or a function of yours that an extractor name `module:function` names.

    def function(gray, max_keypoints):         # (H, W) uint8; how many are wanted, more are cut off
        return {
            "keypoints": ...,                  # (n, 2) pixels, the centre of the first pixel at (0, 0)
            "scores": ...,                     # (n,), 0 or more; the highest are kept
            "descriptors": ...,                # (n, D): float32, a direction each; or uint8, 8 bits in a byte
            "scales": ...,                     # (n,) diameters in pixels, above 0
            "angles": ...,                     # (n,) degrees, clockwise; both scales and angles, or neither
        }

Arrays, or tensors on the CPU. Equal images must give equal answers. The module is found as `import` finds it.
`superglue_sift.opencv_features` has two examples.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any, Callable, Mapping

import cv2
import numpy as np

from superglue_sift import sift
from superglue_sift.descriptors import descriptors_of, record_dtype
from superglue_sift.errors import RequestError
from superglue_sift.files import file_sha256


@dataclass(frozen=True)
class Extractor:
    """A way to keypoints, "sift" or "module:function". Called as `sift.extract`; gives records of `dtype`.

    scale_angle: are scale and angle known (else they are 0)? code: SHA-256 of the module's file, "" of SIFT.
    """

    name: str
    dtype: np.dtype
    scale_angle: bool
    function: Callable[[np.ndarray, int], Any]
    code: str = ""

    def __call__(self, gray: np.ndarray, max_keypoints: int) -> np.ndarray:
        """(n,) records, n <= max_keypoints, strongest first, positions distinct. Raises RequestError."""
        if self.name == DEFAULT.name:
            return self.function(gray, max_keypoints)
        records = records_of(self.name, self.function(gray, max_keypoints))
        if not len(records):
            return np.empty(0, self.dtype)
        if records.dtype != self.dtype or bool(records["scale"][0]) != self.scale_angle:
            raise RequestError(f"extractor {self.name}: its descriptors change from image to image")
        return sift.strongest(records, max_keypoints)


DEFAULT = Extractor("sift", sift.ORIENTED, True, sift.extract)
# the same keypoints, and weaker ones where fewer are found than asked for
DENSE = Extractor("sift", sift.ORIENTED, True, functools.partial(sift.extract, contrast=sift.WEAK))


@functools.lru_cache(maxsize=4)
def load(name: str) -> Extractor:
    """The extractor of this name; it is tried on a pattern once, which tells what its descriptors are.

    Raises RequestError: no such module or function, or it does not answer as it must.
    """
    if name == DEFAULT.name:
        return DEFAULT
    module, _, attribute = name.partition(":")
    try:
        home = importlib.import_module(module)
        function = getattr(home, attribute)
        found = function(test_pattern(), 512)
    except Exception as error:  # whatever a function of others raises
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        meant = "a module that Python finds, a colon, a function: see docs/features.md"
        raise RequestError(f"extractor {name}: {reason} ({meant})") from error
    records = records_of(name, found)
    if not len(records):
        raise RequestError(f"extractor {name}: finds no keypoint on a pattern full of them")
    return Extractor(name, records.dtype, bool(records["scale"][0]), function, file_sha256(home.__file__ or ""))


def test_pattern() -> np.ndarray:
    """(480, 640) uint8: smooth blotches of many sizes, in which every detector finds something; the same each time."""
    rng, sum_of = np.random.default_rng(0), np.zeros((480, 640))
    for cells in (6, 12, 24, 48):
        noise = rng.normal(0.0, 1.0, (cells, cells * 4 // 3))
        sum_of += cv2.resize(noise, (640, 480), interpolation=cv2.INTER_CUBIC)
    return np.clip(128 + 48 * sum_of, 0, 255).astype(np.uint8)


def records_of(name: str, found: Mapping[str, Any]) -> np.ndarray:
    """(n,) records of what the function of extractor `name` answered. Raises RequestError where it is wrong."""

    def wrong(what: str) -> RequestError:
        return RequestError(f"extractor {name}: {what} (see docs/features.md)")

    try:
        keypoints, scores, descriptors = (np.asarray(found[key]) for key in ("keypoints", "scores", "descriptors"))
    except (KeyError, TypeError, IndexError) as error:
        raise wrong("must return a dictionary with keypoints, scores and descriptors") from error
    count = len(keypoints)
    if not count:
        return np.empty(0, sift.ORIENTED)
    if keypoints.shape != (count, 2) or scores.shape != (count,):
        raise wrong(f"keypoints {keypoints.shape} and scores {scores.shape}: must be (n, 2) and (n,)")
    if descriptors.ndim != 2 or len(descriptors) != count or not descriptors.shape[1]:
        raise wrong(f"descriptors {descriptors.shape} of {count} keypoints: must be (n, D)")
    if descriptors.dtype != np.uint8 and descriptors.dtype.kind != "f":
        raise wrong(f"descriptors of {descriptors.dtype}: must be float32, or uint8 for bits")
    binary, width = descriptors.dtype == np.uint8, descriptors.shape[1]
    records = np.zeros(count, record_dtype("binary", -(-width // 4) * 32) if binary else record_dtype("float", width))
    records["x"], records["y"] = keypoints.T
    records["score"] = scores
    if ("scales" in found) != ("angles" in found):
        raise wrong("must return scales and angles, or neither")
    if "scales" in found:
        records["scale"], records["angle"] = np.asarray(found["scales"]), np.asarray(found["angles"])
        if not (records["scale"] > 0).all():
            raise wrong("scales must be above 0")
    descriptors_of(records)[:, :width] = descriptors
    geometry = np.stack([records[key] for key in sift.GEOMETRY])
    if not (np.isfinite(geometry).all() and np.isfinite(descriptors).all() and (scores >= 0).all()):
        raise wrong("numbers must be finite, and scores 0 or more")
    return records
