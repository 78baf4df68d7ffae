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
from superglue_sift.files import compute_file_sha256


@dataclass(frozen=True)
class Extractor:
    """An extractor finds the keypoints of an image. Call it as `sift.extract`.

    Attributes:
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
        """Extract the keypoints of an image.

        Args:
            gray: (H, W) uint8.
            max_keypoints: maximum number of keypoints, 1 or more.
            mask: (H, W) uint8. No keypoint lies at a pixel where it is 0.

        Returns:
            (n,) keypoints of `dtype` at distinct positions, highest rank first.

        Raises:
            RequestError: If descriptors are not like those of other images.
        """
        # SIFT takes the mask itself, and its keypoints need no checks.
        if self.name == SIFT.name:
            return self.function(gray, max_keypoints, mask)
        values = self.function(gray, max_keypoints)
        if not len(values["keypoints"]):
            return np.empty(0, self.dtype)  # OpenCV's descriptors are then None
        records = make_records(f"extractor {self.name}", values)
        # A store has one dtype, and a network one length of descriptors.
        if records.dtype != self.dtype or bool(records["scale"][0]) != self.scale_angle:
            raise RequestError(f"extractor {self.name}: its descriptors change from image to image")
        if mask is not None:
            # The function knows no masks, so keypoints at masked pixels are dropped here.
            x, y = np.rint(sift.positions(records).T).astype(int)
            height, width = mask.shape
            records = records[mask[y.clip(0, height - 1), x.clip(0, width - 1)] > 0]
        return sift.keep_strongest(records, max_keypoints)


SIFT = Extractor("sift", sift.ORIENTED, True, sift.extract, sift.VERSION)


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
    try:
        imported = importlib.import_module(module)
        function = getattr(imported, attribute)
        values = function(draw_test_pattern(), 512)
    except Exception as error:  # Code of the user may raise any error
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        fix = "a module that Python finds, a colon, a function: see docs/features.md"
        raise RequestError(f"extractor {name}: {reason} ({fix})") from error
    records = make_records(f"extractor {name}", values)
    if not len(records):
        raise RequestError(f"extractor {name}: finds no keypoint on a pattern full of them")
    return Extractor(
        name,
        records.dtype,
        bool(records["scale"][0]),
        function,
        compute_file_sha256(imported.__file__ or ""),
    )


def draw_test_pattern() -> np.ndarray:
    """Draw smooth blobs, for any detector; return (480, 640) uint8, always the same."""
    noise = np.random.default_rng(0).integers(0, 256, (48, 64)).astype(np.uint8)
    return cv2.resize(noise, (640, 480), interpolation=cv2.INTER_CUBIC)


def record_dtype(kind: str, dim: int) -> np.dtype:
    """Return the dtype of keypoint records.

    Args:
        kind: kind of the descriptors, "sift" or "float".
        dim: number of entries of a float descriptor.
    """
    if kind == "sift":
        return sift.ORIENTED
    geometry = [(name, "<f4") for name in sift.GEOMETRY]
    return np.dtype([*geometry, ("descriptor", "<f4", (dim,))])


def descriptor_kind(dtype: np.dtype) -> Tuple[str, int]:
    """Return the kind of the descriptors of a dtype, "sift" or "float", and their length.

    Raises:
        ValueError: If the dtype is not one of `record_dtype`.
    """
    if dtype in (sift.KEYPOINT, sift.ORIENTED):
        return "sift", 128
    shape = dtype["descriptor"].shape if "descriptor" in (dtype.names or ()) else ()
    if len(shape) == 1 and dtype == record_dtype("float", shape[0]):
        return "float", shape[0]
    raise ValueError(f"{dtype}: not a dtype of keypoints")


def make_records(name: str, values: Mapping[str, Any]) -> np.ndarray:
    """Convert the return value of an extractor to keypoint records.

    Args:
        name: what messages begin with.
        values: arrays by name, as the docstring of this module lists them.

    Returns:
        (n,) keypoints with float descriptors.

    Raises:
        RequestError: For a wrong value.
    """

    def make_error(reason: str) -> RequestError:
        return RequestError(f"{name}: {reason} (see docs/features.md)")

    keys = ["keypoints", "scores", "descriptors"]
    keys += [key for key in ("scales", "angles") if key in values]
    if len(keys) == 4:
        raise make_error("must return scales and angles, or neither")
    try:
        columns = {key: np.asarray(values[key]) for key in keys}
        kind = columns["descriptors"].dtype
        count, dim = columns["descriptors"].shape
        records = np.zeros(count, record_dtype("float", dim))
        records["x"], records["y"] = columns.pop("keypoints").reshape(count, 2).T
        for key, column in columns.items():
            records[key[:-1]] = column.reshape(records[key[:-1]].shape)  # "scores" -> "score"
    except (KeyError, TypeError, ValueError) as error:
        shapes = "keypoints (n, 2), scores (n,) and descriptors (n, D)"
        raise make_error(f"must return a dictionary with {shapes}: {error}") from error
    # Bits in bytes, such as ORB's, would look like numbers.
    if kind.kind != "f":
        raise make_error(f"descriptors of {kind}: must be float32")
    # Check the values. Scales are checked only if they were given, since they are 0 otherwise.
    for field in records.dtype.names or ():
        if not np.isfinite(records[field]).all():
            raise make_error(f"{field} must be finite")
    if (records["score"] < 0).any() or ("scales" in values and (records["scale"] <= 0).any()):
        raise make_error("scores must be 0 or more, and scales above 0")
    return records
