"""Bytes of an image file to gray pixels, refusing what is damaged.

A decoder that gives pixels proves little: OpenCV fills the missing part of a cut file, and every decoder
accepts a hole of zeros. So the container is checked first (`pipeline.images.integrity`).

Policy, the same everywhere in the project: the content decides what a file is, its extension does not; gray,
colour, CMYK, 16-bit and transparent files are all read as 8-bit gray; **EXIF orientation is ignored**, pixels
are taken as stored, so that keypoints and homographies live in the frame of the stored pixels (as in COLMAP).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Iterable, Iterator, List, Tuple, Union

import cv2
import numpy as np

from pipeline.errors import RequestError
from pipeline.images import integrity
from pipeline.images.integrity import BadImage

if TYPE_CHECKING:
    from pipeline.images.manifest import Entry
    from pipeline.images.sources import ImageSet

__all__ = ["BadImage", "EXTENSIONS", "decode_color", "decode_gray", "decoded", "list_images", "read_gray"]

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")


def decode_gray(data: bytes, name: str = "image") -> np.ndarray:
    """(H, W) uint8 from the bytes of a file; BadImage with the reason when they are not a whole image.

    A BGR decode would cost half as much again and differ by up to two gray levels, so JPEG is decoded to
    gray at once. `name` only serves the message.
    """
    return _decode(data, name, cv2.IMREAD_GRAYSCALE)


def decode_color(data: bytes, name: str = "image") -> np.ndarray:
    """(H, W, 3) uint8 BGR, for pictures; the same checks and errors as `decode_gray`."""
    return _decode(data, name, cv2.IMREAD_COLOR)


def decoded(
    images: ImageSet, entries: Iterable[Entry]
) -> Iterator[Tuple[Entry, Union[np.ndarray, BadImage]]]:
    """Each entry with its gray pixels (H, W) uint8, or with why it cannot serve; in their order, each once."""
    for entry in entries:
        try:
            yield entry, decode_gray(images.read(entry), entry.name)
        except BadImage as bad:
            yield entry, bad


def read_gray(path: Union[str, Path]) -> np.ndarray:
    """(H, W) uint8 of a file a person named; RequestError when it is missing or damaged."""
    try:
        return decode_gray(Path(path).read_bytes(), str(path))
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror}") from None
    except BadImage as error:
        raise RequestError(f"{path}: {error.reason}") from None


def _decode(data: bytes, name: str, flag: int) -> np.ndarray:
    data = integrity.check(data, name)
    try:
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flag | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error as error:
        raise BadImage(name, f"OpenCV cannot decode it: {error.err}") from None
    if pixels is None:
        raise BadImage(name, "OpenCV cannot decode it (damaged, or an unknown format)")
    integrity.check_size(pixels.shape[1], pixels.shape[0], name)
    return pixels


def list_images(folder: Union[str, Path]) -> List[Path]:
    """Image files under `folder`, nested folders included, sorted; by extension, letter case ignored.

    Hidden files and folders are left out. A dangling link is listed: reading it tells what is wrong.
    Raises RequestError when the folder is missing.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RequestError(f"{folder}: no such folder; give the folder that holds the images")
    found: List[Path] = []
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.suffix.lower() in EXTENSIONS and not hidden and not path.is_dir():
            found.append(path)
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())
