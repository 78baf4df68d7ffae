"""Read the files of photographs to pixels of 8 bits.

Pillow reads a file by its content, whatever its extension. OpenCV reads PNG, PPM and JPEG 2000
whose colors have 16 bits, and tifffile the layouts of TIFF that Pillow reads wrong or not at all.
An animation gives its first picture. Only the formats of `FORMATS` are tried, since Pillow knows
some that run other programs.

Pixels of more than 8 bits are scaled by `scale_to_8_bits`. Transparent pixels and values that are
not finite are masked: an extractor finds no keypoint there. Of TIFF that tifffile reads, pixels
without data (GDAL_NODATA) are masked, too.

A camera held on its side stores rotated pixels, and EXIF tag 0x0112 (Exif 2.32, section 4.6.4) says
how to rotate them upright, as browsers and `cv2.imread` do. COLMAP uses pixels as stored, and so do
training and evaluation. A matcher uses its `frame`, which is upright by default. Every result
states the frame of its coordinates.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import NamedTuple, Optional, Tuple

import cv2
import numpy as np
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from superglue_sift.errors import RequestError
from superglue_sift.files import FileName
from superglue_sift.geometry.two_view import Size, compute_reduced_size, compute_reduction_factor

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "PPM", "GIF", "JPEG2000", "AVIF", "HEIF")
MAX_PIXELS = 200_000_000  # More could exceed a worker's memory
# Letters with which brands of HEIC files begin (ISO 23008-12): heic, hevc, mif1, msf1 and others
HEIC = (b"he", b"mi", b"ms")

# The first bytes of a TIFF and of a BigTIFF, in both byte orders
TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
CONVERT_TIFF = "convert it: gdal_translate -ot Byte -scale IN.tif OUT.tif"

FEW_LEVELS = 16  # With fewer gray levels, a picture is nearly flat or a drawing

UPRIGHT = "upright"
STORED = "stored"
FRAMES = (UPRIGHT, STORED)  # Pixels rotated according to EXIF, or as in the file
ORIENTATION = 0x0112  # EXIF tag
GDAL_NODATA = 42113  # TIFF tag: the value of pixels without data, as text


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
        turned: EXIF orientation of the file, 1 to 8.
        mask: (H, W) uint8, 0 where a pixel is transparent or has no data. None if there is no such
            pixel.
    """

    pixels: np.ndarray
    to_shown: np.ndarray
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


def read_photo_for_drawing(path: FileName, frame: str) -> Photo:
    """Read a file in color and upright, with the map to it from coordinates of `frame`.

    Raises:
        RequestError: If the file is missing or damaged.
    """
    photo = decode_photo(read_bytes(path), str(path), False, UPRIGHT)
    if frame == UPRIGHT:
        return photo
    stored_size = turn_size(photo.pixels.shape[1::-1], photo.turned)
    return photo._replace(to_shown=map_to_upright(photo.turned, stored_size))


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
    try:
        # Keep deep gray: converting to 8 bits would turn small values into 0.
        is_black = np.asarray(image if image.mode[0] in "IF" else image.convert("L")) == 0
    except Exception as error:  # Decoders of damaged data raise any type of error
        raise BadImage(str(path), _explain_damage(str(image.format), error)) from None
    return turn_upright(np.where(is_black, 0, 255).astype(np.uint8), turned)


def read_bytes(path: FileName) -> bytes:
    """Read the bytes of a file.

    Raises:
        BadImage: If the file cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise BadImage(str(path), f"cannot be read: {error.strerror}") from None


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
    decoded = _decode_by_tifffile(data, name, gray) if data[:4] in TIFF_STARTS else None
    # So far the pixels are as stored.
    pixels, mask, turn = decoded or _decode_by_pillow(data, name, gray)
    if frame == UPRIGHT:
        pixels = turn_upright(pixels, turn)
        mask = None if mask is None else turn_upright(mask, turn)
    return Photo(pixels, np.eye(3), turn, mask)


# --- Pillow


def _decode_by_pillow(
    data: bytes, name: str, gray: bool
) -> Tuple[np.ndarray, Optional[np.ndarray], int]:
    """Decode by Pillow, and colors of more than 8 bits by OpenCV, since Pillow keeps only 8.

    Returns:
        Pixels and mask as stored, and the EXIF orientation.
    """
    image = open_image(data, name)
    _check_size(name, image.size)
    try:
        values = _read_deep_colors(image, data)
        if image.format == "PNG":
            image.load()  # The EXIF data of a PNG may follow its pixels
        turn = _read_orientation(image)  # Decoding removes it from a TIFF
        if values is not None:
            visible = np.asarray(values[..., 3:].all(axis=-1))
            return (*scale_to_8_bits(values[..., :3], gray, visible), turn)
        if gray:
            # Take gray from the luma of a JPEG, which is faster than by way of RGB, and up to two
            # gray levels closer.
            image.draft("L", image.size)
        pixels, mask = convert_image(image, gray)
    except Exception as error:  # Decoders of damaged data raise any type of error
        raise BadImage(name, _explain_damage(str(image.format), error)) from None
    if image.format == "TIFF":  # Pillow has rotated it upright
        pixels = turn_upright(pixels, invert_orientation(turn))
        mask = None if mask is None else turn_upright(mask, invert_orientation(turn))
    return pixels, mask, turn


def _check_size(name: str, size: Size) -> None:
    """Raise BadImage if a file has too many pixels."""
    width, height = size
    if width * height > MAX_PIXELS:
        raise BadImage(
            name, f"too large: {width}x{height} px, at most {MAX_PIXELS} pixels are read"
        )


def _explain_damage(kind: str, error: Exception) -> str:
    """Return the reason for bad_images.csv after a decoder has failed."""
    if kind == "TIFF":
        return f"TIFF cannot be read: {_to_line(error)}; {CONVERT_TIFF}"
    return f"damaged {kind}: {_to_line(error)}"


def is_plain_jpeg(data: bytes, name: str) -> bool:
    """Return whether every decoder gives Pillow's pixels for this file.

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
    reason = "not an image, or of a format that is not read"
    is_heic = data[4:8] == b"ftyp" and data[8:10] in HEIC
    if is_heic and not _register_heic():
        reason = "HEIC needs one more package: pip install 'superglue-sift[heic]'"
    Image.init()  # The first call fills Image.OPEN
    for kind in [kind for kind in FORMATS if kind in Image.OPEN]:
        factory, accept = Image.OPEN[kind]
        if accept is not None and accept(data[:16]):
            try:
                # An MPO holds several pictures, of which the first is a JPEG.
                return (JpegImageFile if kind == "JPEG" else factory)(io.BytesIO(data), "")
            except Exception as error:
                reason = _explain_damage(kind, error)
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
    """Read the EXIF orientation, 1 to 8. It is 1 if there is none, or if it is damaged."""
    for key in ("xmp", "XML:com.adobe.xmp"):
        image.info.pop(key, None)  # Pillow would use XMP where EXIF has no orientation
    try:
        orientation = image.getexif().get(ORIENTATION, 1)
    except Exception:  # Damaged EXIF data
        return 1
    return orientation if orientation in range(1, 9) else 1


def convert_pil(image: Image.Image) -> Tuple[np.ndarray, Optional[np.ndarray]]:
    """Convert a PIL image of the user by `convert_image`, to gray if it has no colors.

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
        return scale_to_8_bits(np.asarray(image), gray)
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


def _read_deep_colors(image: Image.Image, data: bytes) -> Optional[np.ndarray]:
    """Read colors of more than 8 bits, of which Pillow keeps 8, by OpenCV.

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


def _decode_by_tifffile(
    data: bytes, name: str, gray: bool
) -> Optional[Tuple[np.ndarray, Optional[np.ndarray], int]]:
    """Decode a TIFF, unless it has 8 bits and a layout that Pillow reads right.

    Of several bands, the first three are red, green and blue. Of two, the first is the gray.

    Returns:
        Pixels and mask as stored, and the EXIF orientation. None if Pillow is to read the file.

    Raises:
        BadImage: If the file cannot be read, or is neither gray nor RGB.
    """
    import tifffile

    try:
        with tifffile.TiffFile(io.BytesIO(data)) as file:
            page = file.pages.first
            bands = page.samplesperpixel
            is_negative = page.photometric == tifffile.PHOTOMETRIC.MINISWHITE
            is_gray = is_negative or page.photometric == tifffile.PHOTOMETRIC.MINISBLACK
            has_8_bits = page.dtype in (np.uint8, np.bool_)
            # Pillow mixes planes, and does not know gray of several bands.
            if has_8_bits and (bands == 1 or (page.planarconfig == 1 and not is_gray)):
                return None
            _check_size(name, (page.imagewidth, page.imagelength))
            is_number = page.dtype is not None and page.dtype.kind in "uif"
            if not is_number or not (is_gray or page.photometric == tifffile.PHOTOMETRIC.RGB):
                raise ValueError(f"{bands} bands of {page.dtype}, neither gray nor RGB")
            values = page.asarray()
            turn = int(page.tags.valueof(ORIENTATION, default=1))
            no_data = page.tags.valueof(GDAL_NODATA, default="")
    except BadImage:
        raise
    except Exception as error:  # Decoders of damaged data raise any type of error
        raise BadImage(name, _explain_damage("TIFF", error)) from None
    if page.planarconfig == 2 and values.ndim == 3:
        values = np.moveaxis(values, 0, -1)
    visible: np.ndarray = np.ones(values.shape[:2], bool)
    if page.extrasamples[-1:] in ((1,), (2,)):  # Alpha
        visible = values[..., -1] > 0
    if bands > 1:
        values = values[..., :3] if bands > 2 else values[..., 0]
    with contextlib.suppress(ValueError):
        is_no_data = values == float(no_data)
        visible = visible & ~(is_no_data.all(axis=-1) if bands > 2 else is_no_data)
    pixels, mask = scale_to_8_bits(values, gray, visible)
    return 255 - pixels if is_negative else pixels, mask, turn


def scale_to_8_bits(
    values: np.ndarray, gray: bool, visible: Optional[np.ndarray] = None
) -> Tuple[np.ndarray, Optional[np.ndarray]]:
    """Scale values from their 1st to their 99th percentile to 8 bits. 8 bits stay as they are.

    Thermal cameras, microscopes and satellites use a small part of their range. Three bands share
    one range.

    Args:
        values: (H, W) gray or (H, W, 3) RGB.
        gray: whether to convert to gray.
        visible: (H, W) bool, where the values have a meaning. None means everywhere. Numbers that
            are not finite are masked, too.

    Returns:
        Pixels and mask, as `convert_image` returns them.
    """
    is_finite = np.isfinite(values)
    mask = np.asarray(is_finite.all(axis=-1) if values.ndim == 3 else is_finite)
    if visible is not None:
        mask = mask & visible
    pixels = values
    if values.dtype != np.uint8:
        low, high = np.percentile(values[mask], (1, 99)).tolist() if mask.any() else (0.0, 0.0)
        # float32 holds all integers of 16 bits, and float64 those of 32.
        levels = values.astype(np.result_type(values, np.float32))
        levels[~is_finite] = low
        levels = (levels.clip(low, high) - low) * (255.0 / max(high - low, 1e-30))
        pixels = levels.astype(np.uint8)
    return _to_gray_or_bgr(pixels, gray), None if mask.all() else mask.astype(np.uint8)


def count_gray_levels(gray: np.ndarray) -> int:
    """Count how many of the 256 gray levels the pixels (H, W) uint8 have."""
    return int(np.count_nonzero(cv2.calcHist([gray], [0], None, [256], [0, 256])))


# --- sizes and orientations


def reduce_image(pixels: np.ndarray, longer: int) -> np.ndarray:
    """Reduce pixels (H, W) or (H, W, 3) to a longer side of `longer` px, unless they are smaller.

    If `longer` is 0, return them unchanged.
    """
    size = pixels.shape[1::-1]
    factor = compute_reduction_factor(size, longer)
    if factor == 1:
        return pixels
    return cv2.resize(pixels, compute_reduced_size(size, factor), interpolation=cv2.INTER_AREA)


def turn_upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Rotate stored pixels (H, W) or (H, W, 3) uint8 upright."""
    if orientation > 4:
        pixels = pixels.swapaxes(0, 1)
    flip_x, flip_y = _which_axes_flip(orientation)
    return np.ascontiguousarray(pixels[:: -1 if flip_y else 1, :: -1 if flip_x else 1])


def _which_axes_flip(orientation: int) -> Tuple[bool, bool]:
    """Return whether x, and whether y, must be mirrored to rotate pixels of an orientation upright.

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
