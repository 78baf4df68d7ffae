"""Extract the features of an image of any kind: a file, a PIL image, an array or a tensor."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any, Callable, Optional, Sequence, Tuple, Union

import cv2
import numpy as np
import PIL.Image
import torch

from superglue_sift.errors import RequestError
from superglue_sift.features import sift
from superglue_sift.features.features import Features
from superglue_sift.features.images import (
    FEW_LEVELS,
    Photo,
    convert_pil,
    count_gray_levels,
    read_mask,
    read_photo_for_drawing,
    reduce_image,
)
from superglue_sift.files import FileName
from superglue_sift.geometry import two_view

# Ratio of the size of the image for refinement to that for SIFT. For photographs of 1,536 px with
# known homographies, and SIFT at 512 px, the median error is 0.07 px of the file with 1, 0.05 with
# 2, and 0.06 with 3, where the deviations are too small.
REFINED_AT = 2
# Images that are smaller are enlarged to this longer side for SIFT, at most ENLARGED_MOST times.
ENLARGED_TO = 768
ENLARGED_MOST = 2
# SIFT finds hardly anything in a reduced image whose shorter side has fewer pixels than the first
# number. A warning names the size that gives the shorter side the second number.
SLIM_PX = 96
ENOUGH_PX = 480

logger = logging.getLogger(__name__)

# An image is a file, a PIL image, an array or a tensor. Arrays are as in OpenCV: uint8, (H, W) gray
# or (H, W, 3) BGR. Tensors are as in torch, on any device: uint8 or float from 0 to 1, (H, W),
# (1, H, W) or (1, 1, H, W) gray, (3, H, W) or (1, 3, H, W) RGB.
Image = Union[str, Path, np.ndarray, torch.Tensor, PIL.Image.Image]


def extract_features(
    gray: np.ndarray,
    max_keypoints: int,
    resize: int = 0,
    extractor: Callable[..., Features] = sift.extract,
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
    seen_size = seen.shape[1::-1]
    resized = [cv2.resize(mask, seen_size, interpolation=cv2.INTER_NEAREST) for mask in masks]
    joined_mask = [np.minimum.reduce(resized)] if resized else []
    features = extractor(seen, max_keypoints, *joined_mask)
    count = len(features.keypoints)
    # Warn about a picture in which little can be found.
    levels = count_gray_levels(seen)
    if min(seen_size) < SLIM_PX and min(seen_size) <= min(size) / 2:
        sizes = f"{size[0]}x{size[1]} px are reduced to {seen_size[0]}x{seen_size[1]}"
        longer = math.ceil(max(size) * min(1.0, ENOUGH_PX / min(size)))
        fix = f"use --resize {longer} (in Python resize={longer})"
        logger.warning("%s: %d keypoints, since %s; %s", name, count, sizes, fix)
    elif not count or levels < FEW_LEVELS:
        counts = f"{count} keypoints, {levels} of 256 gray levels in use"
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
    size = two_view.compute_reduced_size(gray.shape[1::-1], 1 / times)
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


def load_photo_for_drawing(image: Image, frame: str) -> Photo:
    """Read or convert an image, upright, with the map to it from coordinates of `frame`.

    Arrays and tensors are assumed to be upright.

    Raises:
        RequestError: If it cannot be read.
    """
    if isinstance(image, (str, Path)):
        return read_photo_for_drawing(image, frame)
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
