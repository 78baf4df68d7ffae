"""Which files of a folder are photographs, how files become pixels, and what is refused."""

import importlib.util
import io

import cv2
import numpy as np
import pytest
import tifffile
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


def encode_image(image, kind, **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def read_reason(data):
    """Why the bytes are no image."""
    with pytest.raises(BadImage) as error:
        decode_gray(data, "x.jpg")
    return error.value.reason


# --- the photographs of a folder


def make_files(folder, names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")


def list_names(folder):
    return [path.relative_to(folder).as_posix() for path in list_photos(folder)]


def test_hidden_files_and_those_of_the_system_are_no_photographs(tmp_path):
    hidden = [
        *("._1.jpg", ".cache/a.png", ".@__thumb/1.jpg", ".Trash-1000/files/old.jpg"),
        *("@eaDir/1.jpg/SYNOPHOTO_THUMB_M.jpg", "#recycle/2.jpg", "$RECYCLE.BIN/3.jpg"),
        *("__MACOSX/a.jpg", "lost+found/4.jpg", "notes.txt"),
    ]
    make_files(tmp_path, ["2.JPG", "1.jpg", "sub.jpg/3.webp", *hidden])
    (tmp_path / "gone.jpg").symlink_to("nowhere")  # reading it reports the error
    assert list_names(tmp_path) == ["1.jpg", "2.JPG", "gone.jpg", "sub.jpg/3.webp"]
    assert [name for name in hidden if photo_folder.is_photo(name)] == []
    with pytest.raises(RequestError, match="nothing"):
        list_photos(tmp_path / "nothing")


def test_linked_folders_are_entered_once_and_without_loops(tmp_path):
    make_files(tmp_path, ["photos/z/1.jpg", "photos/2.jpg", "beside/3.jpg", "other/sub/4.jpg"])
    photos = tmp_path / "photos"
    links = {"zz": "z", "loop": ".", "above": "..", "other": "../other"}
    for name, target in links.items():
        (photos / name).symlink_to(target)
    (tmp_path / "other/back").symlink_to(photos)
    assert list_names(photos) == ["2.jpg", "other/sub/4.jpg", "z/1.jpg"]
    (tmp_path / "link").symlink_to("photos")
    assert len(list_names(tmp_path / "link")) == 3


# --- formats


@pytest.mark.parametrize(
    "kind", ["JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF", "JPEG2000", "GIF", "AVIF", "HEIF"]
)
def test_whole_files_of_every_kind_are_read(photo, kind):
    if kind == "HEIF":
        pytest.importorskip("pillow_heif").register_heif_opener()
    elif kind == "AVIF" and not features.check("avif"):
        pytest.skip("this Pillow is without AVIF")
    pixels = decode_gray(encode_image(Image.fromarray(photo), kind))
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
    animation = encode_image(picture, "GIF", save_all=True, append_images=[black])
    for data in (encode_image(picture.convert("CMYK"), "JPEG"), animation):
        assert decode_gray(data).shape == (300, 451) and decode_gray(data).std() > 20


# --- pixels of more than 8 bits

# The 1st percentile of 0 to 100 is 1, and the 99th is 99.
RAMP = np.arange(101.0).reshape(1, 101)
SCALED_RAMP = ((RAMP.clip(1, 99) - 1) * 255 / 98).astype(np.uint8)


def encode_tiff(values, **options):
    stream = io.BytesIO()
    tifffile.imwrite(stream, values, **{"photometric": "minisblack", **options})
    return stream.getvalue()


@pytest.mark.parametrize(
    "values, encode_values",
    [
        ((RAMP * 60).astype(np.uint16), lambda values: encode(values, ".png")),
        ((RAMP * 60).astype(np.uint16), encode_tiff),
        ((RAMP * 60 - 3000).astype(np.int16), encode_tiff),
        ((RAMP * 1000 + 2_000_000_000).astype(np.int32), encode_tiff),
        (RAMP.astype(np.float32) / 50 - 1, encode_tiff),
        (np.stack([RAMP] * 3, -1).astype(np.uint16), lambda values: encode(values, ".png")),
        (np.stack([RAMP] * 5, -1), lambda values: encode_tiff(values, planarconfig="contig")),
    ],
)
def test_the_1st_to_the_99th_percentile_become_0_to_255(values, encode_values):
    pixels = decode_gray(encode_values(values)).astype(int)
    assert pixels[0, [0, 1, 50, 99, 100]].tolist() == [0, 0, 127, 255, 255]
    np.testing.assert_allclose(pixels, SCALED_RAMP, atol=1)  # float32 has 24 bits


def test_three_bands_share_one_range():
    values = np.dstack([RAMP, RAMP / 2, np.zeros_like(RAMP)]).astype(np.float32)
    pixels = decode_photo(encode_tiff(values, photometric="rgb"), "a.tif", False, STORED).pixels
    blue, green, red = np.moveaxis(pixels.astype(int), 2, 0)
    assert red.max() == 255 and abs(green.max() - 128) < 4 and blue.max() == 0


@pytest.mark.parametrize("value, no_data", [(np.nan, None), (-np.inf, None), (-9999.0, "-9999")])
def test_nan_infinity_and_no_data_are_masked_and_do_not_set_the_range(value, no_data):
    values = np.vstack([RAMP, np.full_like(RAMP, value)]).astype(np.float32)
    tags = [(images.GDAL_NODATA, "s", 0, no_data, True)] if no_data else []
    photo = decode_photo(encode_tiff(values, extratags=tags), "a.tif", True, STORED)
    np.testing.assert_array_equal(photo.pixels[0], SCALED_RAMP[0])
    np.testing.assert_array_equal(photo.mask > 0, [[True] * 101, [False] * 101])


def test_a_pixel_has_no_data_if_none_of_its_bands_has():
    values = np.array([[[0, 0, 0], [0, 0, 9], [0, 7, 9], [5, 7, 9]]], np.uint16)
    tags = [(images.GDAL_NODATA, "s", 0, "0", True)]
    data = encode_tiff(values, photometric="rgb", extratags=tags)
    mask = decode_photo(data, "a.tif", True, STORED).mask
    np.testing.assert_array_equal(mask > 0, [[False, True, True, True]])


@pytest.mark.parametrize("values", [np.full((30, 30), 700, np.uint16), np.full((9, 9), np.nan)])
def test_a_flat_picture_is_black(values):
    assert not images.scale_to_8_bits(values, True)[0].any()


# --- TIFF layouts


@pytest.mark.parametrize("byteorder", ["<", ">"])
@pytest.mark.parametrize("kind", ["uint8", "uint16", "float32"])
@pytest.mark.parametrize(
    "bands, photometric, planes, alpha",
    [
        (1, "minisblack", None, False),
        (1, "miniswhite", None, False),
        (2, "minisblack", "contig", False),
        (2, "minisblack", "contig", True),
        (3, "rgb", "contig", False),
        (3, "rgb", "separate", False),
        (4, "rgb", "contig", True),
        (4, "rgb", "separate", True),
        (4, "minisblack", "contig", False),
        (5, "minisblack", "separate", False),
    ],
)
def test_every_tiff_layout_gives_its_known_pixels(
    photo, kind, bands, photometric, planes, alpha, byteorder
):
    small = photo[:120, :160]
    stack = np.stack([small, small[::-1], small[:, ::-1], small, small[::-1, ::-1]], -1)
    expected = small if bands < 3 else cv2.cvtColor(stack[..., :3].copy(), cv2.COLOR_RGB2GRAY)
    stack = stack[..., :bands].astype(float)
    visible = small > 100 if alpha else np.ones(small.shape, bool)
    if alpha:
        stack[..., -1] = visible
    values = 255 - stack if photometric == "miniswhite" else stack
    values = values[..., 0] if bands == 1 else values
    values = np.moveaxis(values, -1, 0) if planes == "separate" else values
    options = {"photometric": photometric, "byteorder": byteorder}
    if planes:
        options["planarconfig"] = planes
    if alpha:
        options["extrasamples"] = ["unassalpha"]
    for storage in ({}, {"tile": (64, 64)}, {"compression": "zlib"}):
        data = encode_tiff(np.ascontiguousarray(values.astype(kind)), **options, **storage)
        photograph = decode_photo(data, "a.tif", True, STORED)
        pixels = photograph.pixels[visible]
        assert np.corrcoef(pixels, expected[visible])[0, 1] > 0.99
        if kind == "uint8":  # 8 bits stay as they are
            np.testing.assert_array_equal(pixels, expected[visible])
        if alpha:
            np.testing.assert_array_equal(photograph.mask > 0, visible)
        else:
            assert photograph.mask is None


@pytest.mark.parametrize(
    "data",
    [
        encode_tiff(np.ones((9, 9), np.complex64)),
        encode_tiff(np.ones((4, 9, 9), np.uint16), photometric="separated"),
        b"II*\0\x08\0\0\0\0\0" + bytes(8),
        encode_tiff(np.ones((90, 90), np.uint16))[:9000],
    ],
)
def test_any_other_tiff_is_refused_with_its_conversion(data):
    assert "gdal_translate" in read_reason(data)


def test_a_compression_that_needs_a_package_is_refused_with_its_name(photo):
    if importlib.util.find_spec("imagecodecs"):
        pytest.skip("imagecodecs is installed")
    data = encode_image(Image.fromarray(photo.astype(np.float32)), "TIFF", compression="tiff_lzw")
    assert "imagecodecs" in read_reason(data)
    data = encode_image(
        Image.fromarray(photo), "TIFF", compression="tiff_lzw"
    )  # Pillow reads 8 bits
    np.testing.assert_array_equal(decode_gray(data), photo)


# --- transparency and masks


def test_transparent_pixels_are_masked_in_every_mode(photo):
    alpha = np.where(photo > 128, 255, 0).astype(np.uint8)
    rgba = np.dstack([photo] * 3 + [alpha])
    picture = Image.fromarray(rgba)
    indexed = Image.fromarray(photo)
    for data, hidden in (
        (encode_image(picture, "PNG"), alpha == 0),
        (encode_image(picture.convert("LA"), "PNG"), alpha == 0),
        (encode_image(indexed, "PNG", transparency=100), photo == 100),
        (encode_image(indexed.convert("P"), "PNG", transparency=100), photo == 100),
        (encode(rgba.astype(np.uint16) * 257, ".png"), alpha == 0),
    ):
        decoded = decode_photo(data, "a.png", True, STORED)
        np.testing.assert_array_equal(decoded.mask == 0, hidden)
        assert np.corrcoef(decoded.pixels[~hidden], photo[~hidden])[0, 1] > 0.99


@pytest.mark.parametrize("alpha", ["assocalpha", "unassalpha"])
def test_transparent_pixels_of_a_deep_tiff_are_masked(alpha):
    """Its colors may be multiplied by alpha, or not."""
    values = np.stack([RAMP * 60] * 3 + [(RAMP > 40) * 60_000], -1).astype(np.uint16)
    data = encode_tiff(values, photometric="rgb", extrasamples=[alpha])
    mask = decode_photo(data, "a.tif", True, STORED).mask
    np.testing.assert_array_equal(mask > 0, RAMP > 40)


def test_masks_are_named_as_in_colmap_and_have_the_size_of_the_stored_pixels(tmp_path):
    make_files(tmp_path, ["sub/a.jpg.png", "b.png"])
    for name, mask in (("sub/a.jpg", "sub/a.jpg.png"), ("b.jpg", "b.png"), ("c.jpg", None)):
        assert photo_folder.find_mask(tmp_path, name) == (tmp_path / mask if mask else None)
    mask = np.zeros((40, 60), np.uint8)
    mask[:10, :15] = 1  # all but black counts
    cv2.imwrite(str(tmp_path / "b.png"), mask)
    np.testing.assert_array_equal(images.read_mask(tmp_path / "b.png", (60, 40)) > 0, mask > 0)
    upright = images.read_mask(tmp_path / "b.png", (40, 60), turned=6)
    assert upright[0, -1] == 255 and upright.shape == (60, 40)
    with pytest.raises(RequestError, match=r"b\.png"):
        images.read_mask(tmp_path / "b.png", (61, 40))
    whole = (tmp_path / "b.png").read_bytes()
    (tmp_path / "b.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RequestError, match=r"b\.png"):
        images.read_mask(tmp_path / "b.png", (60, 40))


# --- rotation by EXIF

ORIENTATIONS = range(1, 9)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_upright_pixels_are_those_of_opencv(color_photo, kind, orientation):
    exif = Image.Exif()
    exif[images.ORIENTATION] = orientation
    options = {"tiffinfo": {images.ORIENTATION: orientation}} if kind == "TIFF" else {"exif": exif}
    data = encode_image(Image.fromarray(color_photo), kind, **options)
    upright = decode_photo(data, "a", False, UPRIGHT)
    np.testing.assert_array_equal(
        upright.pixels, cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    )
    assert upright.turned == orientation
    stored = decode_photo(data, "a", True, STORED)
    assert stored.pixels.shape == (300, 451)


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
@pytest.mark.parametrize("orientation", [0, 9])
def test_an_orientation_that_does_not_exist_is_ignored(color_photo, kind, orientation):
    exif = Image.Exif()
    exif[images.ORIENTATION] = orientation
    options = {"tiffinfo": {images.ORIENTATION: orientation}} if kind == "TIFF" else {"exif": exif}
    picture = Image.fromarray(color_photo)
    changed, plain = (
        decode_photo(encode_image(picture, kind, **words), "a", False, UPRIGHT)
        for words in (options, {})
    )
    np.testing.assert_array_equal(changed.pixels, plain.pixels)
    assert changed.turned == 1


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_the_mask_of_a_transparent_picture_turns_with_its_pixels(photo, orientation):
    """All pixels of one half are white and transparent."""
    picture = np.minimum(photo, 200)
    picture[:, 300:] = 255
    alpha = np.where(picture == 255, 0, 255).astype(np.uint8)
    exif = Image.Exif()
    exif[images.ORIENTATION] = orientation
    data = encode_image(Image.fromarray(np.dstack([picture, alpha]), "LA"), "PNG", exif=exif)
    stored, upright = (decode_photo(data, "a", True, frame) for frame in (STORED, UPRIGHT))
    np.testing.assert_array_equal(stored.mask == 0, alpha == 0)
    np.testing.assert_array_equal(upright.mask, images.turn_upright(stored.mask, orientation))
    assert upright.mask.shape == upright.pixels.shape


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_positions_move_as_pixels_do(orientation):
    stored = np.arange(40 * 60, dtype=np.int32).reshape(40, 60)  # a number for each pixel
    upright = images.turn_upright(stored, orientation)
    y, x = (coordinates.ravel() for coordinates in np.mgrid[:40, :60])
    H = images.map_to_upright(orientation, (60, 40))
    moved = transform(np.stack([x, y], axis=1).astype(float), H)
    np.testing.assert_array_equal(upright[tuple(moved.astype(int).T[::-1])], stored.ravel())
    np.testing.assert_array_equal(
        images.turn_upright(upright, images.invert_orientation(orientation)), stored
    )


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_stored_positions_are_drawn_on_upright_pixels(color_photo, tmp_path, orientation):
    exif = Image.Exif()
    exif[images.ORIENTATION] = orientation
    path = tmp_path / "a.png"
    path.write_bytes(encode_image(Image.fromarray(color_photo), "PNG", exif=exif))
    photo = images.read_photo_for_drawing(path, STORED)
    stored = np.array([[0.0, 0], [450, 0], [450, 299], [0, 299], [100, 200]])
    x, y = transform(stored, photo.to_shown).astype(int).T
    x_stored, y_stored = stored.astype(int).T
    np.testing.assert_array_equal(photo.pixels[y, x, ::-1], color_photo[y_stored, x_stored])


def test_the_orientation_in_xmp_is_ignored_as_by_opencv(photo):
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    data = encode_image(Image.fromarray(photo), "JPEG", xmp=xmp)
    decoded = decode_photo(data, "a.jpg", True, UPRIGHT)
    assert decoded.turned == 1 and decoded.pixels.shape == photo.shape


# --- damage, and files that are no images


@pytest.mark.parametrize("extension", [".jpg", ".png", ".webp"])
def test_a_file_cut_anywhere_is_refused(photo, extension):
    data = encode(photo, extension)
    # Without the end marker of a JPEG, or the last checksums of a PNG, all pixels are there.
    whole = len(data) - {".jpg": 16, ".png": 24}.get(extension, 0)
    for length in np.linspace(0, whole - 1, 60).astype(int):
        read_reason(data[:length])


def test_a_file_whose_middle_is_zeros_is_refused(photo):
    png = encode(photo, ".png")
    read_reason(png[:20000] + bytes(4096) + png[24096:])


def test_progressive_jpeg_with_trailing_bytes_is_read(photo):
    progressive = encode(photo, ".jpg", cv2.IMWRITE_JPEG_PROGRESSIVE, 1)
    assert decode_gray(progressive + b"\0" * 5000).shape == photo.shape


@pytest.mark.parametrize(
    "data, reason",
    [
        (b"\n<!DOCTYPE html><html>404</html>", ""),
        (b"%!PS-Adobe-3.0\n(would run Ghostscript)\n", ""),
        (b"P5\n30000 30000\n255\n", "30000x30000"),
        (b"\0\0\0\x18ftypheic" + bytes(100), "superglue-sift[heic]"),
    ],
)
def test_a_file_that_is_no_image_has_a_reason(data, reason, monkeypatch):
    monkeypatch.setattr(images, "_register_heic", lambda: False)
    monkeypatch.delitem(Image.OPEN, "HEIF", raising=False)
    assert reason in read_reason(data)


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


def test_a_file_of_too_many_pixels_is_refused(photo, monkeypatch):
    monkeypatch.setattr(images, "MAX_PIXELS", photo.size - 1)
    for data in (encode(photo), encode_tiff(photo.astype(np.int16))):
        read_reason(data)
    assert not images.is_plain_jpeg(encode(photo), "a.jpg")  # Other decoders leave it to Pillow
