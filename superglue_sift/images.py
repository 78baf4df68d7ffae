"""Decode image files, and reject damaged ones, if possible before decoding.

Decoders do not detect damage: OpenCV fills the missing part of a truncated file, and every decoder accepts a hole of
zeros. So the container is checked first, at a fraction of the cost of decoding. JPEG: an end-of-image marker after the
first scan, no hole of zeros larger than the picture could explain. PNG: one header, at the start, and the CRC-32 of
every chunk up to IEND. WebP: the length in its header. These and BMP, PNM and TIFF: a size in the header, within
limits. The size of other formats that OpenCV reads is checked after decoding.

The same rules hold everywhere in the project: the content decides the format, not the extension; gray, colour, CMYK,
16-bit and transparent files are all read as 8-bit. Training and evaluation use pixels as stored; a matcher uses its
`frame`, by default upright (`upright`). Pictures are always upright.
"""

from __future__ import annotations

import re
import struct
import zlib
from pathlib import Path
from typing import NamedTuple, Optional, Tuple, Union

import cv2
import numpy as np

from superglue_sift.errors import RequestError
from superglue_sift.upright import AXES, STORED, TIFF, UPRIGHT, inverse, orientation, tiff_tags, to_upright, turned

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")  # of images in folders
MAX_PIXELS = 200_000_000  # a larger image could exceed a worker's memory
HOLE_BYTES = 1024  # shortest run of zeros in coded JPEG data that counts as damage

_JPEG = b"\xff\xd8\xff"
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_PIXELS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")
_JPEG_BARE = (0x01, *range(0xD0, 0xD9))  # markers without a length: TEM, RST0-7, SOI
_JPEG_SIZE = (0xC0, 0xC1, 0xC2, 0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF)
_GAP = rb"(?:\s|#[^\n]*\n)+"
_PNM = re.compile(rb"P[1-6]" + _GAP + rb"(\d{1,18})" + _GAP + rb"(\d{1,18})")
_PNM_HEADER = 65_536  # bytes, with comments
_WIDTH, _HEIGHT = 256, 257  # TIFF tags
_SIZED = (_JPEG, _PNG, b"BM", *TIFF, *(b"P%d" % kind for kind in range(1, 8)))  # formats with a size in the header


class BadImage(Exception):
    """A file that is not a usable image. name: of the file; reason: one line for bad_images.csv."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, reason

    def __reduce__(self):  # worker processes pickle it with both arguments
        return type(self), (self.name, self.reason)


def check(data: bytes, name: str) -> bytes:
    """Return the bytes to decode, or raise BadImage. Only JPEG, PNG and WebP are checked for truncation."""
    if not data:
        raise BadImage(name, "empty file")
    size = declared_size(data, name)
    if size is not None:
        check_size(*size, name)
    if data[:3] == _JPEG:
        _check_jpeg(data, name)
    elif data[:8] == _PNG:
        data = _check_png(data, name)
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        promised = struct.unpack_from("<I", data, 4)[0] + 8
        if len(data) < promised:
            raise BadImage(name, f"truncated WebP: {len(data)} of {promised} bytes")
    elif data[:1024].count(b"\0") == len(data[:1024]):
        raise BadImage(name, "begins with nothing but zeros")
    elif data[:512].lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        raise BadImage(name, "a web page, not an image")
    if size is None and (data.startswith(_SIZED) or data[8:12] == b"WEBP"):
        raise BadImage(name, "damaged: its header states no size")
    return data


def is_plain_jpeg(data: bytes) -> bool:
    """Whether checked data is a JPEG of 8 bits with one or three components."""
    return data[:3] == _JPEG and _jpeg_header(data, "")[3]


def check_size(width: int, height: int, name: str) -> None:
    """Raise BadImage for more than `MAX_PIXELS`."""
    if width * height > MAX_PIXELS:
        raise BadImage(name, f"too large: {width}x{height} pixels, at most {MAX_PIXELS // 1_000_000} megapixels")


def _jpeg_header(data: bytes, name: str) -> Tuple[int, int, int, bool]:
    """Width, height, offset of the first scan, and whether it is plain: 8 bits, one or three components.

    Walks the segments, which skips thumbnails.
    """
    at, width, height, plain = 2, 0, 0, False
    while at + 4 <= len(data):
        if data[at] != 0xFF:
            raise BadImage(name, f"damaged JPEG: no marker at byte {at}")
        marker = data[at + 1]
        if marker == 0xFF or marker in _JPEG_BARE:
            at += 1 if marker == 0xFF else 2
            continue
        if marker == 0xDA:
            return width, height, at, plain
        length = struct.unpack_from(">H", data, at + 2)[0]
        if marker in _JPEG_SIZE and at + 10 <= len(data):
            bits, height, width, components = struct.unpack_from(">BHHB", data, at + 4)
            plain = bits == 8 and components in (1, 3)
        at += 2 + length
    raise BadImage(name, "truncated JPEG: ends inside its header")


def _check_jpeg(data: bytes, name: str) -> None:
    width, height, scan, _ = _jpeg_header(data, name)
    end = data.find(b"\xff\xd9", scan)
    if end < 0:
        raise BadImage(name, "truncated JPEG: no end-of-image marker")
    # A flat 8x8 block takes at least two bits, so a run of zeros this long would code more blocks than the picture has.
    hole = max(HOLE_BYTES, width * height // 64 // 4 * 3)
    if data.find(bytes(hole), scan, end) >= 0:
        raise BadImage(name, f"damaged JPEG: a hole of {hole} or more zero bytes in the coded data")


def _check_png(data: bytes, name: str) -> bytes:
    """Check every chunk, and drop chunks that do not affect pixels: libpng prints warnings about colour profiles."""
    at, kept = len(_PNG), [_PNG]
    while at + 12 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        end = at + 12 + length
        if (kind == b"IHDR") != (at == len(_PNG)):  # a decoder would read another size than `declared_size`
            raise BadImage(name, "damaged PNG: its header is not the first chunk, or not the only one")
        if end > len(data):
            break
        if zlib.crc32(data[at + 4 : end - 4]) != struct.unpack_from(">I", data, end - 4)[0]:
            raise BadImage(name, f"damaged PNG: wrong CRC-32 in a {kind.decode('latin1')} chunk")
        if kind in _PNG_PIXELS:
            kept.append(data[at:end])
        if kind == b"IEND":
            return b"".join(kept)
        at = end
    raise BadImage(name, "truncated PNG: no IEND chunk")


def declared_size(data: bytes, name: str = "image") -> Optional[Tuple[int, int]]:
    """(width, height) in the header; None if it is truncated (JPEG: BadImage) or of another format."""
    try:
        if data[:3] == _JPEG:
            return _jpeg_header(data, name)[:2]
        if data[:8] == _PNG and data[12:16] == b"IHDR":
            return struct.unpack_from(">II", data, 16)  # type: ignore[return-value]
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return _webp(data)
        if data[:2] == b"BM":
            return _bmp(data)
        if data[:4] in TIFF:
            return _tiff(data)
        if data[:2] == b"P7":
            return _pam(data)
        match = _PNM.match(data[:_PNM_HEADER])
        return (int(match[1]), int(match[2])) if match else None
    except struct.error:  # truncated header
        return None


def _webp(data: bytes) -> Optional[Tuple[int, int]]:
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


def _pam(data: bytes) -> Optional[Tuple[int, int]]:
    """The largest width and height in its lines."""
    lines = [line.split(b"#")[0].split() for line in data[:_PNM_HEADER].partition(b"ENDHDR")[0].split(b"\n")]
    stated = [(line[0], int(line[1])) for line in lines if len(line) > 1 and line[1].isdigit() and len(line[1]) < 19]
    widths, heights = ([value for key, value in stated if key == name] for name in (b"WIDTH", b"HEIGHT"))
    return (max(widths), max(heights)) if widths and heights else None


def _bmp(data: bytes) -> Tuple[int, int]:
    if struct.unpack_from("<I", data, 14)[0] == 12:
        return struct.unpack_from("<HH", data, 18)  # type: ignore[return-value]
    width, height = struct.unpack_from("<ii", data, 18)
    return abs(width), abs(height)  # negative height: rows are stored from the top


def _tiff(data: bytes) -> Optional[Tuple[int, int]]:
    tags = tiff_tags(data, (_WIDTH, _HEIGHT))
    return (tags[_WIDTH], tags[_HEIGHT]) if len(tags) == 2 else None


class Photo(NamedTuple):
    """An image to draw. pixels: (H, W) or (H, W, 3) uint8 BGR, upright; to_shown: (3, 3) maps a result to them."""

    pixels: np.ndarray
    to_shown: np.ndarray


def decode_gray(data: bytes, name: str = "image", frame: str = STORED) -> np.ndarray:
    """Decode the bytes of a file to (H, W) uint8. Raises BadImage with the reason if it is damaged."""
    # directly to gray: JPEG by way of BGR takes 1.5 times as long and differs by up to two gray levels
    return _decode(data, name, cv2.IMREAD_GRAYSCALE, frame)


def decode_color(data: bytes, name: str = "image", frame: str = STORED) -> np.ndarray:
    """Decode to (H, W, 3) uint8 BGR, with the checks and errors of `decode_gray`."""
    return _decode(data, name, cv2.IMREAD_COLOR, frame)


def read_gray(path: Union[str, Path], frame: str = STORED) -> np.ndarray:
    """Read a file to (H, W) uint8. Raises RequestError if it is missing or damaged."""
    return gray_of_file(read(path), path, frame)


def gray_of_file(data: bytes, path: Union[str, Path], frame: str = STORED) -> np.ndarray:
    """`read_gray` for the bytes of a file."""
    return _named(data, path, cv2.IMREAD_GRAYSCALE, frame)


def read_photo(path: Union[str, Path], frame: str) -> Photo:
    """Read a file in colour and upright, to draw coordinates of `frame`. Raises RequestError as `read_gray`."""
    data = read(path)
    shown = _named(data, path, cv2.IMREAD_COLOR, UPRIGHT)
    turn = orientation(data)
    size = shown.shape[1::-1] if AXES[turn][0][0] else shown.shape[:2]
    return Photo(shown, to_upright(turn, size) if frame == STORED else np.eye(3))


def read(path: Union[str, Path]) -> bytes:
    """Read the bytes of a file. Raises RequestError if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror}") from None


def _named(data: bytes, path: Union[str, Path], flag: int, frame: str) -> np.ndarray:
    try:
        return _decode(data, str(path), flag, frame)
    except BadImage as error:
        raise RequestError(f"{path}: {error.reason}") from None


def _decode(data: bytes, name: str, flag: int, frame: str) -> np.ndarray:
    turn, is_tiff = orientation(data), data[:4] in TIFF
    data = check(data, name)
    try:
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flag | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error as error:
        raise BadImage(name, f"OpenCV cannot decode it: {error.err}") from None
    if pixels is None:
        raise BadImage(name, "OpenCV cannot decode it (damaged, or an unknown format)")
    check_size(pixels.shape[1], pixels.shape[0], name)
    if is_tiff:  # OpenCV ignores IMREAD_IGNORE_ORIENTATION for TIFF
        return turned(pixels, inverse(turn)) if frame == STORED else pixels
    return turned(pixels, turn) if frame == UPRIGHT else pixels
