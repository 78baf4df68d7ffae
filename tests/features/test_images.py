"""features/images.py: which files of a folder are photographs, files to pixels, what is refused."""

import io
import struct
import sys
import zlib

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFile, features

from superglue_sift.errors import RequestError
from superglue_sift.features import images
from superglue_sift.features.images import (
    STORED,
    UPRIGHT,
    BadImage,
    decode,
    decode_color,
    decode_gray,
    list_photos,
)
from superglue_sift.geometry.two_view import transform


def encode(pixels, extension=".jpg", *options):
    return cv2.imencode(extension, pixels, list(options))[1].tobytes()


def saved(image, kind, **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def reason(data):
    with pytest.raises(BadImage) as caught:
        decode_gray(data, "x.jpg")
    return caught.value.reason


# --- the photographs of a folder


def make_files(folder, names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")


def listed(folder):
    return [path.relative_to(folder).as_posix() for path in list_photos(folder)]


def test_hidden_files_and_those_of_the_system_are_no_photographs(tmp_path):
    hidden = [
        *("._1.jpg", ".cache/a.png", ".@__thumb/1.jpg", ".Trash-1000/files/old.jpg"),
        *("@eaDir/1.jpg/SYNOPHOTO_THUMB_M.jpg", "#recycle/2.jpg", "$RECYCLE.BIN/3.jpg"),
        *("__MACOSX/a.jpg", "lost+found/4.jpg", "notes.txt"),
    ]
    make_files(tmp_path, ["2.JPG", "1.jpg", "sub.jpg/3.webp", *hidden])
    (tmp_path / "gone.jpg").symlink_to("nowhere")  # reading it reports the error
    assert listed(tmp_path) == ["1.jpg", "2.JPG", "gone.jpg", "sub.jpg/3.webp"]
    assert [name for name in hidden if images.is_photo(name)] == []
    with pytest.raises(RequestError, match="no such folder"):
        list_photos(tmp_path / "nothing")


def test_linked_folders_are_entered_once_and_without_loops(tmp_path):
    make_files(tmp_path, ["photos/z/1.jpg", "photos/2.jpg", "beside/3.jpg", "other/sub/4.jpg"])
    photos = tmp_path / "photos"
    links = {"a": "z", "loop": ".", "above": "..", "other": "../other", "again": "../other/sub"}
    for name, target in links.items():
        (photos / name).symlink_to(target)
    (tmp_path / "other/back").symlink_to(photos)
    assert listed(photos) == ["2.jpg", "again/4.jpg", "z/1.jpg"]
    (tmp_path / "link").symlink_to("photos")
    assert len(listed(tmp_path / "link")) == 3


# --- formats


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
    data = saved(Image.fromarray(photo), kind)
    assert np.abs(decode_gray(data).astype(int) - photo).mean() < 4


def test_gray_of_jpegs_is_the_luma_that_opencv_reads(shared_data):
    """So keypoints keep their bytes, whichever of the two reads a file."""
    for path in sorted((shared_data / "coco/val").glob("*.jpg"))[:40]:
        data = np.frombuffer(path.read_bytes(), np.uint8)
        expected = cv2.imdecode(data, cv2.IMREAD_GRAYSCALE)
        np.testing.assert_array_equal(decode_gray(data.tobytes()), expected)


def test_cmyk_and_animations_are_read(color_photo):
    picture = Image.fromarray(color_photo)
    black = Image.new("RGB", picture.size)
    cmyk = saved(picture.convert("CMYK"), "JPEG")
    for data in (cmyk, saved(picture, "GIF", save_all=True, append_images=[black])):
        assert decode_gray(data).shape == (300, 451) and decode_gray(data).std() > 20


# --- pixels of more than 8 bits: `photo` has the gray levels 0 to 255


@pytest.mark.parametrize("bits", [9, 10, 12, 14, 16])
@pytest.mark.parametrize("extension", [".png", ".tiff"])
@pytest.mark.parametrize("colour", [False, True])
def test_cameras_of_many_bits_give_the_gray_levels_of_8_bits(
    photo, color_photo, bits, extension, colour
):
    plain = color_photo if colour else photo
    expected = decode_gray(encode(plain, ".png"))
    deep = plain.astype(np.uint16) << (bits - 8)
    np.testing.assert_array_equal(decode_gray(encode(deep, extension)), expected)
    if bits == 16:
        whole = encode(plain.astype(np.uint16) * 257, extension)
        np.testing.assert_array_equal(decode_gray(whole), expected)


def scaled(pixels, slope, start, kind):
    return (start + slope * pixels.astype(np.float64)).astype(kind)


def fill(values, value, part=0.4):
    values[: int(part * len(values))] = value
    return values


def salt(values, *extremes):
    """Values with hot and dead pixels, one of 200 of each."""
    rng = np.random.default_rng(0)
    for value in extremes:
        values[rng.random(values.shape) < 0.005] = value
    return values


KINDS = {
    "thermal, hundredths of a kelvin": lambda x: scaled(x, 8, 29000, np.uint16),
    "microscope with a hot pixel": lambda x: fill(scaled(x, 2, 200, np.uint16), 65535, 0.001),
    "many hot and dead pixels": lambda x: salt(scaled(x, 2, 200, np.uint16), 0, 65535),
    "elevation below zero": lambda x: scaled(x, 1, -430, np.int16),
    "no data of -32768": lambda x: fill(scaled(x, 1, -430, np.int16), -32768),
    "black borders of a satellite picture": lambda x: fill(scaled(x, 8, 9000, np.uint16), 0),
    "two values for no data": lambda x: fill(fill(scaled(x, 1, 0, np.int16), -9999), -32768, 0.2),
    "reflectance from -1 to 1": lambda x: scaled(x, 2 / 255, -1, np.float32),
    "not a number": lambda x: fill(scaled(x, 1e-3, 0, np.float32), np.nan),
    "infinite": lambda x: fill(scaled(x, 1e-3, 0, np.float32), np.inf, 0.01),
    "no data of the smallest float": lambda x: fill(scaled(x, 1e-3, 0, np.float32), -3.4e38),
    "32 bits": lambda x: scaled(x, 1000, 2_000_000_000, np.int32),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("colour", [False, True])
def test_the_range_in_use_is_scaled_to_8_bits(photo, kind, colour):
    values = KINDS[kind](photo)
    used = np.dstack([values] * 3) if colour else values
    pixels, _ = images._pixels_of_values(used, True, None)
    below = slice(170, None)  # what `fill` leaves
    ordinary = ~np.isin(values[below], (0, 65535))  # what `salt` leaves
    seen = pixels[below][ordinary]
    assert np.corrcoef(seen, photo[below][ordinary])[0, 1] > 0.99
    assert np.ptp(np.percentile(seen, (1, 99))) > 150


def test_a_flat_picture_and_one_of_two_levels_stay_so():
    def pixels_of(values):
        return images._pixels_of_values(values, True, None)[0]

    assert np.ptp(pixels_of(np.full((30, 30), 700, np.uint16))) == 0
    assert pixels_of(np.zeros((1, 1), np.float32)).tolist() == [[0]]
    bars = np.tile(np.repeat([0, 60_000], 5).astype(np.uint16), (30, 3))
    assert np.unique(pixels_of(bars)).tolist() == [0, 234]  # 60,000 / 256


# --- TIFF layouts


@pytest.mark.parametrize("compression", [None, "zlib"])
@pytest.mark.parametrize("byteorder", ["<", ">"])
@pytest.mark.parametrize("kind", ["uint8", "uint16", "int16", "uint32", "float32", "float64"])
@pytest.mark.parametrize(
    "bands, photometric, planes",
    [
        (1, "minisblack", "contig"),
        (1, "miniswhite", "contig"),
        (2, "minisblack", "contig"),
        (3, "rgb", "contig"),
        (3, "rgb", "separate"),
        (4, "rgb", "contig"),
        (4, "minisblack", "contig"),
        (5, "minisblack", "separate"),
    ],
)
def test_every_tiff_layout_gives_its_known_pixels(
    photo, kind, bands, photometric, planes, byteorder, compression
):
    tifffile = pytest.importorskip("tifffile")
    size = np.dtype(kind).itemsize
    slope = {1: 1, 2: 100, 4: 1000, 8: 1}[size] * (-1 if photometric == "miniswhite" else 1)
    small = np.ascontiguousarray(photo[:120, :160])
    colours = [small, small[::-1], small[:, ::-1], np.full_like(small, 255), small[::-1, ::-1]]
    stack = np.stack(colours[:bands], -1).astype(np.float64)
    values = (stack if slope > 0 else 255 - stack) * abs(slope)
    values = values[..., 0] if bands == 1 else values
    values = np.moveaxis(values, -1, 0) if planes == "separate" and bands > 1 else values
    stream = io.BytesIO()
    options = {"planarconfig": planes} if bands > 1 else {}
    tifffile.imwrite(
        stream,
        values.astype(kind),
        photometric=photometric,
        byteorder=byteorder,
        compression=compression,
        extrasamples=["unassalpha"] if bands == 4 and photometric == "rgb" else None,
        **options,
    )
    rgb = np.stack(colours[:3], -1)
    expected = small if bands < 3 else cv2.cvtColor(rgb, cv2.COLOR_RGB2GRAY)
    pixels = decode_gray(stream.getvalue())
    assert np.corrcoef(pixels.ravel(), expected.ravel())[0, 1] > 0.999


def test_twelve_bits_that_share_bytes():
    values = np.arange(60 * 80) % 4096
    packed = int("".join(f"{value:012b}" for value in values), 2).to_bytes(60 * 80 * 3 // 2, "big")
    tags = [(256, 80), (257, 60), (258, 12), (259, 1), (262, 1), (273, 8), (278, 60),
            (279, len(packed))]  # fmt: skip
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    directory = struct.pack("<H", len(tags)) + entries + bytes(4)
    data = b"II*\0" + struct.pack("<I", 8 + len(packed)) + packed + directory
    np.testing.assert_array_equal(decode_gray(data).ravel(), values // 16)


def test_eight_bits_of_any_layout_keep_their_gray_levels(photo):
    tifffile = pytest.importorskip("tifffile")
    dark = photo // 4
    stream = io.BytesIO()
    bands = np.dstack([dark, dark, dark, photo])
    tifffile.imwrite(stream, bands, photometric="minisblack", planarconfig="contig")
    np.testing.assert_array_equal(decode_gray(stream.getvalue()), dark)


def test_a_layout_that_cannot_be_read_is_named_with_its_conversion(photo, monkeypatch):
    tifffile = pytest.importorskip("tifffile")
    stream = io.BytesIO()
    tifffile.imwrite(stream, np.ones((9, 9), np.complex64))
    assert "1 band of other type of 64" in reason(stream.getvalue())
    stream = io.BytesIO()
    five = np.dstack([photo] * 5).astype(np.uint16)
    tifffile.imwrite(stream, five, photometric="minisblack", planarconfig="contig")
    monkeypatch.setitem(sys.modules, "tifffile", None)
    said = reason(stream.getvalue())
    assert "5 bands of uint16" in said and "superglue-sift[tiff]" in said
    assert "gdal_translate" in said and "damaged" not in said


def test_values_that_gdal_notes_as_no_data_are_masked(photo):
    tifffile = pytest.importorskip("tifffile")
    values = fill(photo.astype(np.int16), 77)
    # Pillow reads the first, tifffile the others
    for kind, white in ((np.uint16, "black"), (np.int16, "black"), (np.uint16, "white")):
        stream = io.BytesIO()
        options = {"extratags": [(42113, "s", 0, "77", True)], "photometric": f"minis{white}"}
        tifffile.imwrite(stream, values.astype(kind), byteorder=">", **options)
        mask = decode(stream.getvalue(), "a.tif", True, STORED).mask
        np.testing.assert_array_equal(mask == 0, values == 77)


# --- transparency and masks


def tiff_of(pixels):
    tifffile = pytest.importorskip("tifffile")
    stream = io.BytesIO()
    options = {"planarconfig": "contig", "extrasamples": ["unassalpha"]}
    tifffile.imwrite(stream, pixels, photometric="minisblack", **options)
    return stream.getvalue()


def test_transparent_pixels_are_masked_in_every_mode(photo):
    alpha = np.where(photo > 128, 255, 0).astype(np.uint8)
    rgba = np.dstack([photo] * 3 + [alpha])
    picture = Image.fromarray(rgba)
    indexed = Image.fromarray(photo)
    deep = encode(rgba.astype(np.uint16) * 257, ".png")
    for data, hidden in (
        (saved(picture, "PNG"), alpha == 0),
        (saved(picture.convert("LA"), "PNG"), alpha == 0),
        (saved(picture, "WEBP", lossless=True), alpha == 0),
        (saved(picture, "TIFF"), alpha == 0),
        (saved(picture.convert("LA"), "TIFF"), alpha == 0),
        (tiff_of(np.dstack([photo, alpha]).astype(np.int16)), alpha == 0),
        (saved(indexed, "PNG", transparency=100), photo == 100),
        (saved(indexed.convert("P"), "PNG", transparency=100), photo == 100),
        (deep, alpha == 0),
    ):
        mask = decode(data, "a.png", True, STORED).mask
        np.testing.assert_array_equal(mask == 0, hidden)
    assert decode(saved(indexed, "PNG"), "a.png", True, STORED).mask is None


def test_gray_with_premultiplied_alpha_is_gray():
    pixels = np.full((4, 5), 90, np.uint8)
    picture = Image.merge("LA", [Image.fromarray(pixels), Image.new("L", (5, 4), 255)])
    assert np.array_equal(images.pixels_of(picture.convert("La"), True)[0], pixels)


def test_a_mask_is_found_as_in_colmap_and_has_the_size_of_the_stored_pixels(tmp_path):
    make_files(tmp_path, ["sub/a.jpg.png", "b.png"])
    for name, mask in (("sub/a.jpg", "sub/a.jpg.png"), ("b.jpg", "b.png"), ("c.jpg", None)):
        assert images.find_mask(tmp_path, name) == (tmp_path / mask if mask else None)
    mask = np.zeros((40, 60), np.uint8)
    mask[:10, :15] = 1  # all but black counts
    cv2.imwrite(str(tmp_path / "b.png"), mask)
    np.testing.assert_array_equal(images.read_mask(tmp_path / "b.png", (60, 40)) > 0, mask > 0)
    upright = images.read_mask(tmp_path / "b.png", (40, 60), turned=6)
    assert upright[0, -1] == 255 and upright.shape == (60, 40)
    with pytest.raises(RequestError, match="mask has 60x40 pixels, its photograph 61x40"):
        images.read_mask(tmp_path / "b.png", (61, 40))


# --- rotation by EXIF

ALL = range(1, 9)
# where the corner at the top left of the stored pixels lies upright (Exif 2.32, 4.6.4)
CORNERS = {1: (0, 0), 2: (0, -1), 3: (-1, -1), 4: (-1, 0), 5: (0, 0), 6: (0, -1), 7: (-1, -1),
           8: (-1, 0)}  # fmt: skip


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", ALL)
def test_pixels_upright_and_stored(kind, orientation):
    marked = np.zeros((40, 60, 3), np.uint8)
    marked[:10, :15] = 255
    exif = Image.Exif()
    exif[images.ORIENTATION] = orientation
    options = {"tiffinfo": {images.ORIENTATION: orientation}} if kind == "TIFF" else {"exif": exif}
    data = saved(Image.fromarray(marked), kind, **options)
    for gray in (True, False):
        stored = decode(data, "a", gray, STORED)
        upright = decode(data, "a", gray, UPRIGHT)
        assert stored.turned == upright.turned == orientation
        assert stored.pixels.shape[:2] == (40, 60) == stored.size[::-1]
        assert stored.pixels[0, 0].min() > 200
        assert upright.pixels.shape[:2] == ((40, 60) if orientation < 5 else (60, 40))
        assert upright.size == upright.pixels.shape[1::-1]
        assert upright.pixels[CORNERS[orientation]].min() > 200
    if kind != "WEBP":  # which OpenCV 4 does not turn
        as_opencv = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
        np.testing.assert_array_equal(decode_color(data, frame=UPRIGHT), as_opencv)


@pytest.mark.parametrize("orientation", ALL)
def test_positions_move_as_pixels_do(orientation):
    stored = np.arange(40 * 60, dtype=np.int32).reshape(40, 60)  # each pixel has its own number
    shown = images.turn_upright(stored, orientation)
    y, x = (each.ravel() for each in np.mgrid[:40, :60])
    H = images.to_upright(orientation, (60, 40))
    moved = transform(np.stack([x, y], axis=1).astype(float), H)
    np.testing.assert_array_equal(shown[tuple(moved.astype(int).T[::-1])], stored.ravel())
    np.testing.assert_array_equal(images.turn_upright(shown, images.inverse(orientation)), stored)


def test_orientation_in_xmp_does_not_count_as_in_opencv(photo):
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    data = saved(Image.fromarray(photo), "JPEG", xmp=xmp)
    decoded = decode(data, "a.jpg", True, UPRIGHT)
    assert decoded.turned == 1 and decoded.pixels.shape == photo.shape


# --- damage, and files that are no images


@pytest.mark.parametrize("extension", [".jpg", ".png", ".webp"])
def test_a_file_cut_anywhere_is_refused(photo, extension):
    data = encode(photo, extension)
    # without the end marker of a JPEG, and the checksum of an empty chunk, IEND, of a PNG
    whole = len(data) - {".jpg": 16, ".png": 4}.get(extension, 0)
    for length in np.linspace(0, whole - 1, 60).astype(int):
        reason(data[:length])


def test_progressive_jpeg_and_trailing_bytes_are_fine(photo):
    options = (cv2.IMWRITE_JPEG_PROGRESSIVE, 1, cv2.IMWRITE_JPEG_OPTIMIZE, 1)
    progressive = encode(photo, ".jpg", *options)
    assert decode_gray(progressive + b"\0" * 5000).shape == photo.shape
    reason(progressive[: len(progressive) * 2 // 3])
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
        (b"RIFF\x16\0\0\0WEBPABCD" + bytes(14), "not an image"),
        (b"II*\0\x08\0\0\0\0\0" + bytes(8), "damaged TIFF"),
        (b"\0\0\0\x18ftypheic" + bytes(100), r"pip install 'superglue-sift[heic]'"),
        (b"P5\n#" + b"c" * 2000 + b"\n30000 30000\n255\n", "too large: 30000x30000"),
    ],
)
def test_what_is_no_image_is_named(data, said, monkeypatch):
    monkeypatch.setattr(images, "_register_heic", lambda: False)
    monkeypatch.delitem(Image.OPEN, "HEIF", raising=False)
    assert said in reason(data)


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


def test_a_name_with_a_null_byte_cannot_be_read():
    with pytest.raises(RequestError, match="cannot be read: embedded null byte"):
        images.read("a\0.png")


# --- very many pixels


def claiming(extension, width, height):
    """A whole small image whose header promises another size."""
    data = bytearray(encode(np.zeros((16, 24), np.uint8), extension))
    if extension == ".png":
        header = struct.pack(">II", width, height) + data[24:29]
        data[16:29] = header
        data[29:33] = struct.pack(">I", zlib.crc32(b"IHDR" + header))
    elif extension == ".bmp":
        data[18:26] = struct.pack("<ii", width, -height)
    else:
        data[:] = data.replace(b"24 16", f"# made\n{width} {height}".encode())
    return bytes(data)


@pytest.mark.parametrize("extension", [".png", ".bmp", ".pgm"])
def test_an_image_above_200_megapixels_is_refused_by_its_header(extension, monkeypatch):
    """No decoder is asked, which would take a byte a pixel at the least."""
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda *_: None)
    assert images.MAX_PIXELS == 200_000_000
    said = reason(claiming(extension, 20_000, 10_001))
    assert "too large: 20000x10001 pixels, at most 200 megapixels" in said and "--resize" in said


def waves(width, height):
    """A smooth pattern, whose value at each pixel is known."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    return 128 + 60 * np.sin(x / 37.0 + 0.3) + 40 * np.cos(y / 43.0 - x / 81.0)


@pytest.mark.parametrize("gray", [True, False])
@pytest.mark.parametrize("size", [(803, 597), (1605, 1203)])
def test_a_larger_jpeg_is_read_at_a_smaller_scale(monkeypatch, gray, size):
    """Each pixel shows the place of the file where its coordinates say it lies."""
    monkeypatch.setattr(images, "MAX_PIXELS", 200_000)
    data = encode(np.rint(waves(*size)).astype(np.uint8), ".jpg", cv2.IMWRITE_JPEG_QUALITY, 98)
    decoded = decode(data, "a.jpg", gray, STORED)
    height, width = decoded.pixels.shape[:2]
    assert decoded.size == size and 50_000 < width * height <= 200_000
    x, y = np.meshgrid((np.arange(width) + 0.5) * size[0] / width - 0.5,
                       (np.arange(height) + 0.5) * size[1] / height - 0.5)  # fmt: skip
    expected = 128 + 60 * np.sin(x / 37.0 + 0.3) + 40 * np.cos(y / 43.0 - x / 81.0)
    pixels = decoded.pixels if gray else decoded.pixels[..., 1]
    assert np.abs(pixels - expected)[4:-4, 4:-4].max() < 4
    progressive = encode(np.zeros(size[::-1], np.uint8), ".jpg", cv2.IMWRITE_JPEG_PROGRESSIVE, 1)
    assert "too large" in reason(progressive)
    assert not images.is_plain_jpeg(data, "a.jpg")  # other decoders leave it to Pillow


def test_a_larger_tiff_is_read_from_its_overview(monkeypatch, photo):
    tifffile = pytest.importorskip("tifffile")
    monkeypatch.setattr(images, "MAX_PIXELS", 100_000)
    for kind in (np.uint8, np.int16):  # Pillow reads the first, tifffile the second
        stream = io.BytesIO()
        with tifffile.TiffWriter(stream) as file:
            for level in (photo, np.zeros((100, 100)), photo[::2, ::2], photo[::4, ::4]):
                file.write(level.astype(kind), photometric="minisblack")
        decoded = decode(stream.getvalue(), "a.tif", True, STORED)
        assert decoded.size == (600, 400) and decoded.pixels.shape == (200, 300)
        assert np.corrcoef(decoded.pixels.ravel(), photo[::2, ::2].ravel())[0, 1] > 0.999
