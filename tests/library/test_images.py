"""Decoding of image files, and what it refuses."""

import io
import struct
import tracemalloc
import zlib

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFile, features

from superglue_sift.errors import RequestError
from superglue_sift.features import images as image_files
from superglue_sift.features.images import BadImage, decode_gray


def encode(pixels, extension=".jpg", *options):
    return cv2.imencode(extension, pixels, list(options))[1].tobytes()


def reason(data):
    with pytest.raises(BadImage) as caught:
        decode_gray(data, "x.jpg")
    return caught.value.reason


@pytest.mark.parametrize("extension", [".jpg", ".png", ".webp", ".bmp", ".pgm", ".tiff", ".jp2"])
def test_whole_files_of_every_kind_are_read(photo, extension):
    pixels = decode_gray(encode(photo, extension))
    assert pixels.shape == photo.shape and pixels.dtype == np.uint8
    assert np.abs(pixels.astype(int) - photo).mean() < 3


@pytest.mark.parametrize("kind", ["GIF", "AVIF", "HEIF"])
def test_files_that_opencv_does_not_read(photo, kind):
    if kind == "HEIF":
        pytest.importorskip("pillow_heif").register_heif_opener()
    elif kind == "AVIF" and not features.check("avif"):
        pytest.skip("this Pillow is without AVIF")
    stream = io.BytesIO()
    Image.fromarray(photo).save(stream, kind)
    assert np.abs(decode_gray(stream.getvalue()).astype(int) - photo).mean() < 4


def test_heic_without_its_package_names_it(monkeypatch):
    monkeypatch.setattr(image_files, "_register_heic", lambda: False)
    monkeypatch.delitem(Image.OPEN, "HEIF", raising=False)
    assert "pip install 'superglue-sift[heic]'" in reason(b"\0\0\0\x18ftypheic" + bytes(100))


def test_gray_of_jpegs_is_the_luma_that_opencv_reads(shared_data):
    """So keypoints keep their bytes, whichever of the two reads a file."""
    for path in sorted((shared_data / "coco/val").glob("*.jpg"))[:40]:
        data = np.frombuffer(path.read_bytes(), np.uint8)
        np.testing.assert_array_equal(
            decode_gray(data.tobytes()), cv2.imdecode(data, cv2.IMREAD_GRAYSCALE)
        )


@pytest.mark.parametrize("bits", [9, 10, 12, 14, 16])
@pytest.mark.parametrize("extension", [".png", ".tiff"])
def test_gray_of_many_bits_is_scaled_by_those_in_use(photo, bits, extension):
    deep = photo.astype(np.uint16) << (bits - 8)
    deep[0, 0] = 2**bits - 1
    np.testing.assert_array_equal(decode_gray(encode(deep, extension))[1:], photo[1:])


def test_colour_of_twelve_bits_in_sixteen_is_named(color_photo):
    assert "16-bit colour" in reason(encode(color_photo.astype(np.uint16) << 4, ".png"))
    whole = decode_gray(encode(color_photo.astype(np.uint16) * 257, ".png"))
    np.testing.assert_array_equal(whole, decode_gray(encode(color_photo, ".png")))


def test_colour_sixteen_bit_transparent_and_cmyk_files_are_read(photo, color_photo):
    wide = decode_gray(encode(photo.astype(np.uint16) * 257, ".png"))
    assert np.abs(wide.astype(int) - photo).max() <= 1
    cmyk = io.BytesIO()
    Image.fromarray(color_photo).convert("CMYK").save(cmyk, "JPEG")
    transparent = encode(np.dstack([color_photo, photo[:300, :451]]), ".png")
    for data in (encode(color_photo), transparent, cmyk.getvalue()):
        assert decode_gray(data).shape == (300, 451)
    assert image_files.decode_color(encode(photo)).shape == (*photo.shape, 3)


def test_a_blank_cmyk_jpeg_has_no_hole():
    blank = np.zeros((3000, 3000, 4), np.uint8)
    blank[:8, :8, 1] = 128
    data = io.BytesIO()
    Image.fromarray(blank, "CMYK").save(data, "JPEG", optimize=True)
    assert decode_gray(data.getvalue()).shape == (3000, 3000)


def test_orientation_in_xmp_does_not_count_as_in_opencv(photo):
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    data = io.BytesIO()
    Image.fromarray(photo).save(data, "JPEG", xmp=xmp)
    assert Image.open(data).getexif()[image_files.ORIENTATION] == 6  # Pillow alone
    pixels, turned = image_files.decode(data.getvalue(), "a.jpg", True, image_files.UPRIGHT)
    assert turned == 1 and pixels.shape == photo.shape


@pytest.mark.parametrize("extension", [".jpg", ".png", ".webp"])
def test_a_file_cut_anywhere_is_refused(photo, extension):
    data = encode(photo, extension)
    whole = len(data) - 4 * (extension == ".png")  # without the checksum of an empty chunk, IEND
    for length in np.linspace(0, whole - 1, 60).astype(int):
        reason(data[:length])


def test_progressive_jpeg_and_trailing_bytes_are_fine_and_a_cut_thumbnail_does_not_fool(photo):
    options = (cv2.IMWRITE_JPEG_PROGRESSIVE, 1, cv2.IMWRITE_JPEG_OPTIMIZE, 1)
    progressive = encode(photo, ".jpg", *options)
    assert decode_gray(progressive + b"\0" * 5000).shape == photo.shape
    thumbnail = encode(photo[:60, :60])
    segment = b"\xff\xe1" + struct.pack(">H", len(thumbnail) + 2) + thumbnail
    inside = progressive[:2] + segment + progressive[2:]
    assert decode_gray(inside).shape == photo.shape
    assert "end-of-image" in reason(inside[: len(inside) * 2 // 3])


def test_holes_of_zeros_are_found_where_decoders_see_nothing(photo):
    data = encode(photo, ".jpg", cv2.IMWRITE_JPEG_QUALITY, 95)
    holed = data[:20000] + bytes(4096) + data[24096:]
    assert cv2.imdecode(np.frombuffer(holed, np.uint8), 0) is not None
    assert "zero bytes" in reason(holed)
    png = encode(photo, ".png")
    assert "checksum" in reason(png[:20000] + bytes(4096) + png[24096:])


@pytest.mark.parametrize(
    "data, said",
    [
        (b"", "empty file"),
        (b"\n<!DOCTYPE html><html>404</html>", "web page"),
        (b"something else entirely" * 50, "not an image"),
        (b"%!PS-Adobe-3.0\n(would run Ghostscript)\n", "not an image"),
        (b"\xff\xd8\xff\xe0\x00\x10JFIF", "damaged JPEG"),
        (b"P530000 30000 255\n", "damaged PPM"),
        (b"P7\nWIDTH 30000\nHEIGHT 30000\nDEPTH 1\nMAXVAL 255\nENDHDR\n", "not an image"),
        (b"RIFF\x16\0\0\0WEBPABCD" + bytes(14), "not an image"),
        (b"II*\0\x08\0\0\0\0\0" + bytes(8), "damaged TIFF"),
        (b"P5\n#" + b"c" * 2000 + b"\n30000 30000\n255\n", "too large: 30000x30000"),
    ],
)
def test_what_is_no_image_or_hides_its_size_is_named(data, said):
    assert said in reason(data)


@pytest.fixture
def undecoded(monkeypatch):
    """Fail when pixels are decoded."""
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda *_: pytest.fail("decoded"))


def png_of(*chunks):
    body = (
        struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def header_of(width, height):
    return b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)


@pytest.mark.parametrize(
    "chunks",
    [
        [header_of(30_000, 30_000)],
        [(b"tEXt", b"a\0b"), header_of(30_000, 30_000)],
        [header_of(8, 8), header_of(30_000, 30_000)],
        [(b"tEXt", b"IHDR\0\0\0\x08\0\0\0\x08"), header_of(30_000, 30_000)],
    ],
)
def test_a_png_bomb_is_refused_wherever_its_header_is(chunks, undecoded):
    data = png_of(*chunks, (b"IDAT", zlib.compress(bytes(100))), (b"IEND", b""))
    assert "too large: 30000x30000" in reason(data)


def tiff_of(*tags):
    """A TIFF whose directory has these tags, and whose pixels are 100 MB of zeros, compressed."""
    data = zlib.compress(bytes(100_000_000))
    at = 14 + 12 * len(tags)
    entries = [
        struct.pack("<HHII", tag, 4, 1, {"at": at, "length": len(data)}.get(v, v))
        for tag, v in tags
    ]
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + b"".join(entries) + bytes(4) + data


def test_a_tiff_of_huge_tiles_is_refused(undecoded):
    size = (256, 64), (257, 64), (258, 8), (259, 8), (262, 1), (277, 1)
    tiles = (322, 60_000), (323, 60_000), (324, "at"), (325, "length")
    assert "tiles of 60000x60000" in reason(tiff_of(*size, *tiles))


@given(
    st.binary(max_size=400),
    st.sampled_from(
        [b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF1234WEBP", b"GIF89a", b"II*\0"]
    ),
)
def test_any_bytes_give_pixels_or_bad_image(data, start):
    try:
        assert decode_gray(start + data).dtype == np.uint8
    except BadImage as bad:
        assert "\n" not in bad.reason


def claiming(extension, width, height):
    """A whole small image whose header promises another size."""
    data = bytearray(encode(np.zeros((16, 24), np.uint8), extension))
    if extension == ".jpg":
        at = data.index(b"\xff\xc0") + 5
        data[at : at + 4] = struct.pack(">HH", height, width)
    elif extension == ".bmp":
        data[18:26] = struct.pack("<ii", width, -height)
    else:
        data[:] = data.replace(b"24 16", f"# made\n{width} {height}".encode())
    return bytes(data)


@pytest.mark.parametrize("extension", [".jpg", ".bmp", ".pgm"])
def test_an_image_above_200_megapixels_is_refused_by_its_header(extension, undecoded):
    """No decoder is asked, which would take a byte a pixel at the least."""
    assert image_files.MAX_PIXELS == 200_000_000
    image_files.open_image(claiming(extension, 20_000, 10_000), "at the limit")
    data = claiming(extension, 20_000, 10_001)
    tracemalloc.start()
    with pytest.raises(BadImage, match="too large: 20000x10001 pixels, at most 200 megapixels"):
        decode_gray(data, "huge")
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_a_name_with_a_null_byte_cannot_be_read():
    with pytest.raises(RequestError, match="cannot be read: embedded null byte"):
        image_files.read("a\0.png")


def test_gray_with_premultiplied_alpha_is_gray():
    pixels = np.full((4, 5), 90, np.uint8)
    picture = Image.merge("LA", [Image.fromarray(pixels), Image.new("L", (5, 4), 255)])
    assert np.array_equal(image_files.pixels_of(picture.convert("La"), True), pixels)
