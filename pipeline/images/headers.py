"""The size that the header of an image file promises, for formats whose files need no other check.

JPEG and PNG are read in `pipeline.images.integrity`, which walks through them anyway.
"""

from __future__ import annotations

import re
import struct
from typing import Optional, Tuple

Size = Tuple[int, int]  # (width, height)

_GAP = rb"(?:\s|#[^\n]*\n)+"
_PNM = re.compile(rb"P[1-6]" + _GAP + rb"(\d{1,18})" + _GAP + rb"(\d{1,18})")
_PAM = re.compile(rb"P7\s(?s:.*?)WIDTH\s+(\d{1,18})(?s:.*?)HEIGHT\s+(\d{1,18})")
_WIDTH, _HEIGHT = 256, 257  # TIFF tags


def promised_size(data: bytes) -> Optional[Size]:
    """(width, height) by the header of a WebP, BMP, PNM or TIFF file; None for another or a damaged one."""
    try:
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return _webp(data)
        if data[:2] == b"BM":
            return _bmp(data)
        if data[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
            return _tiff(data)
        found = _PNM.match(data[:1024]) or _PAM.match(data[:1024])
        return (int(found[1]), int(found[2])) if found else None
    except struct.error:  # it ends inside its header
        return None


def _webp(data: bytes) -> Optional[Size]:
    kind = data[12:16]
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    if kind == b"VP8L":
        bits = struct.unpack_from("<I", data, 21)[0]
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8X":
        low, high = struct.unpack_from("<IH", data, 24)  # two numbers of 24 bits
        return (low & 0xFFFFFF) + 1, (low >> 24 | high << 8) + 1
    return None


def _bmp(data: bytes) -> Size:
    if struct.unpack_from("<I", data, 14)[0] == 12:
        return struct.unpack_from("<HH", data, 18)  # type: ignore[return-value]
    width, height = struct.unpack_from("<ii", data, 18)
    return abs(width), abs(height)  # a negative height: rows from the top


def _tiff(data: bytes) -> Optional[Size]:
    """From the first directory; a BigTIFF ("+") has entries of 20 bytes, others of 12."""
    order = "<" if data[:1] == b"I" else ">"
    big = b"+" in data[:4]
    begin = struct.unpack_from(order + ("Q" if big else "I"), data, 8 if big else 4)[0]
    count = struct.unpack_from(order + ("Q" if big else "H"), data, begin)[0]
    first, length, at_value = begin + (8 if big else 2), 20 if big else 12, 12 if big else 8
    found = {}
    for at in range(first, first + length * min(count, 4096), length):
        tag, kind = struct.unpack_from(order + "HH", data, at)
        if tag in (_WIDTH, _HEIGHT):
            form = {3: "H", 4: "I", 16: "Q"}.get(kind, "I")
            found[tag] = struct.unpack_from(order + form, data, at + at_value)[0]
    return (found[_WIDTH], found[_HEIGHT]) if len(found) == 2 else None
