"""Image files to pixels: Pillow reads, checks and orients them.

The content decides the format, not the extension. Gray, colour, CMYK, palette, 16-bit and
transparent files are all read as 8-bit. Of animations the first picture is read.

Damage that Pillow does not see in a JPEG is looked for here: a missing end, and holes of zeros,
which decoders show as gray. A file of more than `MAX_PIXELS` is refused by its header, before its
pixels take memory. Only the formats of `FORMATS` are tried: Pillow knows some that run other
programs.

A camera held on its side stores rotated pixels, and EXIF tag 0x0112 (Exif 2.32, section 4.6.4) says
how to rotate them upright, as browsers and `cv2.imread` do; COLMAP uses them as stored. Training
and evaluation use pixels as stored; a matcher uses its `frame`, by default upright. Every result
states the frame of its coordinates.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import NamedTuple, Tuple

import cv2
import numpy as np
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from superglue_sift.errors import RequestError
from superglue_sift.files import FileName
from superglue_sift.geometry.two_view import Size, divide, unit_of

# of images in folders
EXTENSIONS = (
    ".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm",
    ".gif", ".jp2", ".avif", ".heic", ".heif",
)  # fmt: skip
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "PPM", "GIF", "JPEG2000", "AVIF", "HEIF")
MAX_PIXELS = 200_000_000  # a larger image could exceed a worker's memory
HOLE_BYTES = 1024  # shortest run of zeros in coded JPEG data that counts as damage
# Brands of ISO 23008-12
HEIC = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")

UPRIGHT = "upright"
STORED = "stored"
FRAMES = (UPRIGHT, STORED)  # rotated according to EXIF; as in the file
ORIENTATION = 0x0112  # EXIF tag
# for each orientation, upright x and upright y as (step along stored x, step along stored y)
AXES = {
    1: ((1, 0), (0, 1)), 2: ((-1, 0), (0, 1)), 3: ((-1, 0), (0, -1)), 4: ((1, 0), (0, -1)),
    5: ((0, 1), (1, 0)), 6: ((0, -1), (1, 0)), 7: ((0, -1), (-1, 0)), 8: ((0, 1), (-1, 0)),
}  # fmt: skip


class BadImage(RequestError):
    """A file that is not a usable image. name: of the file; reason: one line for bad_images.csv."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason

    def __reduce__(self):  # worker processes pickle it with both arguments
        return type(self), (self.name, self.reason)


class Photo(NamedTuple):
    """An image to draw.

    pixels: (H, W) or (H, W, 3) uint8 BGR, upright; to_shown: (3, 3) maps a result to them.
    """

    pixels: np.ndarray
    to_shown: np.ndarray


def decode_gray(data: bytes, name: str = "image", frame: str = STORED) -> np.ndarray:
    """Decode the bytes of a file to (H, W) uint8. Raises BadImage with the reason if damaged."""
    return decode(data, name, True, frame)[0]


def decode_color(data: bytes, name: str = "image", frame: str = STORED) -> np.ndarray:
    """Decode to (H, W, 3) uint8 BGR, with the checks and errors of `decode_gray`."""
    return decode(data, name, False, frame)[0]


def read_gray(path: FileName, frame: str = STORED) -> np.ndarray:
    """Read a file to (H, W) uint8. Raises RequestError if it is missing or damaged."""
    return decode_gray(read(path), str(path), frame)


def read_photo(path: FileName, frame: str) -> Photo:
    """Read a file in colour and upright, to draw coordinates of `frame`. Raises RequestError."""
    shown, turn = decode(read(path), str(path), False, UPRIGHT)
    to_shown = to_upright(turn, turn_size(shown.shape[1::-1], turn))
    return Photo(shown, to_shown if frame == STORED else np.eye(3))


def read(path: FileName) -> bytes:
    """Read the bytes of a file. Raises RequestError if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:  # of a name with a null byte
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"{path}: cannot be read: {reason}") from None


def open_image(data: bytes, name: str) -> Image.Image:
    """Read the header of a file: size, format and mode. Raises BadImage if it cannot be used.

    All bytes of a PNG are checked, of a JPEG its end and holes of zeros; other damage may show
    when the pixels are decoded.
    """
    image, stream = _open(data, name)
    width, height = image.size
    if width * height > MAX_PIXELS:
        limit = f"at most {MAX_PIXELS // 1_000_000} megapixels"
        raise BadImage(name, f"too large: {width}x{height} pixels, {limit}")
    # libtiff takes memory for a whole tile, whatever the size of the image
    tile = [int(getattr(image, "tag_v2", {}).get(tag, 0)) for tag in (322, 323)]
    if tile[0] * tile[1] > MAX_PIXELS:
        raise BadImage(name, f"too large: tiles of {tile[0]}x{tile[1]} pixels")
    if image.format == "JPEG":
        blocks = width * height // 64 * max(len(image.getbands()), 3)
        _check_jpeg(data, stream.tell(), blocks, name)
    elif image.format == "PNG":
        try:
            image.verify()  # the checksum of every chunk; the file has to be opened again
        except Exception as error:
            raise BadImage(name, f"damaged PNG: {_line(error)}") from None
        image = _open(data, name)[0]
    return image


def is_plain_jpeg(data: bytes, name: str) -> bool:
    """Whether it is a JPEG of 8 bits, gray or of three components. Raises as `open_image`."""
    image = open_image(data, name)
    return image.format == "JPEG" and image.mode in ("L", "RGB")


def pixels_of(image: Image.Image, gray: bool) -> np.ndarray:
    """Pixels of a PIL image: (H, W) uint8 gray, or (H, W, 3) uint8 BGR; transparency is ignored."""
    deep = image.mode[0] in "IF"
    if "transparency" in image.info:
        image = image.copy()  # the caller's keeps it
        del image.info["transparency"]  # of a palette: Pillow would warn
    if image.mode == "La":
        image = image.convert("LA")
    if image.mode in ("1", "LA") or (gray and image.mode in ("P", "PA")):
        image = image.convert("L")
    elif image.mode not in ("L", "RGB", "RGBA") and not deep:
        image = image.convert("RGB")
    pixels = np.asarray(image)
    if deep:
        pixels = _to_8_bits(pixels)
    if pixels.ndim == 2:  # a copy can be written to
        return pixels.copy() if gray else cv2.cvtColor(pixels, cv2.COLOR_GRAY2BGR)
    return cv2.cvtColor(pixels[..., :3], cv2.COLOR_RGB2GRAY if gray else cv2.COLOR_RGB2BGR)


def reduce(pixels: np.ndarray, longer: int) -> np.ndarray:
    """Reduce pixels (H, W) or (H, W, 3) to a longer side of `longer`, if smaller and not 0."""
    size = (pixels.shape[1], pixels.shape[0])
    unit = unit_of(size, longer)
    if unit == 1:
        return pixels
    return cv2.resize(pixels, divide(size, unit), interpolation=cv2.INTER_AREA)


def turn_upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Rotate stored pixels (H, W) or (H, W, C) upright; may return the same array."""
    across, down = AXES[orientation]
    if not across[0]:
        pixels = pixels.swapaxes(0, 1)
    return np.ascontiguousarray(pixels[:: sum(down), :: sum(across)])


def turn_size(size: Size, orientation: int) -> Size:
    """(width, height) of an image after it is rotated upright, or back."""
    return size if AXES[orientation][0][0] else (size[1], size[0])


def inverse(orientation: int) -> int:
    """The orientation that undoes another."""
    return {6: 8, 8: 6}.get(orientation, orientation)


def to_upright(orientation: int, size: Size) -> np.ndarray:
    """(3, 3) float64 map from stored to upright pixel coordinates. size: stored (width, height)."""
    H = np.eye(3)
    H[:2, :2] = AXES[orientation]
    H[:2, 2] = np.where(H[:2, :2] < 0, np.array(size) - 1.0, 0.0).sum(axis=1)
    return H


def decode(data: bytes, name: str, gray: bool, frame: str) -> Tuple[np.ndarray, int]:
    """Pixels in `frame`, and the EXIF orientation of the file, 1 to 8. Raises BadImage."""
    image = open_image(data, name)
    if gray and image.format == "JPEG":
        # The luma of the file: faster than by way of RGB, and up to two gray levels closer.
        image.draft("L", None)
    deep_color = ";16" in str(getattr(image, "tile", "")) and image.mode[0] != "I"
    try:
        if image.format == "PNG":
            image.load()  # its EXIF data may follow its pixels
        turn = _orientation(image)  # of a TIFF before decoding, after which it has none
        pixels = pixels_of(image, gray)
    except Exception as error:  # any: decoders of damaged data raise what they like
        raise BadImage(name, f"damaged {image.format}: {_line(error)}") from None
    if deep_color and pixels.max() < 16:  # Pillow reads the upper 8 bits
        raise BadImage(name, "16-bit colour of which 12 bits or fewer are used: save it as 8-bit")
    is_upright = image.format == "TIFF"  # Pillow has rotated it
    if is_upright != (frame == UPRIGHT):
        pixels = turn_upright(pixels, inverse(turn) if is_upright else turn)
    return pixels, turn


def _open(data: bytes, name: str) -> Tuple[Image.Image, io.BytesIO]:
    """The opened image, and its stream, which stands where the header ends.

    Not by `Image.open`, whose limit of pixels is one number for the whole process.
    """
    if not data:
        raise BadImage(name, "empty file")
    reason = "not an image, or of a format that is not read"
    if data[:512].lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        reason = "a web page, not an image"
    lacks_heic = data[4:8] == b"ftyp" and data[8:12] in HEIC and not _register_heic()
    Image.init()  # fills Image.OPEN, the first time
    for kind in [kind for kind in FORMATS if kind in Image.OPEN]:
        factory, accept = Image.OPEN[kind]
        accepts = accept is not None and accept(data[:16])
        if isinstance(accepts, str):  # the format is known, but this Pillow lacks its library
            reason = accepts
        elif accepts:
            stream = io.BytesIO(data)
            try:
                # of the pictures of an MPO the first, which is a JPEG
                return (JpegImageFile if kind == "JPEG" else factory)(stream, ""), stream
            except Exception as error:
                reason = f"damaged {kind}: {_line(error)}"
    if lacks_heic:
        reason = "HEIC needs one more package: pip install 'superglue-sift[heic]'"
    raise BadImage(name, reason)


def _register_heic() -> bool:
    try:
        import pillow_heif
    except ImportError:
        return False
    pillow_heif.register_heif_opener()
    return True


def _check_jpeg(data: bytes, scan: int, blocks: int, name: str) -> None:
    """Raise BadImage for damage that decoders do not report. scan: where the coded data begin;
    blocks: number of 8x8 blocks of all components.
    """
    end = data.find(b"\xff\xd9", scan)
    if end < 0:
        raise BadImage(name, "truncated JPEG: no end-of-image marker")
    # A flat 8x8 block takes at least two bits, so a run of zeros this long would code more blocks
    # than the picture has.
    hole = max(HOLE_BYTES, blocks // 4)
    if data.find(bytes(hole), scan, end) >= 0:
        raise BadImage(name, f"damaged JPEG: a hole of {hole} or more zero bytes in the coded data")


def _orientation(image: Image.Image) -> int:
    for key in ("xmp", "XML:com.adobe.xmp"):
        image.info.pop(key, None)  # Pillow would take the orientation from it where EXIF has none
    try:
        turn = image.getexif().get(ORIENTATION, 1)
    except Exception:  # damaged EXIF data
        return 1
    return turn if turn in AXES else 1


def _to_8_bits(pixels: np.ndarray) -> np.ndarray:
    """Scale gray pixels of more bits by those in use: cameras store 10, 12 or 14 bits in 16."""
    if pixels.dtype.kind == "f":
        pixels = np.nan_to_num(pixels, posinf=0.0)
        return (np.clip(pixels / max(1.0, pixels.max()), 0, 1) * 255).round().astype(np.uint8)
    unused = max(int(pixels.max()).bit_length(), 8) - 8
    return (pixels.clip(0) >> unused).astype(np.uint8)


def _line(error: Exception) -> str:
    """The message of an error in one line."""
    return " ".join(str(error).split()) or type(error).__name__
