"""Features of an image: keypoints with descriptors.

They are extracted from its pixels, or provided by the caller.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional, Sequence, Tuple, Union

import cv2
import numpy as np
import PIL.Image
import torch

from superglue_sift.errors import RequestError
from superglue_sift.features import sift
from superglue_sift.features.extractors import descriptor_kind, make_records
from superglue_sift.features.images import (
    FEW_LEVELS,
    STORED,
    UPRIGHT,
    Photo,
    convert_pil,
    count_gray_levels,
    read_mask,
    read_photo,
    reduce_image,
)
from superglue_sift.features.sift import KEYPOINT, TYPICAL_SCORE, to_sift
from superglue_sift.files import FileName
from superglue_sift.geometry import two_view

# Refinement gets pixels whose longer side is so many times the one that SIFT gets. For photographs
# of 1,536 px with known homographies, and SIFT at 512 px, the median error is 0.07 px of the file
# with 1, 0.05 with 2, and 0.06 with 3, where the deviations are too small.
REFINED_AT = 2
# Images that are smaller are enlarged to this longer side for SIFT, at most ENLARGED_MOST times.
ENLARGED_TO = 768
ENLARGED_MOST = 2
# A keypoint of another program may lie outside of the image by this part of its size, since some
# programs store positions as floats of 16 bits.
OUTSIDE = 1e-3
# SIFT finds hardly anything in a reduced image whose shorter side has fewer pixels than the first
# number. A warning names the size that gives the shorter side the second number.
SLIM_PX = 96
ENOUGH_PX = 480

logger = logging.getLogger(__name__)


class Features(NamedTuple):
    """Features of one image: its keypoints with descriptors.

    Attributes:
        records: (n,) of dtype `sift.ORIENTED` or `KEYPOINT`, or from `extractors.make_records`, in
            pixels of the image.
        size: (width, height) of the image in px.
        gray: (H, W) uint8, the pixels for refinement, which may be reduced. None if there are none.
        image: the image, to draw matches on it. None if it is not known.
        frame: whether pixels are upright or stored (`images`).
        turned: the EXIF orientation that was undone.
        detected_size: (width, height) of the image that SIFT saw, which is the file reduced or
            enlarged. None if it is not known.
    """

    records: np.ndarray
    size: Tuple[int, int]
    gray: Optional[np.ndarray] = None
    image: Any = None  # Optional[Image]
    frame: str = UPRIGHT
    turned: int = 1
    detected_size: Optional[Tuple[int, int]] = None

    def __repr__(self) -> str:
        return f"Features({len(self.records)} keypoints; {self.size[0]}x{self.size[1]} px)"

    @property
    def keypoints(self) -> np.ndarray:
        """Return (n, 2) float32 px: x right, y down, centre of the first pixel at (0, 0)."""
        return sift.positions(self.records)

    def as_detected(self, resize: int) -> Features:
        """Return the keypoints in pixels of the image that SIFT saw.

        Keypoints of your own have no `detected_size`. It is then the size to which `resize` reduces
        the image. But SIFT detects no keypoint below `sift.MIN_SCALE`. If `resize` would make a
        keypoint smaller than this, your SIFT saw a larger image, and the image is reduced less.

        Args:
            resize: longer side in px to which images are reduced, or 0 for images in full size.
        """
        if self.detected_size is not None:
            return self.resize(self.detected_size)
        factor = two_view.reduction_factor(self.size, resize)
        scales = self.records["scale"]
        if len(scales) and descriptor_kind(self.records.dtype)[0] == "sift":
            factor = max(1.0, min(factor, float(scales.min()) / sift.MIN_SCALE))
        return self.resize(two_view.reduced_size(self.size, factor))

    def resize(self, size: Tuple[int, int]) -> Features:
        """Return the keypoints in pixels of the image resized to `size` (width, height) px."""
        if tuple(size) == tuple(self.size):
            return self
        records = self.records.copy()
        for name, after, before in zip(("x", "y"), size, self.size):
            # Pixel centres are at whole numbers, so the edge of the image is at -0.5.
            records[name] = (records[name] + 0.5) * (after / before) - 0.5
        records["scale"] *= max(size) / max(self.size)
        return self._replace(records=records, size=size)

    def select(self, index: Union[slice, np.ndarray]) -> Features:
        """Keep only the keypoints at these indices, in their order."""
        return self._replace(records=self.records[index])

    def move(self, keypoints: np.ndarray) -> Features:
        """Return a copy with the keypoints at other positions (n, 2) px."""
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
        """Create features from your own SIFT, in the same order.

        Several keypoints may have one position, as in OpenCV, if their scales or angles differ.

        Args:
            keypoints: (n, 2) px of the image.
            scales: (n,) diameters in px, OpenCV's `size`.
            angles: (n,) degrees, OpenCV's `angle`.
            scores: (n,), OpenCV's `response`.
            descriptors: (n, 128) SIFT with entries from 0 to 255, as from OpenCV.
            size: (width, height) of the image in px.

        Raises:
            RequestError: For a wrong shape or range, or a keypoint that occurs twice.

        Example:
            >>> keypoints = np.array([[10.0, 20.0], [30.0, 5.0]])
            >>> one = np.ones(2)
            >>> descriptors = np.full((2, 128), 45)
            >>> features = Features.of(keypoints, 4 * one, 90 * one, one, descriptors, (64, 48))
            >>> features.keypoints.tolist()
            [[10.0, 20.0], [30.0, 5.0]]
        """
        features = cls._from_sift(keypoints, scales, angles, scores, descriptors, size)
        geometry = np.stack([features.records[name] for name in ("x", "y", "scale", "angle")])
        repeated = len(features.records) - np.unique(geometry, axis=1).shape[1]
        if repeated:
            reason = "have the position, scale and angle of another"
            raise RequestError(f"keypoints: {repeated} of them {reason}; give each keypoint once")
        return features

    @classmethod
    def _from_sift(
        cls,
        keypoints: np.ndarray,
        scales: np.ndarray,
        angles: np.ndarray,
        scores: np.ndarray,
        descriptors: np.ndarray,
        size: Tuple[int, int],
    ) -> Features:
        """Create features as `of`, where keypoints may occur twice."""
        if len(size) != 2 or min(size) < 1:
            raise RequestError(f"size {size}: must be (width, height), 1 px or more")
        values = {
            "keypoints": keypoints,
            "scales": scales,
            "angles": angles,
            "scores": scores,
            "descriptors": np.asarray(descriptors, np.float32),
        }
        float_records = make_records("SIFT features", values)
        if not len(float_records):
            return cls(np.empty(0, KEYPOINT), size)
        rows = float_records["descriptor"]
        if rows.shape[1:] != KEYPOINT["descriptor"].shape:
            raise RequestError(f"descriptors of {rows.shape[1]} entries: SIFT has 128")
        if not (rows.min() >= 0 and 1 < rows.max() <= 255):
            raise RequestError("descriptors must be whole numbers from 0 to 255, not normalised")
        _check_positions(float_records, size)
        # The records of SIFT have descriptors of integers.
        records = np.empty(len(float_records), KEYPOINT)
        records["descriptor"] = np.rint(rows)
        for name in sift.GEOMETRY:
            records[name] = float_records[name]
        return cls(records, size)

    @classmethod
    def of_colmap(
        cls, keypoints: np.ndarray, descriptors: np.ndarray, size: Tuple[int, int]
    ) -> Features:
        """Create features from those of a COLMAP database, in the same order, in stored pixels.

        COLMAP's SIFT is the same as OpenCV's except for rounding. It stores no response, so all
        keypoints get the typical one. Two orientations of a point are two keypoints.

        Args:
            keypoints: (n, 4) x, y, sigma, radians, or (n, 6) x, y and the affine shape, from the
                corner of the first pixel, as `pycolmap.Database.read_keypoints` returns them.
            descriptors: (n, 128) uint8, RootSIFT times 512, as `read_descriptors(...).data` returns
                them.
            size: (width, height) of the image in px.

        Raises:
            RequestError: For a wrong shape or range, such as a keypoint outside of the image.
        """
        keypoints = np.asarray(keypoints, np.float32)
        if keypoints.ndim != 2 or keypoints.shape[1] not in (4, 6):
            raise RequestError(f"keypoints of shape {keypoints.shape}: must be (n, 4) or (n, 6)")
        if keypoints.shape[1] == 4:
            sigma, angle = keypoints[:, 2:].T
        else:
            # The scale of an affine shape is the mean length of its columns.
            a11, a12, a21, a22 = keypoints[:, 2:].T
            sigma = (np.hypot(a11, a21) + np.hypot(a12, a22)) / 2
            angle = np.arctan2(a21, a11)
        features = cls._from_sift(
            keypoints[:, :2] - 0.5,  # COLMAP's coordinates start at a corner
            2 * sigma,  # OpenCV's size is a diameter
            np.rad2deg(angle) % 360,
            np.full(len(keypoints), TYPICAL_SCORE, np.float32),
            to_sift(np.asarray(descriptors) / np.float32(512)),
            size,
        )
        return features._replace(frame=STORED)


# An image is a file, a PIL image, an array or a tensor. Arrays are as in OpenCV: uint8, (H, W) gray
# or (H, W, 3) BGR. Tensors are as in torch, on any device: uint8 or float from 0 to 1, (H, W),
# (1, H, W) or (1, 1, H, W) gray, (3, H, W) or (1, 3, H, W) RGB.
Image = Union[str, Path, np.ndarray, torch.Tensor, PIL.Image.Image]


def _check_positions(records: np.ndarray, size: Tuple[int, int]) -> None:
    """Raise RequestError for a keypoint that lies outside of an image of `size` (width, height)."""
    positions = sift.positions(records)
    sides = np.array(size)
    margin = 0.5 + OUTSIDE * sides
    outside = ((positions < -margin) | (positions > sides - 1 + margin)).any(axis=1)
    if outside.any():
        x, y = positions[outside][0]
        reason = f"outside of the image of {size[0]}x{size[1]} px"
        fix = "give pixels, and (width, height) of the image in which they were found"
        raise RequestError(f"keypoints: {outside.sum()} lie {reason}, as ({x:g}, {y:g}); {fix}")


def extract_features(
    gray: np.ndarray,
    max_keypoints: int,
    resize: int = 0,
    extractor: Callable[..., np.ndarray] = sift.extract,
    masks: Sequence[np.ndarray] = (),
    name: str = "an image",
) -> Features:
    """Extract the keypoints of an image, in its pixels.

    Args:
        gray: (H, W) uint8.
        max_keypoints: maximum number of keypoints.
        resize: longer side in px to which a larger image is reduced for the extractor. An image
            below ENLARGED_TO is enlarged for it, but not above `resize`. With 0, the image stays as
            it is.
        extractor: a function that is called as `sift.extract`.
        masks: (H, W) uint8 each, of any size. No keypoint lies where one of them is 0.
        name: name of the image, for the warning about a picture without keypoints or with few gray
            levels.
    """
    size = gray.shape[1::-1]
    # The extractor sees a smaller or a larger image. The masks are resized to it.
    seen = enlarge_image(reduce_image(gray, resize), min(ENLARGED_TO, resize))
    detected_size = seen.shape[1::-1]
    resized = [cv2.resize(mask, detected_size, interpolation=cv2.INTER_NEAREST) for mask in masks]
    joined_mask = [np.minimum.reduce(resized)] if resized else []
    records = extractor(seen, max_keypoints, *joined_mask)
    features = Features(records, detected_size, detected_size=detected_size)
    # Warn about a picture in which little can be found.
    levels = count_gray_levels(seen)
    if min(detected_size) < SLIM_PX and min(detected_size) <= min(size) / 2:
        sizes = f"{size[0]}x{size[1]} px are reduced to {detected_size[0]}x{detected_size[1]}"
        longer = math.ceil(max(size) * min(1.0, ENOUGH_PX / min(size)))
        fix = f"use --resize {longer} (in Python resize={longer})"
        logger.warning("%s: %d keypoints, since %s; %s", name, len(records), sizes, fix)
    elif not len(records) or levels < FEW_LEVELS:
        counts = f"{len(records)} keypoints, {levels} of 256 gray levels in use"
        logger.warning("%s: %s%s", name, counts, ", a mask" if masks else "")
    return features.resize(size)._replace(gray=reduce_image(gray, REFINED_AT * resize))


def load_mask(mask: Union[FileName, np.ndarray], size: Tuple[int, int], turned: int) -> np.ndarray:
    """Read or check the mask of an image.

    Args:
        mask: a file with the mask of the stored pixels (`images.read_mask`), or an array (H, W)
            that is 0 or False where pixels are left out.
        size: (width, height) of the image in px.
        turned: the EXIF orientation that was undone.

    Returns:
        (H, W) uint8, 0 where pixels are left out.

    Raises:
        RequestError: If the mask has another size, or cannot be read.
    """
    # A file belongs to the stored pixels, and an array to those of the caller.
    if isinstance(mask, (str, Path)):
        return read_mask(mask, size, turned)
    mask = np.asarray(mask)
    if mask.shape != (size[1], size[0]):
        raise RequestError(f"a mask of shape {mask.shape}: the image has {(size[1], size[0])}")
    return (mask != 0).astype(np.uint8)


def enlarge_image(gray: np.ndarray, longer: int) -> np.ndarray:
    """Enlarge gray pixels (H, W) to a longer side of `longer` px, at most ENLARGED_MOST times."""
    times = min(longer / max(gray.shape), ENLARGED_MOST)
    # A large image stays as it is.
    if times <= 1:
        return gray
    size = two_view.reduced_size(gray.shape[1::-1], 1 / times)
    return cv2.resize(gray, size, interpolation=cv2.INTER_CUBIC)


def to_gray(
    image: Union[np.ndarray, torch.Tensor, PIL.Image.Image],
) -> Tuple[np.ndarray, Optional[np.ndarray]]:
    """Convert an image in memory to gray.

    Returns:
        The pixels (H, W) uint8, and the mask (H, W) uint8, which is 0 where a PIL image is
        transparent. Other images have no mask, but None.

    Raises:
        RequestError: For pixels of another type or shape.
    """
    pixels, mask = _convert_to_opencv(image)
    # Arrays of the user are checked here. The other types are right by now.
    is_gray = pixels.ndim == 2
    is_color = pixels.ndim == 3 and pixels.shape[-1] == 3
    if pixels.dtype != np.uint8 or not (is_gray or is_color) or 0 in pixels.shape:
        allowed = "must be uint8, (H, W) gray or (H, W, 3) BGR"
        raise RequestError(f"an image of {pixels.dtype} {pixels.shape}: {allowed}")
    return pixels if is_gray else cv2.cvtColor(pixels, cv2.COLOR_BGR2GRAY), mask


def load_photo(image: Image, frame: str) -> Photo:
    """Read or convert an image, to draw coordinates of `frame` on it.

    Arrays and tensors are assumed to be upright.

    Raises:
        RequestError: If it cannot be read.
    """
    if isinstance(image, (str, Path)):
        return read_photo(image, frame)
    return Photo(_convert_to_opencv(image)[0], np.eye(3))


def _convert_to_opencv(image: Any) -> Tuple[np.ndarray, Optional[np.ndarray]]:
    """Convert an `Image` to pixels in the layout of OpenCV, and to its mask.

    Only a transparent PIL image has a mask.

    Raises:
        RequestError: For another type, for a PIL image that cannot be read, and for a tensor of
            another shape or range.
    """
    if isinstance(image, np.ndarray):
        return image, None
    if isinstance(image, PIL.Image.Image):
        return convert_pil(image)
    if not isinstance(image, torch.Tensor):
        allowed = "a file, a PIL image, an array or a tensor"
        raise RequestError(f"an image of type {type(image).__name__}: must be {allowed}")
    # Convert a tensor to uint8 if it is from 0 to 1, then to the axes of OpenCV.
    image = image.detach().cpu()
    if image.is_floating_point():
        if not bool(((image >= 0) & (image <= 1)).all()):
            raise RequestError(f"an image of {image.dtype}: floats must be from 0 to 1")
        image = (image * 255).round().to(torch.uint8)
    pixels = image.numpy()
    if pixels.ndim == 4 and len(pixels) == 1:
        pixels = pixels[0]
    if pixels.ndim == 3 and len(pixels) in (1, 3):
        # (3, H, W) RGB -> (H, W, 3) BGR; (1, H, W) -> (H, W)
        pixels = pixels[0] if len(pixels) == 1 else pixels[::-1].transpose(1, 2, 0)
    elif pixels.ndim != 2:
        allowed = "(H, W), (1, H, W), (3, H, W) or (1, 3, H, W)"
        raise RequestError(f"a tensor of shape {pixels.shape}: must be {allowed}")
    return np.ascontiguousarray(pixels), None
