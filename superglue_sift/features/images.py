"""Read the files of photographs to pixels of 8 bits.

Pillow reads a file by its content, whatever its extension. OpenCV reads colours of 16 bits, and
tifffile the TIFF layouts that Pillow reads wrong or not at all. An animation gives its first
picture. Only the formats of `FORMATS` are tried, since Pillow knows some that run other programs.

Pixels of more than 8 bits are scaled by the range that is in use (`find_range_in_use`). Transparent
pixels and pixels without data are masked: an extractor finds no keypoint there.

A camera held on its side stores rotated pixels, and EXIF tag 0x0112 (Exif 2.32, section 4.6.4) says
how to rotate them upright, as browsers and `cv2.imread` do. COLMAP uses pixels as stored, and so do
training and evaluation. A matcher uses its `frame`, which is upright by default. Every result
states the frame of its coordinates.
"""

from __future__ import annotations

import contextlib
import io
import math
from pathlib import Path
from typing import Any, Mapping, NamedTuple, Optional, Tuple

import cv2
import numpy as np
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from superglue_sift.errors import RequestError, import_extra
from superglue_sift.files import FileName
from superglue_sift.geometry.two_view import (
    Size,
    compose,
    map_to_resized,
    reduced_size,
    reduction_factor,
)

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "PPM", "GIF", "JPEG2000", "AVIF", "HEIF")
MAX_PIXELS = 200_000_000  # More could exceed a worker's memory
# Letters with which brands of HEIC files begin (ISO 23008-12): heic, hevc, mif1, msf1 and others
HEIC = (b"he", b"mi", b"ms")

INNER = (0.1, 99.9)  # Percentiles: dust and glints beyond them do not set the range
SAMPLED = 1 << 18  # The range is computed from about so many pixels
FEW_LEVELS = 16  # With fewer gray levels, a picture is nearly flat or a drawing

UPRIGHT = "upright"
STORED = "stored"
FRAMES = (UPRIGHT, STORED)  # Pixels rotated according to EXIF, or as in the file
ORIENTATION = 0x0112  # EXIF tag


class BadImage(RequestError):
    """A file is not a usable image.

    Attributes:
        name: name of the file.
        reason: one line for bad_images.csv.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason

    def __reduce__(self):
        """Pickle the error with both arguments, since worker processes return it."""
        return type(self), (self.name, self.reason)


class Photo(NamedTuple):
    """The pixels of a file.

    Attributes:
        pixels: (H, W) gray or (H, W, 3) BGR, uint8.
        to_shown: (3, 3) maps coordinates of a result to `pixels`, to draw them.
        size: (width, height) of the file in px, rotated like `pixels`. A file above `MAX_PIXELS`
            has fewer `pixels`.
        turned: EXIF orientation of the file, 1 to 8.
        mask: (H, W) uint8, 0 where a pixel is transparent or has no data. None if there is no such
            pixel.
    """

    pixels: np.ndarray
    to_shown: np.ndarray
    size: Size = (0, 0)
    turned: int = 1
    mask: Optional[np.ndarray] = None


# --- reading


def decode_gray(data: bytes, name: str = "image", frame: str = STORED) -> np.ndarray:
    """Decode the bytes of a file to gray (H, W) uint8.

    Raises:
        BadImage: If the file is damaged.
    """
    return decode_photo(data, name, True, frame).pixels


def decode_color(data: bytes, name: str = "image", frame: str = STORED) -> np.ndarray:
    """Decode the bytes of a file to BGR (H, W, 3) uint8.

    Raises:
        BadImage: If the file is damaged.
    """
    return decode_photo(data, name, False, frame).pixels


def read_gray(path: FileName, frame: str = STORED) -> np.ndarray:
    """Read a file to gray (H, W) uint8.

    Raises:
        RequestError: If the file is missing or damaged.
    """
    return decode_gray(read_bytes(path), str(path), frame)


def read_photo(path: FileName, frame: str) -> Photo:
    """Read a file in colour and upright, to draw coordinates of `frame` on it.

    Raises:
        RequestError: If the file is missing or damaged.
    """
    photo = decode_photo(read_bytes(path), str(path), False, UPRIGHT)
    to_upright = np.eye(3)
    if frame == STORED:
        to_upright = map_to_upright(photo.turned, turn_size(photo.size, photo.turned))
    to_pixels = map_to_resized(photo.size, photo.pixels.shape[1::-1])
    return photo._replace(to_shown=compose(to_pixels, to_upright))


def read_mask(path: FileName, size: Size, turned: int = 1) -> np.ndarray:
    """Read a mask, which has the size of the stored pixels of its photograph.

    Args:
        path: file of the mask.
        size: (width, height) of the photograph in px, after it was rotated.
        turned: the EXIF orientation by which the photograph was rotated.

    Returns:
        The rotated mask, (H, W) uint8. It is 0 where the mask is black, and 255 elsewhere.

    Raises:
        RequestError: If the mask cannot be read or has another size than the stored pixels.
    """
    image = open_image(read_bytes(path), str(path))
    stored_size = turn_size(size, turned)
    if image.size != stored_size:
        mask_text, photo_text = ("x".join(map(str, size)) for size in (image.size, stored_size))
        raise RequestError(f"{path}: the mask has {mask_text} pixels, its photograph {photo_text}")
    # Gray of more than 8 bits stays as it is, since few of its values could become black.
    is_black = np.asarray(image if image.mode[0] in "IF" else image.convert("L")) == 0
    return turn_upright(np.where(is_black, 0, 255).astype(np.uint8), turned)


def read_bytes(path: FileName) -> bytes:
    """Read the bytes of a file.

    Raises:
        BadImage: If the file cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:  # A name with a null byte is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise BadImage(str(path), f"cannot be read: {reason}") from None


def decode_photo(data: bytes, name: str, gray: bool, frame: str) -> Photo:
    """Decode the bytes of a file.

    Args:
        data: content of the file.
        name: name of the file in messages.
        gray: whether to decode to gray (H, W) instead of BGR (H, W, 3), uint8.
        frame: "upright" or "stored".

    Raises:
        BadImage: If the file is damaged.
    """
    tags = _read_tiff_tags(data)
    if tags is None or _pillow_reads(tags):
        pixels, mask, size, turn = _decode_by_pillow(data, name, gray)
    else:
        size = (tags[256], tags[257])
        turn = tags.get(ORIENTATION, 1)
        values = _read_by_tifffile(data, name, tags)
        pixels, mask = _scale_values(values, gray, _read_nodata(tags))
        pixels = 255 - pixels if tags.get(262, 1) == 0 else pixels  # 0 means white
    # So far the pixels are as stored.
    turn = turn if turn in range(1, 9) else 1
    if frame == UPRIGHT:
        pixels = turn_upright(pixels, turn)
        mask = None if mask is None else turn_upright(mask, turn)
        size = turn_size(size, turn)
    return Photo(pixels, np.eye(3), size, turn, mask)


# --- Pillow


def _decode_by_pillow(
    data: bytes, name: str, gray: bool
) -> Tuple[np.ndarray, Optional[np.ndarray], Size, int]:
    """Decode by Pillow, and colours of more than 8 bits by OpenCV, since Pillow keeps only 8.

    Returns:
        Pixels and mask as stored, (width, height) as stored, and the EXIF orientation.
    """
    image = open_image(data, name)
    width, height = image.size
    # libjpeg can decode 1/2, 1/4 or 1/8 of the size. The decoder of a progressive JPEG keeps the
    # whole image in memory at any scale.
    scales = (1, 2, 4, 8) if image.format == "JPEG" and "progressive" not in image.info else (1,)
    factor = next((scale for scale in scales if width * height <= MAX_PIXELS * scale**2), 0)
    if not factor:
        raise _make_size_error(name, width, height)
    try:
        values = _read_deep_colours(image, data)
        if image.format == "PNG":
            image.load()  # The EXIF data of a PNG may follow its pixels
        turn = _read_orientation(image)  # A decoded TIFF has none any more
        # Take gray from the luma of a JPEG, which is faster than by way of RGB, and up to two gray
        # levels closer.
        image.draft("L" if gray else None, (width // factor, height // factor))
        if values is not None:
            pixels, mask = _scale_values(values, gray, None)
        else:
            pixels, mask = convert_image(image, gray)
            if image.format == "TIFF":  # Pillow has rotated it upright
                pixels = turn_upright(pixels, invert_orientation(turn))
                mask = None if mask is None else turn_upright(mask, invert_orientation(turn))
    except Exception as error:  # Decoders of damaged data raise any type of error
        raise BadImage(name, f"damaged {image.format}: {_to_line(error)}") from None
    if factor == 1:
        return pixels, mask, pixels.shape[1::-1], turn
    # libjpeg rounds the size up, so its pixels lie at multiples of the factor. Move them to where
    # an exact reduction has them.
    exact = (0, 0, width / factor, height / factor)
    moved = Image.fromarray(pixels).resize(pixels.shape[1::-1], Image.Resampling.BILINEAR, exact)
    return np.array(moved), mask, (width, height), turn


def is_plain_jpeg(data: bytes, name: str) -> bool:
    """Say whether every decoder gives Pillow's pixels for this file.

    They do for a JPEG of 8 bits, gray or of three components, which ends with its end marker and
    has at most `MAX_PIXELS`.

    Raises:
        BadImage: If the file is no image.
    """
    image = open_image(data, name)
    width, height = image.size
    is_plain = image.format == "JPEG" and image.mode in ("L", "RGB")
    return is_plain and data.endswith(b"\xff\xd9") and width * height <= MAX_PIXELS


def open_image(data: bytes, name: str) -> Image.Image:
    """Read the header of a file by the first format of FORMATS that accepts it.

    Damage of the pixels shows when they are decoded. This is not `Image.open`, whose limit of
    pixels is one number for the whole process.

    Raises:
        BadImage: If no format accepts the file.
    """
    if not data:
        raise BadImage(name, "empty file")
    reason = "not an image, or of a format that is not read"
    if data[:512].lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        reason = "a web page, not an image"
    is_heic = data[4:8] == b"ftyp" and data[8:10] in HEIC
    if is_heic and not _register_heic():
        reason = "HEIC needs one more package: pip install 'superglue-sift[heic]'"
    Image.init()  # The first call fills Image.OPEN
    for kind in [kind for kind in FORMATS if kind in Image.OPEN]:
        factory, accept = Image.OPEN[kind]
        accepts = accept is not None and accept(data[:16])
        if isinstance(accepts, str):  # The format is known, but this Pillow lacks its library
            reason = accepts
        elif accepts:
            try:
                # An MPO holds several pictures, of which the first is a JPEG.
                return (JpegImageFile if kind == "JPEG" else factory)(io.BytesIO(data), "")
            except Exception as error:
                reason = f"damaged {kind}: {_to_line(error)}"
    raise BadImage(name, reason)


def _register_heic() -> bool:
    """Let Pillow read HEIC by pillow_heif; return whether it is installed."""
    try:
        import pillow_heif
    except ImportError:
        return False
    pillow_heif.register_heif_opener()
    return True


def _read_orientation(image: Image.Image) -> int:
    """Read the EXIF orientation. It is 1 if there is none, or if it is damaged."""
    for key in ("xmp", "XML:com.adobe.xmp"):
        image.info.pop(key, None)  # Pillow would use XMP where EXIF has no orientation
    try:
        return image.getexif().get(ORIENTATION, 1)
    except Exception:  # Damaged EXIF data
        return 1


def _make_size_error(name: str, width: int, height: int) -> BadImage:
    """Create the error for an image of too many pixels."""
    return BadImage(
        name,
        f"too large: {width}x{height} pixels, at most {MAX_PIXELS // 1_000_000} megapixels are read"
        " in full; save it smaller (matching reduces images to --resize, 1024 px, anyway), or as a"
        " baseline JPEG, which is read at a smaller scale",
    )


def convert_pil(image: Image.Image) -> Tuple[np.ndarray, Optional[np.ndarray]]:
    """Convert a PIL image of the user by `convert_image`, to gray if it has no colours.

    Raises:
        RequestError: If it has no pixels, if its file is cut off or closed, or if Pillow cannot
            convert its mode.
    """
    file = getattr(image, "filename", "") or "an image of Pillow"
    if 0 in image.size:
        raise RequestError(f"{file}: has no pixels")
    try:
        return convert_image(image, gray=image.mode[0] in "1LIF")
    except Exception as error:  # Decoders of damaged data raise any type of error
        fix = "open the file again, or convert the image to RGB"
        raise RequestError(f"{file}: cannot be read: {_to_line(error)}; {fix}") from None


def convert_image(image: Image.Image, gray: bool) -> Tuple[np.ndarray, Optional[np.ndarray]]:
    """Convert a PIL image to pixels and a mask.

    Returns:
        The pixels, (H, W) uint8 gray or (H, W, 3) uint8 BGR, and the mask, (H, W) uint8. The mask
        is 0 where the image is transparent or has no data. It is None if there is no such pixel.
    """
    if image.mode[0] in "IF":
        nodata = _read_nodata(getattr(image, "tag_v2", {}))
        return _scale_values(np.asarray(image), gray, nodata)
    if image.mode == "La":  # Pillow converts it to LA alone
        image = image.convert("LA")
    if image.has_transparency_data:
        pixels = np.asarray(image.convert("RGBA"))  # (H, W, 4), which also shows gray as it is
        mask = pixels[..., 3].copy()
        return _to_gray_or_bgr(pixels, gray), None if mask.all() else mask
    is_gray = image.mode in ("1", "L") or (gray and image.mode == "P")
    return _to_gray_or_bgr(np.asarray(image.convert("L" if is_gray else "RGB")), gray), None


def _to_gray_or_bgr(pixels: np.ndarray, gray: bool) -> np.ndarray:
    """Copy gray (H, W) or RGB (H, W, 3 or more), uint8, to gray (H, W) or BGR (H, W, 3)."""
    if pixels.ndim == 2:
        return pixels.copy() if gray else cv2.cvtColor(pixels, cv2.COLOR_GRAY2BGR)
    conversion = cv2.COLOR_RGB2GRAY if gray else cv2.COLOR_RGB2BGR
    return cv2.cvtColor(np.ascontiguousarray(pixels[..., :3]), conversion)


# --- pixels of more than 8 bits


def _read_deep_colours(image: Image.Image, data: bytes) -> Optional[np.ndarray]:
    """Read colours of more than 8 bits, of which Pillow keeps 8, by OpenCV.

    Returns:
        (H, W, 3 or 4) RGB or RGBA as stored, or None for other files.
    """
    may_be_deep = ";16" in str(getattr(image, "tile", "")) or image.format in ("PPM", "JPEG2000")
    if not may_be_deep or image.mode not in ("LA", "RGB", "RGBA"):
        return None
    values = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    if values is None or values.dtype == np.uint8 or values.ndim == 2:
        return None
    return values[..., [2, 1, 0, 3][: values.shape[2]]]


# Tags of TIFF 6.0: 256 and 257 are width and height, 258 the bits of a band, 259 the compression,
# 262 the meaning of the bands, 277 their number, 284 their order in the file, 338 the meaning of
# further bands, 339 the type of numbers. 42113 is GDAL's value for no data.


def _read_tiff_tags(data: bytes) -> Optional[ImageFileDirectory_v2]:
    """Read the tags of the first picture of a TIFF. Return None for other and damaged files."""
    if data[:4] not in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return None
    try:
        # A BigTIFF, whose version is 43, has a longer header.
        tags = ImageFileDirectory_v2(data[: 16 if 43 in data[2:4] else 8])
        stream = io.BytesIO(data)
        stream.seek(tags.next)
        tags.load(stream)
        return tags if {256, 257} <= set(tags) else None
    except Exception:  # Pillow reads it next, and says what is damaged
        return None


def _pillow_reads(tags: ImageFileDirectory_v2) -> bool:
    """Say whether Pillow, or OpenCV for colours of 16 bits, reads this layout right.

    Pillow reads other layouts as noise, as a negative, or not at all. tests/features/test_images.py
    compares pixels.
    """
    bits = set(tags.get(258, (1,)))
    layout = (tags.get(262, 1), tags.get(277, 1))
    if set(tags.get(339, (1,))) != {1}:  # Signed numbers or floats
        return False
    if bits == {16}:
        # One plane for each band is read as noise.
        return layout in {(1, 1), (2, 3), (2, 4)} and tags.get(284, 1) == 1
    # Gray, RGB(A), palette, CMYK, YCbCr
    readable = {(0, 1), (1, 1), (2, 3), (2, 4), (3, 1), (5, 4), (6, 3)}
    if tags.get(284, 1) == 2:
        # Pillow mixes the planes of YCbCr, and refuses some RGBA that is not compressed.
        readable -= {(6, 3), (2, 4)} if tags.get(259, 1) == 1 else {(6, 3)}
    return bits <= {1, 2, 4, 8} and layout in readable


def _read_by_tifffile(data: bytes, name: str, tags: ImageFileDirectory_v2) -> np.ndarray:
    """Read the values of a TIFF, (H, W) gray or RGB(A) (H, W, 3 or 4), as stored.

    If there are more bands than a photograph has, the first three are its colours, as in other
    programs. If there are two, the first is its gray.

    Raises:
        BadImage: If the file cannot be read. The message names the layout.
    """
    if tags[256] * tags[257] > MAX_PIXELS:
        raise _make_size_error(name, tags[256], tags[257])
    bands = tags.get(277, 1)
    kind = {1: "uint", 2: "int", 3: "float"}.get(tags.get(339, (1,))[0], "other type of ")
    layout = f"a TIFF of {bands} band{'s' * (bands > 1)} of {kind}{tags.get(258, (1,))[0]}"
    convert = "convert it: gdal_translate -b 1 -ot Byte -scale IN.tif OUT.tif"
    try:
        tifffile = import_extra("tifffile", "tiff")
        with tifffile.TiffFile(io.BytesIO(data)) as file:
            values = file.pages[0].asarray()
    except Exception as error:  # A decoder or tifffile itself is missing, or the data are damaged
        values = _decompress_tiff(data, tags)
        if values is None:
            reason = _to_line(error)
            if isinstance(error, ImportError) or "imagecodecs" in reason:
                reason = "its compression needs one more package: pip install imagecodecs"
            raise BadImage(name, f"{layout} cannot be read: {reason}; or {convert}") from None
    if tags.get(284, 1) == 2 and values.ndim == 3:
        # Planes (bands, H, W) -> (H, W, bands)
        values = np.moveaxis(values, 0, -1)
    if tags.get(262, 1) not in (0, 1, 2) or values.ndim > 3 or values.dtype.kind not in "uif":
        raise BadImage(name, f"{layout}, which is neither gray nor RGB; {convert}")
    if values.ndim == 2:
        return values
    # (H, W, bands) -> (H, W, 3 or 4), where the last band is alpha if the file says so
    colours = [0, 1, 2] if bands > 2 else [0, 0, 0]
    is_alpha = tags.get(338, (0,))[-1:] in ((1,), (2,))
    return values[..., [*colours, bands - 1] if is_alpha else colours]


def _decompress_tiff(data: bytes, tags: ImageFileDirectory_v2) -> Optional[np.ndarray]:
    """Read floats and signed numbers of a TIFF whose compression tifffile alone does not know.

    OpenCV knows LZW and predictors, and Pillow also ZSTD.

    Returns:
        The values, (H, W) or (H, W, 3 or 4), or None for layouts that both read wrong, and for
        damaged data.
    """
    kind = (tags.get(339, (1,))[0], tags.get(258, (1,))[0])
    bands = tags.get(277, 1)
    is_gray_or_rgb = (tags.get(262, 1), bands) in {(0, 1), (1, 1), (2, 3), (2, 4)}
    in_planes = tags.get(284, 1) == 2 and bands > 1
    # OpenCV reads floats and 32 bits for any meaning of the bands, and 16 bits for these.
    is_wide = kind in {(3, 32), (3, 64), (2, 32)} and bands in (1, 3, 4)
    if in_planes or not (is_wide or (kind == (2, 16) and is_gray_or_rgb)):
        return None
    with contextlib.suppress(Exception):  # Decoders of damaged data raise any type of error
        values = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
        if values is not None:
            return values if values.ndim == 2 else values[..., [2, 1, 0, 3][: values.shape[2]]]
        # Pillow mixes the bytes of compressed numbers whose highest byte comes first (MM).
        if bands == 1 and kind != (3, 64) and data[:2] == b"II":
            return np.asarray(open_image(data, ""))
    return None


def _read_nodata(tags: Mapping[int, Any]) -> Optional[float]:
    """Return the value that GDAL has noted in a TIFF for pixels without data, or None."""
    try:
        return float(str(tags[42113]).strip("\0 "))
    except (KeyError, ValueError):
        return None


def _scale_values(
    values: np.ndarray, gray: bool, nodata: Optional[float]
) -> Tuple[np.ndarray, Optional[np.ndarray]]:
    """Scale values of any type to 8 bits by the range that is in use.

    Args:
        values: (H, W) gray or (H, W, 3 or 4) RGB(A).
        gray: whether to convert to gray.
        nodata: value of pixels without data, or None.

    Returns:
        Pixels and mask, as `convert_image` returns them.
    """
    colours = values[..., :3] if values.ndim == 3 else values
    is_valid = np.isfinite(colours)
    if nodata is not None:
        is_valid &= colours != nodata
    # Map `low` to 0 and `high` to 256. float32 holds all numbers of 24 bits.
    low, high = find_range_in_use(colours, is_valid)
    levels = np.where(is_valid, colours, low).astype(np.float32).clip(low, high)
    levels = (levels - np.float32(low)) * np.float32(256.0 / max(high - low, 1e-30))
    # Values at the upper end of the range give 256, which is cut to 255.
    pixels = levels.clip(0, 255).astype(np.uint8)
    mask = np.asarray(is_valid.any(axis=-1) if values.ndim == 3 else is_valid)
    if values.shape[2:] == (4,):
        mask = mask & (values[..., 3] > 0)
    return _to_gray_or_bgr(pixels, gray), None if mask.all() else mask.astype(np.uint8)


def find_range_in_use(values: np.ndarray, is_valid: np.ndarray) -> Tuple[float, float]:
    """Find the range (low, high) of the values that become the gray levels 0 and 256.

    The range is between the percentiles `INNER` of the medians of 3x3 values, so that single hot
    and dead pixels do not count. An end value that stands apart from the rest, such as -9999 for no
    data, is left out. Where the range fills half of the numbers from 0 to a power of two, these
    numbers are the range. Then 10, 12, 14 and 16 bits of one photograph give the same gray levels.

    Args:
        values: (H, W) or (H, W, 3). All bands share one range.
        is_valid: of the same shape, False where a value has no meaning.
    """
    if values.dtype == np.uint8:
        return 0.0, 256.0
    # Take medians of 3x3 values at some 262,144 pixels where all nine are valid.
    step = max(1, round(math.sqrt(values.shape[0] * values.shape[1] / SAMPLED)))
    medians = cv2.medianBlur(np.where(is_valid, values, 0).astype(np.float32), 3)
    all_valid = cv2.erode(is_valid.astype(np.uint8), np.ones((3, 3)))
    samples = np.sort(medians[::step, ::step][all_valid[::step, ::step] > 0])
    if not samples.size:
        return 0.0, 0.0
    # Leave out an end value that is further from the others than the others are wide. Both -32768
    # and -9999 may stand for no data, so each end is tried twice.
    for end in (0, -1, 0, -1):
        others = samples[samples != samples[end]]
        if len(np.unique(others)) < FEW_LEVELS:
            continue
        low, high = np.percentile(others, INNER)
        if max(low - samples[end], samples[end] - high) > high - low:
            samples = others
    low, high = (float(value) for value in np.percentile(samples, INNER))
    # A photograph that fills its bits keeps its gray levels.
    if low >= 0 and high > 0:
        top = 2.0 ** math.ceil(math.log2(high))
        top = top if values.dtype.kind == "f" else max(top, 256.0)
        if 2 * (high - low) >= top:
            return 0.0, top
    return low, high


def count_gray_levels(gray: np.ndarray) -> int:
    """Count how many of the 256 gray levels the pixels (H, W) uint8 have."""
    return int(np.count_nonzero(cv2.calcHist([gray], [0], None, [256], [0, 256])))


# --- sizes and orientations


def reduce_image(pixels: np.ndarray, longer: int) -> np.ndarray:
    """Reduce pixels (H, W) or (H, W, 3) to a longer side of `longer` px, unless they are smaller.

    If `longer` is 0, return them unchanged.
    """
    size = pixels.shape[1::-1]
    factor = reduction_factor(size, longer)
    if factor == 1:
        return pixels
    return cv2.resize(pixels, reduced_size(size, factor), interpolation=cv2.INTER_AREA)


def turn_upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Rotate stored pixels (H, W) or (H, W, 3) uint8 upright."""
    if orientation > 4:
        pixels = pixels.swapaxes(0, 1)
    flip_x, flip_y = _which_axes_flip(orientation)
    return np.ascontiguousarray(pixels[:: -1 if flip_y else 1, :: -1 if flip_x else 1])


def _which_axes_flip(orientation: int) -> Tuple[bool, bool]:
    """Say whether x, and whether y, must be mirrored to rotate pixels of an orientation upright.

    Orientations above 4 swap x and y first.
    """
    return orientation % 4 in (2, 3), orientation % 4 in (3, 0)


def turn_size(size: Size, orientation: int) -> Size:
    """Return the (width, height) of an image after it is rotated upright, or back."""
    return size if orientation < 5 else (size[1], size[0])


def invert_orientation(orientation: int) -> int:
    """Return the orientation that undoes another one."""
    return {6: 8, 8: 6}.get(orientation, orientation)


def map_to_upright(orientation: int, size: Size) -> np.ndarray:
    """Return the map (3, 3) float64 from stored to upright pixel coordinates.

    Args:
        orientation: EXIF orientation, 1 to 8.
        size: (width, height) of the stored pixels.
    """
    H = np.eye(3)
    if orientation > 4:
        H = H[[1, 0, 2]]
    for row, side in enumerate(turn_size(size, orientation)):
        if _which_axes_flip(orientation)[row]:
            H[row] *= -1
            H[row, 2] = side - 1.0
    return H


def _to_line(error: Exception) -> str:
    """Return the message of an error in one line."""
    return " ".join(str(error).split()) or type(error).__name__
