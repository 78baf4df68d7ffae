"""EXIF orientation: rotate pixels and positions upright.

A camera held on its side stores rotated pixels, and EXIF tag 274 (0x0112, Exif 2.32, section 4.6.4) says how to undo
it. Browsers and `cv2.imread` rotate pixels upright; COLMAP uses them as stored. Every result states the frame of its
coordinates, upright or stored.
"""

from __future__ import annotations

import struct
from typing import Dict, Iterable, Iterator, Tuple

import numpy as np

UPRIGHT, STORED = FRAMES = ("upright", "stored")  # pixels rotated according to EXIF; pixels as in the file
TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
ORIENTATION = 0x0112  # EXIF tag
# for each orientation, upright x and upright y as (step along stored x, step along stored y)
AXES = {
    1: ((1, 0), (0, 1)), 2: ((-1, 0), (0, 1)), 3: ((-1, 0), (0, -1)), 4: ((1, 0), (0, -1)),
    5: ((0, 1), (1, 0)), 6: ((0, -1), (1, 0)), 7: ((0, -1), (-1, 0)), 8: ((0, 1), (-1, 0)),
}  # fmt: skip


def orientation(data: bytes) -> int:
    """EXIF orientation of a JPEG, PNG, WebP or TIFF file, 1 to 8; 1 if it has none."""
    try:
        for block in _exif_blocks(data):
            value = tiff_tags(block, (ORIENTATION,)).get(ORIENTATION, 1)
            return value if value in AXES else 1
    except struct.error:  # truncated
        pass
    return 1


def turned(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Rotate stored pixels (H, W) or (H, W, C) upright; may return the same array."""
    across, down = AXES[orientation]
    if not across[0]:
        pixels = pixels.swapaxes(0, 1)
    return np.ascontiguousarray(pixels[:: sum(down), :: sum(across)])


def inverse(orientation: int) -> int:
    """The orientation that undoes another."""
    return {6: 8, 8: 6}.get(orientation, orientation)


def to_upright(orientation: int, size: Tuple[int, int]) -> np.ndarray:
    """(3, 3) float64 map from stored to upright pixel coordinates. size: stored (width, height)."""
    H = np.eye(3)
    H[:2, :2] = AXES[orientation]
    H[:2, 2] = np.where(H[:2, :2] < 0, np.array(size) - 1.0, 0.0).sum(axis=1)
    return H


def _exif_blocks(data: bytes) -> Iterator[bytes]:
    """EXIF data of a file, which are in TIFF format; for a TIFF file, the whole file."""
    if data[:4] in TIFF:
        yield data
    elif data[:3] == b"\xff\xd8\xff":
        yield from (body[6:] for kind, body in _jpeg_segments(data) if kind == 0xE1 and body[:6] == b"Exif\0\0")
    elif data[:8] == b"\x89PNG\r\n\x1a\n":
        yield from (body for kind, body in _chunks(data, 8, ">I4s", 4) if kind == b"eXIf")
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        for kind, body in _chunks(data, 12, "<4sI", 0):
            if kind == b"EXIF":
                yield body[6:] if body[:6] == b"Exif\0\0" else body


def _jpeg_segments(data: bytes) -> Iterator[Tuple[int, bytes]]:
    """Marker and content of each segment before the first scan."""
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != 0xDA:
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        length = struct.unpack_from(">H", data, at + 2)[0]
        yield marker, data[at + 4 : at + 2 + length]
        at += 2 + length


def _chunks(data: bytes, at: int, head: str, tail: int) -> Iterator[Tuple[bytes, bytes]]:
    """Kind and content of each chunk of a PNG, followed by `tail` bytes of CRC, or of a WebP, padded to even length."""
    while at + 8 <= len(data):
        first, second = struct.unpack_from(head, data, at)
        kind, length = (first, second) if isinstance(first, bytes) else (second, first)
        yield kind, data[at + 8 : at + 8 + length]
        at += 8 + length + (tail or length % 2)


def tiff_tags(data: bytes, wanted: Iterable[int]) -> Dict[int, int]:
    """Integer tags in the first directory of a TIFF file; BigTIFF ("+") has entries of 20 bytes, others of 12.

    Raises struct.error if the file is truncated.
    """
    if data[:4] not in TIFF:
        return {}
    order = "<" if data[:1] == b"I" else ">"
    big = b"+" in data[:4]
    begin = struct.unpack_from(order + ("Q" if big else "I"), data, 8 if big else 4)[0]
    count = struct.unpack_from(order + ("Q" if big else "H"), data, begin)[0]
    first, length, at_value = begin + (8 if big else 2), 20 if big else 12, 12 if big else 8
    wanted, tags = set(wanted), {}
    for at in range(first, first + length * min(count, 65536), length):
        tag, kind = struct.unpack_from(order + "HH", data, at)
        if tag in wanted and tag not in tags:  # libtiff uses the first of several
            form = {3: "H", 4: "I", 16: "Q"}.get(kind, "I")
            tags[tag] = struct.unpack_from(order + form, data, at + at_value)[0]
    return tags
