"""Which files of a folder are photographs, how files become pixels, and what is refused."""

import importlib.util
import io
import struct
import sys
import tracemalloc

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, features

from superglue_sift.errors import RequestError
from superglue_sift.features import images, photo_folder
from superglue_sift.features.images import STORED, UPRIGHT, BadImage, decode_gray, decode_photo
from superglue_sift.features.photo_folder import list_photos
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
    assert [name for name in hidden if photo_folder.is_photo(name)] == []
    with pytest.raises(RequestError, match="no such folder"):
        list_photos(tmp_path / "nothing")


def test_linked_folders_are_entered_once_and_without_loops(tmp_path):
    make_files(tmp_path, ["photos/z/1.jpg", "photos/2.jpg", "beside/3.jpg", "other/sub/4.jpg"])
    photos = tmp_path / "photos"
    links = {"zz": "z", "loop": ".", "above": "..", "other": "../other"}
    for name, target in links.items():
        (photos / name).symlink_to(target)
    (tmp_path / "other/back").symlink_to(photos)
    assert listed(photos) == ["2.jpg", "other/sub/4.jpg", "z/1.jpg"]
    (tmp_path / "link").symlink_to("photos")
    assert len(listed(tmp_path / "link")) == 3


# --- formats


@pytest.mark.parametrize(
    "kind", ["JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF", "JPEG2000", "GIF", "AVIF", "HEIF"]
)
def test_whole_files_of_every_kind_are_read(photo, kind):
    if kind == "HEIF":
        pytest.importorskip("pillow_heif").register_heif_opener()
    elif kind == "AVIF" and not features.check("avif"):
        pytest.skip("this Pillow is without AVIF")
    pixels = decode_gray(saved(Image.fromarray(photo), kind))
    assert pixels.shape == photo.shape and pixels.dtype == np.uint8
    assert np.abs(pixels.astype(int) - photo).mean() < 4


def test_gray_of_jpegs_is_the_luma_that_opencv_reads(shared_data):
    """So keypoints keep their bytes, whichever of the two reads a file."""
    for path in sorted((shared_data / "coco/val").glob("*.jpg"))[:40]:
        data = np.frombuffer(path.read_bytes(), np.uint8)
        expected = cv2.imdecode(data, cv2.IMREAD_GRAYSCALE)
        np.testing.assert_array_equal(decode_gray(data.tobytes()), expected)


def test_cmyk_and_the_first_picture_of_an_animation_are_read(color_photo):
    picture = Image.fromarray(color_photo)
    black = Image.new("RGB", picture.size)
    moving = saved(picture, "GIF", save_all=True, append_images=[black])
    for data in (saved(picture.convert("CMYK"), "JPEG"), moving):
        assert decode_gray(data).shape == (300, 451) and decode_gray(data).std() > 20


# --- pixels of more than 8 bits: `photo` has the gray levels 0 to 255


@pytest.mark.parametrize("bits", [9, 12, 16])
@pytest.mark.parametrize("extension", [".png", ".tiff"])
@pytest.mark.parametrize("colour", [False, True])
def test_cameras_of_many_bits_give_the_gray_levels_of_8_bits(
    photo, color_photo, bits, extension, colour
):
    plain = color_photo if colour else photo
    expected = decode_gray(encode(plain, ".png"))
    deep = plain.astype(np.uint16) << (bits - 8)
    np.testing.assert_array_equal(decode_gray(encode(deep, extension)), expected)


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
    "many hot and dead pixels": lambda x: salt(scaled(x, 2, 200, np.uint16), 0, 65535),
    "two values for no data": lambda x: fill(fill(scaled(x, 1, 0, np.int16), -9999), -32768, 0.2),
    "reflectance from -1 to 1": lambda x: scaled(x, 2 / 255, -1, np.float32),
    "no data of the smallest float": lambda x: fill(scaled(x, 1e-3, 0, np.float32), -3.4e38),
    "32 bits": lambda x: scaled(x, 1000, 2_000_000_000, np.int32),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("colour", [False, True])
def test_the_range_in_use_is_scaled_to_8_bits(photo, kind, colour):
    values = KINDS[kind](photo)
    used = np.dstack([values] * 3) if colour else values
    pixels, _ = images._scale_values(used, True, None)
    below = slice(170, None)  # what `fill` leaves
    ordinary = ~np.isin(values[below], (0, 65535))  # what `salt` leaves
    seen = pixels[below][ordinary]
    assert np.corrcoef(seen, photo[below][ordinary])[0, 1] > 0.99
    assert np.ptp(np.percentile(seen, (1, 99))) > 150


def test_a_flat_picture_stays_so():
    for values in (np.full((30, 30), 700, np.uint16), np.zeros((1, 1), np.float32)):
        assert not images._scale_values(values, True, None)[0].any()


# --- TIFF layouts


def tiff_of(values, **options):
    tifffile = pytest.importorskip("tifffile")
    stream = io.BytesIO()
    tifffile.imwrite(stream, values, **{"photometric": "minisblack", **options})
    return stream.getvalue()


@pytest.mark.parametrize("byteorder", ["<", ">"])
@pytest.mark.parametrize("kind", ["uint8", "uint16", "int16", "uint32", "float32", "float64"])
@pytest.mark.parametrize(
    "bands, photometric, planes",
    [
        (1, "minisblack", None),
        (1, "miniswhite", None),
        (2, "minisblack", "contig"),
        (3, "rgb", "contig"),
        (3, "rgb", "separate"),
        (4, "rgb", "contig"),
        (4, "minisblack", "contig"),
        (5, "minisblack", "separate"),
    ],
)
def test_every_tiff_layout_gives_its_known_pixels(
    photo, kind, bands, photometric, planes, byteorder
):
    small = photo[:120, :160]
    colours = [small, small[::-1], small[:, ::-1], np.full_like(small, 255), small[::-1, ::-1]]
    stack = np.stack(colours[:bands], -1)
    values = (255 - stack if photometric == "miniswhite" else stack).astype(float)
    values *= {"uint16": 100, "int16": 100, "uint32": 1000, "float32": 0.01}.get(kind, 1)
    values = values[..., 0] if bands == 1 else values
    values = np.moveaxis(values, -1, 0) if planes == "separate" else values
    options = {"planarconfig": planes} if planes else {}
    if bands == 4 and photometric == "rgb":
        options["extrasamples"] = ["unassalpha"]
    data = tiff_of(values.astype(kind), photometric=photometric, byteorder=byteorder, **options)
    expected = small if bands < 3 else cv2.cvtColor(stack[..., :3].copy(), cv2.COLOR_RGB2GRAY)
    pixels = decode_gray(data)
    assert np.corrcoef(pixels.ravel(), expected.ravel())[0, 1] > 0.999
    if kind == "uint8":
        np.testing.assert_array_equal(pixels, expected)


TAG_OF_PREDICTOR = 317


def gray_tiff(values, compression, predictor):
    """A TIFF of one band by Pillow, which compresses without further packages."""
    info = {TAG_OF_PREDICTOR: predictor}
    return saved(Image.fromarray(values), "TIFF", compression=compression, tiffinfo=info)


def colour_tiff(values, predictor):
    """A TIFF of three bands by OpenCV, compressed by LZW."""
    options = [cv2.IMWRITE_TIFF_COMPRESSION, 5, cv2.IMWRITE_TIFF_PREDICTOR, predictor]
    return encode(values[..., ::-1].copy(), ".tif", *options)


@pytest.mark.parametrize("compression", ["tiff_lzw", "tiff_adobe_deflate", "zstd"])
@pytest.mark.parametrize("kind, predictor", [("float32", 1), ("float32", 3), ("int32", 2)])
def test_compressed_floats_and_signed_numbers_are_read(photo, compression, kind, predictor):
    values = photo.astype(kind) * 100 - 9000
    try:
        data = gray_tiff(values, compression, predictor)
    except (OSError, RuntimeError):
        pytest.skip(f"this Pillow has no {compression}")
    np.testing.assert_array_equal(decode_gray(data), decode_gray(tiff_of(values)))
    reason(data[: len(data) // 2])  # a part of the file is no picture


@pytest.mark.parametrize("kind", ["int16", "int32"])
@pytest.mark.parametrize("predictor", [1, 2])
def test_compressed_colours_of_signed_numbers_are_read(color_photo, kind, predictor):
    values = color_photo.astype(kind) * 100 - 9000
    expected = decode_gray(tiff_of(values, photometric="rgb"))
    np.testing.assert_array_equal(decode_gray(colour_tiff(values, predictor)), expected)


def test_a_missing_decoder_is_named_with_the_package_that_brings_it(photo):
    pytest.importorskip("tifffile")
    if importlib.util.find_spec("imagecodecs"):
        pytest.skip("imagecodecs is installed")
    data = tiff_of(np.dstack([photo] * 5).astype(np.uint32), planarconfig="contig")
    # The entry of the compression (tag 259, a SHORT): 1 becomes 50000, ZSTD.
    entry = struct.pack("<HHI", 259, 3, 1)
    said = reason(data.replace(entry + b"\1\0", entry + struct.pack("<H", 50000)))
    assert "5 bands of uint32" in said and "pip install imagecodecs" in said


@pytest.mark.parametrize("extra", ["unspecified", "assocalpha", "unassalpha"])
def test_four_bands_of_8_bits_in_planes_are_read(color_photo, extra):
    opaque = np.full_like(color_photo[..., :1], 255)
    planes = np.moveaxis(np.concatenate([color_photo, opaque], 2), 2, 0)
    options = {"photometric": "rgb", "planarconfig": "separate", "extrasamples": [extra]}
    expected = decode_gray(saved(Image.fromarray(color_photo), "PNG"))
    np.testing.assert_array_equal(decode_gray(tiff_of(planes, **options)), expected)


def test_a_layout_that_cannot_be_read_is_named_with_its_conversion(photo, monkeypatch):
    assert "1 band of other type of 64" in reason(tiff_of(np.ones((9, 9), np.complex64)))
    five = tiff_of(np.dstack([photo] * 5).astype(np.uint16), planarconfig="contig")
    monkeypatch.setitem(sys.modules, "tifffile", None)
    said = reason(five)
    assert "5 bands of uint16" in said and "superglue-sift[tiff]" in said
    assert "gdal_translate" in said and "damaged" not in said


def test_values_that_gdal_notes_as_no_data_are_masked(photo):
    values = fill(photo.astype(np.int16), 77)
    noted = {"extratags": [(42113, "s", 0, "77", True)]}
    # Pillow reads the first, tifffile the other.
    for kind in (np.uint16, np.int16):
        mask = decode_photo(tiff_of(values.astype(kind), **noted), "a.tif", True, STORED).mask
        np.testing.assert_array_equal(mask == 0, values == 77)


# --- transparency and masks


def test_transparent_pixels_are_masked_in_every_mode(photo):
    alpha = np.where(photo > 128, 255, 0).astype(np.uint8)
    rgba = np.dstack([photo] * 3 + [alpha])
    picture = Image.fromarray(rgba)
    indexed = Image.fromarray(photo)
    signed = np.dstack([photo, alpha]).astype(np.int16)
    for data, hidden in (
        (saved(picture, "PNG"), alpha == 0),
        (saved(picture.convert("LA"), "PNG"), alpha == 0),
        (tiff_of(signed, planarconfig="contig", extrasamples=["unassalpha"]), alpha == 0),
        (saved(indexed, "PNG", transparency=100), photo == 100),
        (saved(indexed.convert("P"), "PNG", transparency=100), photo == 100),
        (encode(rgba.astype(np.uint16) * 257, ".png"), alpha == 0),
    ):
        decoded = decode_photo(data, "a.png", True, STORED)
        np.testing.assert_array_equal(decoded.mask == 0, hidden)
        np.testing.assert_array_equal(decoded.pixels[~hidden], photo[~hidden])


def test_a_mask_is_found_as_in_colmap_and_has_the_size_of_the_stored_pixels(tmp_path):
    make_files(tmp_path, ["sub/a.jpg.png", "b.png"])
    for name, mask in (("sub/a.jpg", "sub/a.jpg.png"), ("b.jpg", "b.png"), ("c.jpg", None)):
        assert photo_folder.find_mask(tmp_path, name) == (tmp_path / mask if mask else None)
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


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
@pytest.mark.parametrize("orientation", ALL)
def test_upright_pixels_are_those_of_opencv(color_photo, kind, orientation):
    exif = Image.Exif()
    exif[images.ORIENTATION] = orientation
    options = {"tiffinfo": {images.ORIENTATION: orientation}} if kind == "TIFF" else {"exif": exif}
    data = saved(Image.fromarray(color_photo), kind, **options)
    upright = decode_photo(data, "a", False, UPRIGHT)
    np.testing.assert_array_equal(
        upright.pixels, cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    )
    assert upright.size == upright.pixels.shape[1::-1] and upright.turned == orientation
    stored = decode_photo(data, "a", True, STORED)
    assert stored.size == (451, 300) == stored.pixels.shape[::-1]


@pytest.mark.parametrize("orientation", ALL)
def test_the_mask_of_a_transparent_picture_turns_with_its_pixels(photo, orientation):
    """All pixels of one half are white and transparent."""
    picture = np.minimum(photo, 200)
    picture[:, 300:] = 255
    alpha = np.where(picture == 255, 0, 255).astype(np.uint8)
    exif = Image.Exif()
    exif[images.ORIENTATION] = orientation
    data = saved(Image.fromarray(np.dstack([picture, alpha]), "LA"), "PNG", exif=exif)
    stored, upright = (decode_photo(data, "a", True, frame) for frame in (STORED, UPRIGHT))
    np.testing.assert_array_equal(stored.mask == 0, alpha == 0)
    np.testing.assert_array_equal(upright.mask, images.turn_upright(stored.mask, orientation))
    assert upright.mask.shape == upright.pixels.shape


@pytest.mark.parametrize("orientation", ALL)
def test_positions_move_as_pixels_do(orientation):
    stored = np.arange(40 * 60, dtype=np.int32).reshape(40, 60)  # each pixel has its own number
    shown = images.turn_upright(stored, orientation)
    y, x = (each.ravel() for each in np.mgrid[:40, :60])
    H = images.map_to_upright(orientation, (60, 40))
    moved = transform(np.stack([x, y], axis=1).astype(float), H)
    np.testing.assert_array_equal(shown[tuple(moved.astype(int).T[::-1])], stored.ravel())
    np.testing.assert_array_equal(
        images.turn_upright(shown, images.invert_orientation(orientation)), stored
    )


def test_orientation_in_xmp_does_not_count_as_in_opencv(photo):
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    data = saved(Image.fromarray(photo), "JPEG", xmp=xmp)
    decoded = decode_photo(data, "a.jpg", True, UPRIGHT)
    assert decoded.turned == 1 and decoded.pixels.shape == photo.shape


# --- damage, and files that are no images


@pytest.mark.parametrize("extension", [".jpg", ".png", ".webp"])
def test_a_file_cut_anywhere_is_refused(photo, extension):
    data = encode(photo, extension)
    # Without the end marker of a JPEG, or the last checksums of a PNG, all pixels are there.
    whole = len(data) - {".jpg": 16, ".png": 24}.get(extension, 0)
    for length in np.linspace(0, whole - 1, 60).astype(int):
        reason(data[:length])


def test_progressive_jpeg_and_trailing_bytes_are_fine(photo):
    progressive = encode(photo, ".jpg", cv2.IMWRITE_JPEG_PROGRESSIVE, 1)
    assert decode_gray(progressive + b"\0" * 5000).shape == photo.shape
    png = encode(photo, ".png")
    assert "damaged PNG" in reason(png[:20000] + bytes(4096) + png[24096:])


@pytest.mark.parametrize(
    "data, said",
    [
        (b"", "empty file"),
        (b"\n<!DOCTYPE html><html>404</html>", "web page"),
        (b"something else entirely" * 50, "not an image"),
        (b"%!PS-Adobe-3.0\n(would run Ghostscript)\n", "not an image"),
        (b"\xff\xd8\xff\xe0\x00\x10JFIF", "damaged JPEG"),
        (b"P5\n30000 30000\n255\n", "too large: 30000x30000 pixels, at most 200 megapixels"),
        (b"II*\0\x08\0\0\0\0\0" + bytes(8), "damaged TIFF"),
        (b"\0\0\0\x18ftypheic" + bytes(100), r"pip install 'superglue-sift[heic]'"),
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


# --- very many pixels


def waves(x, y):
    """A smooth pattern, whose value at each position is known."""
    return 128 + 60 * np.sin(x / 37.0 + 0.3) + 40 * np.cos(y / 43.0 - x / 81.0)


@pytest.mark.parametrize("size", [(803, 597), (1605, 1203)])
def test_a_larger_jpeg_is_read_at_a_smaller_scale(monkeypatch, size):
    """Each pixel shows the place of the file where its coordinates say it lies."""
    monkeypatch.setattr(images, "MAX_PIXELS", 200_000)
    whole = np.rint(waves(*np.meshgrid(*map(np.arange, size)))).astype(np.uint8)
    data = encode(whole, ".jpg", cv2.IMWRITE_JPEG_QUALITY, 98)
    decoded = decode_photo(data, "a.jpg", True, STORED)
    height, width = decoded.pixels.shape
    assert decoded.size == size and 50_000 < width * height <= 200_000
    x, y = np.meshgrid(np.arange(width) + 0.5, np.arange(height) + 0.5)
    expected = waves(x * size[0] / width - 0.5, y * size[1] / height - 0.5)
    assert np.abs(decoded.pixels - expected)[4:-4, 4:-4].max() < 4
    for other in (encode(whole, ".jpg", cv2.IMWRITE_JPEG_PROGRESSIVE, 1), encode(whole, ".png")):
        assert "too large" in reason(other)
    assert not images.is_plain_jpeg(data, "a.jpg")  # other decoders leave it to Pillow


def test_a_tiff_of_huge_tiles_is_refused_before_they_need_memory():
    fields = {256: 64, 257: 64, 258: 8, 259: 8, 262: 1, 277: 1}  # a gray picture of 64x64 pixels
    tiles = {322: 60_000, 323: 60_000, 324: 8, 325: 100}  # of 3.6 GB each
    entries = [
        struct.pack("<HHII", *(tag, 4, 1, value)) for tag, value in {**fields, **tiles}.items()
    ]
    data = b"II*\0\x08\0\0\0" + struct.pack("<H", len(entries)) + b"".join(entries) + bytes(200)
    tracemalloc.start()
    assert "damaged TIFF" in reason(data)
    assert tracemalloc.get_traced_memory()[1] < 1e8
    tracemalloc.stop()


def test_a_name_with_a_null_byte_cannot_be_read():
    with pytest.raises(RequestError, match="cannot be read: embedded null byte"):
        images.read_bytes("a\0.png")
