"""Extractors of keypoints: SIFT, or a function of yours with the name `module:function`.

    def function(gray, max_keypoints):         # (H, W) uint8; number of keypoints, more are dropped
        return {
            "keypoints": ...,                  # (n, 2) pixels, the centre of the first pixel at (0,
                                               0)
            "scores": ...,                     # (n,), 0 or more; the highest are kept
            "descriptors": ...,                # (n, D): float32, of any length; or uint8, 8 bits
                                               per byte
            "scales": ...,                     # (n,) diameters in pixels, above 0
            "angles": ...,                     # (n,) degrees, clockwise; both scales and angles, or
                                               neither
        }

Values are arrays, or tensors on the CPU. Equal images must give equal values. The module must be
importable. `superglue_sift.opencv_features` has two examples.
"""

from __future__ import annotations

import functools
import importlib
import math
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Tuple

import cv2
import numpy as np

from superglue_sift.errors import RequestError
from superglue_sift.features import sift
from superglue_sift.files import file_sha256


@dataclass(frozen=True)
class Extractor:
    """An extractor, "sift" or "module:function". Call it as `sift.extract`; returns records of
    `dtype`.

    scale_angle: whether it provides scale and angle (else they are 0). code: SHA-256 of the
    module's file, of SIFT its version.
    """

    name: str
    dtype: np.dtype
    scale_angle: bool
    function: Callable[[np.ndarray, int], Any]
    code: str = ""

    def __call__(self, gray: np.ndarray, max_keypoints: int) -> np.ndarray:
        """(n,) records, n <= max_keypoints, highest rank first, positions distinct."""
        if self.name == DEFAULT.name:
            return self.function(gray, max_keypoints)
        records = records_of(self.name, self.function(gray, max_keypoints))
        if not len(records):
            return np.empty(0, self.dtype)
        if records.dtype != self.dtype or bool(records["scale"][0]) != self.scale_angle:
            raise RequestError(f"extractor {self.name}: its descriptors change from image to image")
        return sift.strongest(records, max_keypoints)


DEFAULT = Extractor("sift", sift.ORIENTED, True, sift.extract, sift.VERSION)


@functools.lru_cache(maxsize=4)
def load(name: str) -> Extractor:
    """Load an extractor by name, and run it on a test pattern to learn the kind of its descriptors.

    Raises RequestError: no such module or function, or a wrong return value.
    """
    if name == DEFAULT.name:
        return DEFAULT
    module, _, attribute = name.partition(":")
    try:
        home = importlib.import_module(module)
        function = getattr(home, attribute)
        values = function(test_pattern(), 512)
    except Exception as error:  # any: it is the user's code
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
    """(480, 640) uint8: smooth blobs of many sizes, for any detector; always the same."""
    rng = np.random.default_rng(0)
    total = np.zeros((480, 640))
    for cells in (6, 12, 24, 48):
        noise = rng.normal(0.0, 1.0, (cells, cells * 4 // 3))
        total += cv2.resize(noise, (640, 480), interpolation=cv2.INTER_CUBIC)
    return np.clip(128 + 48 * total, 0, 255).astype(np.uint8)


def record_dtype(kind: str, dim: int) -> np.dtype:
    """Record dtype for descriptors of `dim` entries, or bits."""
    if kind == "sift":
        return sift.ORIENTED
    field = ("bits", "u1", (dim // 8,)) if kind == "binary" else ("descriptor", "<f4", (dim,))
    return np.dtype([*((name, "<f4") for name in sift.GEOMETRY), field])


def kind_of(dtype: np.dtype) -> Tuple[str, int]:
    """(kind, dim) of a dtype from `record_dtype`. Raises ValueError for any other."""
    if dtype in (sift.KEYPOINT, sift.ORIENTED):
        return "sift", 128
    for kind, field, bits in (("binary", "bits", 8), ("float", "descriptor", 1)):
        dim = bits * math.prod(dtype[field].shape) if field in (dtype.names or ()) else 0
        if dim and dtype == record_dtype(kind, dim):
            return kind, dim
    raise ValueError(f"{dtype}: not a record of keypoints")


def descriptors_of(records: np.ndarray) -> np.ndarray:
    """The (first) descriptors of (n,) records: (n, D) float32 or uint8, for bits (n, D / 8)
    uint8.
    """
    return records["bits" if "bits" in (records.dtype.names or ()) else "descriptor"]


def records_of(name: str, values: Mapping[str, Any]) -> np.ndarray:
    """(n,) records of the return value of extractor `name`. Raises RequestError for wrong ones."""

    def wrong(reason: str) -> RequestError:
        return RequestError(f"extractor {name}: {reason} (see docs/features.md)")

    try:
        keypoints, scores, descriptors = (
            np.asarray(values[key]) for key in ("keypoints", "scores", "descriptors")
        )
    except (KeyError, TypeError, IndexError) as error:
        raise wrong("must return a dictionary with keypoints, scores and descriptors") from error
    count = len(keypoints)
    if not count and (descriptors.ndim != 2 or not descriptors.shape[1]):
        return np.empty(0, sift.ORIENTED)  # of an unknown kind
    if not count:
        keypoints = keypoints.reshape(0, 2)
    if keypoints.shape != (count, 2) or scores.shape != (count,):
        raise wrong(
            f"keypoints {keypoints.shape} and scores {scores.shape}: must be (n, 2) and (n,)"
        )
    if descriptors.ndim != 2 or len(descriptors) != count or not descriptors.shape[1]:
        raise wrong(f"descriptors {descriptors.shape} of {count} keypoints: must be (n, D)")
    if descriptors.dtype != np.uint8 and descriptors.dtype.kind != "f":
        raise wrong(f"descriptors of {descriptors.dtype}: must be float32, or uint8 for bits")
    binary = descriptors.dtype == np.uint8
    width = descriptors.shape[1]
    records = np.zeros(
        count,
        record_dtype("binary", -(-width // 4) * 32) if binary else record_dtype("float", width),
    )
    records["x"], records["y"] = keypoints.T
    records["score"] = scores
    if ("scales" in values) != ("angles" in values):
        raise wrong("must return scales and angles, or neither")
    if "scales" in values:
        records["scale"] = np.asarray(values["scales"])
        records["angle"] = np.asarray(values["angles"])
        if not (records["scale"] > 0).all():
            raise wrong("scales must be above 0")
    descriptors_of(records)[:, :width] = descriptors
    geometry = np.stack([records[key] for key in sift.GEOMETRY])
    if not (np.isfinite(geometry).all() and np.isfinite(descriptors).all() and (scores >= 0).all()):
        raise wrong("numbers must be finite, and scores 0 or more")
    return records
