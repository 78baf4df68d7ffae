"""An extractor of keypoints is SIFT, or a function of yours with the name `module:function`.

    def function(gray, max_keypoints):  # (H, W) uint8; number of keypoints, more are dropped
        return {
            "keypoints": ...,           # (n, 2) pixels, the centre of the first pixel at (0, 0)
            "scores": ...,              # (n,), 0 or more; the highest are kept
            "descriptors": ...,         # (n, D) float32, of any length
            "scales": ...,              # (n,) diameters in pixels, above 0
            "angles": ...,              # (n,) degrees, clockwise; both or neither of the two
        }

Values are arrays, or tensors on the CPU. Equal images must give equal values. The module must be
importable. `superglue_sift.opencv_features` has an example.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Optional, Tuple

import cv2
import numpy as np

from superglue_sift.errors import RequestError
from superglue_sift.features import sift
from superglue_sift.files import file_sha256


@dataclass(frozen=True)
class Extractor:
    """An extractor finds the keypoints of an image. Call it as `sift.extract`.

    name: "sift" or "module:function".
    dtype: dtype of the keypoints that it returns.
    scale_angle: whether it provides scale and angle, which are 0 otherwise.
    function: the function that finds keypoints.
    code: the SHA-256 of the module's file. For SIFT it is its version.
    """

    name: str
    dtype: np.dtype
    scale_angle: bool
    function: Callable[..., Any]
    code: str = ""

    def __call__(
        self, gray: np.ndarray, max_keypoints: int, mask: Optional[np.ndarray] = None
    ) -> np.ndarray:
        """Extract (n,) keypoints, n <= max_keypoints, highest rank first, positions distinct.

        Raises RequestError if descriptors are not like those of other images.
        """
        if self.name == DEFAULT.name:
            return self.function(gray, max_keypoints, mask)
        found = records_of(self.name, self.function(gray, max_keypoints))
        if not len(found):
            return np.empty(0, self.dtype)
        if found.dtype != self.dtype or bool(found["scale"][0]) != self.scale_angle:
            raise RequestError(f"extractor {self.name}: its descriptors change from image to image")
        if mask is not None:
            # The function knows no masks, so keypoints at masked pixels are dropped here.
            x, y = np.rint(sift.positions(found).T).astype(int)
            height, width = mask.shape
            found = found[mask[y.clip(0, height - 1), x.clip(0, width - 1)] > 0]
        return sift.strongest(found, max_keypoints)


DEFAULT = Extractor("sift", sift.ORIENTED, True, sift.extract, sift.VERSION)


@functools.lru_cache(maxsize=4)
def load(name: str) -> Extractor:
    """Load an extractor by name, and run it on a test pattern to learn the size of a descriptor.

    Raises RequestError if there is no such module or function, or if it returns a wrong value.
    """
    if name == DEFAULT.name:
        return DEFAULT
    module, _, attribute = name.partition(":")
    try:
        home = importlib.import_module(module)
        function = getattr(home, attribute)
        values = function(test_pattern(), 512)
    except Exception as error:  # code of the user may raise any error
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        meant = "a module that Python finds, a colon, a function: see docs/features.md"
        raise RequestError(f"extractor {name}: {reason} ({meant})") from error
    records = records_of(name, values)
    if not len(records):
        raise RequestError(f"extractor {name}: finds no keypoint on a pattern full of them")
    return Extractor(
        name, records.dtype, bool(records["scale"][0]), function, file_sha256(home.__file__ or "")
    )


def test_pattern() -> np.ndarray:
    """Draw smooth blobs of many sizes, for any detector; return (480, 640) uint8, always
    the same.
    """
    rng = np.random.default_rng(0)
    total = np.zeros((480, 640))
    for cells in (6, 12, 24, 48):
        noise = rng.normal(0.0, 1.0, (cells, cells * 4 // 3))
        total += cv2.resize(noise, (640, 480), interpolation=cv2.INTER_CUBIC)
    return np.clip(128 + 48 * total, 0, 255).astype(np.uint8)


def record_dtype(kind: str, dim: int) -> np.dtype:
    """Return the dtype of keypoints with descriptors of `dim` entries, of kind "sift" or
    "float".
    """
    if kind == "sift":
        return sift.ORIENTED
    geometry = [(name, "<f4") for name in sift.GEOMETRY]
    return np.dtype([*geometry, ("descriptor", "<f4", (dim,))])


def kind_of(dtype: np.dtype) -> Tuple[str, int]:
    """Return (kind, dim) of a dtype from `record_dtype`. Raises ValueError for any other dtype."""
    if dtype in (sift.KEYPOINT, sift.ORIENTED):
        return "sift", 128
    shape = dtype["descriptor"].shape if "descriptor" in (dtype.names or ()) else ()
    if len(shape) == 1 and dtype == record_dtype("float", shape[0]):
        return "float", shape[0]
    raise ValueError(f"{dtype}: not a dtype of keypoints")


def records_of(name: str, values: Mapping[str, Any]) -> np.ndarray:
    """Convert the return value of extractor `name` to (n,) keypoints.

    Raises RequestError for a wrong value.
    """

    def wrong(reason: str) -> RequestError:
        """Create the error for a wrong value."""
        return RequestError(f"extractor {name}: {reason} (see docs/features.md)")

    try:
        keypoints, scores, descriptors = (
            np.asarray(values[key]) for key in ("keypoints", "scores", "descriptors")
        )
    except (KeyError, TypeError, IndexError) as error:
        raise wrong("must return a dictionary with keypoints, scores and descriptors") from error
    count = len(keypoints)
    if not count and (descriptors.ndim != 2 or not descriptors.shape[1]):
        return np.empty(0, sift.ORIENTED)  # the length of its descriptors is not known
    if not count:
        keypoints = keypoints.reshape(0, 2)
    # Check shapes and types.
    if keypoints.shape != (count, 2) or scores.shape != (count,):
        raise wrong(
            f"keypoints {keypoints.shape} and scores {scores.shape}: must be (n, 2) and (n,)"
        )
    if descriptors.ndim != 2 or len(descriptors) != count or not descriptors.shape[1]:
        raise wrong(f"descriptors {descriptors.shape} of {count} keypoints: must be (n, D)")
    if descriptors.dtype.kind != "f":
        raise wrong(f"descriptors of {descriptors.dtype}: must be float32")
    # Copy the values to records, and check their ranges.
    records = np.zeros(count, record_dtype("float", descriptors.shape[1]))
    records["x"], records["y"] = keypoints.T
    records["score"] = scores
    if ("scales" in values) != ("angles" in values):
        raise wrong("must return scales and angles, or neither")
    if "scales" in values:
        records["scale"] = np.asarray(values["scales"])
        records["angle"] = np.asarray(values["angles"])
        if not (records["scale"] > 0).all():
            raise wrong("scales must be above 0")
    records["descriptor"] = descriptors
    geometry = np.stack([records[key] for key in sift.GEOMETRY])
    if not (np.isfinite(geometry).all() and np.isfinite(descriptors).all() and (scores >= 0).all()):
        raise wrong("numbers must be finite, and scores 0 or more")
    return records
