"""Features of an image: keypoints with descriptors, extracted from its pixels or provided by the caller."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional, Tuple, Union

import cv2
import numpy as np
import torch

from superglue_sift import sift
from superglue_sift.errors import RequestError
from superglue_sift.images import UPRIGHT, Photo, read_photo
from superglue_sift.sift import KEYPOINT

DESCRIPTOR = KEYPOINT["descriptor"].shape[0]
Extract = Callable[[np.ndarray, int], np.ndarray]  # (gray, max_keypoints) -> records, as `sift.extract`


class Features(NamedTuple):
    """Features of one image of `size` (width, height).

    records: (n,) of dtype `sift.ORIENTED` or `KEYPOINT`, or from `extractors.records_of`; in pixels of the image.
    gray: (H, W) uint8, the pixels for alignment; None if not available.
    image: the image, for pictures; None if not known.
    frame, turned: upright or stored pixels, and the EXIF orientation that was undone (`images`).
    """

    records: np.ndarray
    size: Tuple[int, int]
    gray: Optional[np.ndarray] = None
    image: Any = None  # Optional[Image]
    frame: str = UPRIGHT
    turned: int = 1

    def __repr__(self) -> str:
        return f"Features({len(self.records)} keypoints; {self.size[0]}x{self.size[1]} px)"

    @property
    def keypoints(self) -> np.ndarray:
        """(n, 2) float32, pixels: x right, y down, centre of the first pixel at (0, 0)."""
        return sift.positions(self.records)

    def moved(self, keypoints: np.ndarray) -> Features:
        """A copy with keypoints (n, 2) at other positions."""
        records = self.records.copy()
        records["x"], records["y"] = keypoints.T
        return self._replace(records=records)

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
        """Create features from your own SIFT. Raises RequestError for a wrong shape or range.

        Args:
            keypoints: (n, 2) pixels, distinct.
            scales, angles, scores: (n,) diameter in pixels, degrees, response: OpenCV's `size`, `angle`, `response`.
            descriptors: (n, 128) SIFT with entries from 0 to 255, as from OpenCV.
            size: (width, height) of the image.
        """
        keypoints, descriptors = np.asarray(keypoints), np.asarray(descriptors)
        count = len(keypoints)
        if keypoints.shape != (count, 2):
            raise RequestError(f"keypoints of shape {keypoints.shape}: must be (n, 2)")
        for name, values in (("scales", scales), ("angles", angles), ("scores", scores)):
            if np.shape(values) != (count,):
                raise RequestError(f"{name} of shape {np.shape(values)}: must be ({count},), one for each keypoint")
        if descriptors.shape != (count, DESCRIPTOR):
            raise RequestError(f"descriptors of shape {descriptors.shape}: must be SIFT's, ({count}, {DESCRIPTOR})")
        if count and (descriptors.min() < 0 or descriptors.max() > 255 or descriptors.max() <= 1):
            raise RequestError("descriptors must be whole numbers from 0 to 255, not normalised")
        records = np.zeros(count, KEYPOINT)
        records["x"], records["y"] = keypoints.T
        records["scale"], records["angle"], records["score"] = scales, angles, scores
        records["descriptor"] = descriptors
        return cls(records, size)


# A file; or pixels as in OpenCV: uint8 (H, W) gray or (H, W, 3) BGR; or as in torch: a tensor on any device, (H, W) or
# (1, H, W) gray or (3, H, W) RGB, uint8 or float from 0 to 1.
Image = Union[str, Path, np.ndarray, torch.Tensor]


def extract(gray: np.ndarray, max_keypoints: int, resize: int = 0, extractor: Extract = sift.extract) -> Features:
    """Extract keypoints of a gray image (H, W) uint8, reduced to a longer side of `resize` pixels (0: not reduced)."""
    size = (gray.shape[1], gray.shape[0])
    shrink = min(1.0, resize / max(size)) if resize else 1.0
    if shrink == 1.0:
        return Features(extractor(gray, max_keypoints), size, gray)
    small = [max(1, round(side * shrink)) for side in size]
    records = extractor(cv2.resize(gray, small, interpolation=cv2.INTER_AREA), max_keypoints)
    for name, side, before in zip(("x", "y"), small, size):
        records[name] = (records[name] + 0.5) * (before / side) - 0.5
    records["scale"] /= shrink
    return Features(records, size, gray)


def gray_of(image: Union[np.ndarray, torch.Tensor]) -> np.ndarray:
    """Convert the pixels of an `Image` to (H, W) uint8. Raises RequestError for other pixels."""
    pixels = _array(image)
    gray, color = pixels.ndim == 2, pixels.ndim == 3 and pixels.shape[-1] == 3
    if pixels.dtype != np.uint8 or not (gray or color) or 0 in pixels.shape:
        raise RequestError(f"an image of {pixels.dtype} {pixels.shape}: must be uint8, (H, W) gray or (H, W, 3) BGR")
    return pixels if gray else cv2.cvtColor(pixels, cv2.COLOR_BGR2GRAY)


def photo_of(image: Image, frame: str) -> Photo:
    """An image to draw coordinates of `frame` on; arrays and tensors are assumed to be upright."""
    if isinstance(image, (str, Path)):
        return read_photo(image, frame)
    return Photo(_array(image), np.eye(3))


def _array(image: Union[np.ndarray, torch.Tensor]) -> np.ndarray:
    """The pixels of an `Image` in the layout of OpenCV. Raises RequestError for another type."""
    if isinstance(image, np.ndarray):
        return image
    if not isinstance(image, torch.Tensor):  # the channels of a PIL image are in another order
        other = 'of a PIL image, np.asarray(image.convert("RGB"))[..., ::-1]'
        raise RequestError(f"an image of type {type(image).__name__}: must be a file, an array or a tensor; {other}")
    image = image.detach().cpu()
    if image.is_floating_point():
        if not bool(((image >= 0) & (image <= 1)).all()):
            raise RequestError(f"an image of {image.dtype} {tuple(image.shape)}: floats must be from 0 to 1")
        image = (image * 255).round().to(torch.uint8)
    if image.dim() == 3 and image.shape[0] in (1, 3):
        image = image.permute(1, 2, 0).flip(-1).squeeze(-1)
    elif image.dim() != 2:
        raise RequestError(f"a tensor of shape {tuple(image.shape)}: must be (H, W), (1, H, W) or (3, H, W)")
    return np.ascontiguousarray(image.numpy())
