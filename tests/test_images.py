"""images/: decoding and what it refuses, the manifest, reading images back from folders and
archives.
"""

from __future__ import annotations

import io
import os
import struct
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFile, features

from pipeline.errors import RequestError
from pipeline.fetch import containers
from pipeline.image_sets import manifest, sources
from pipeline.image_sets.manifest import Entry
from superglue_sift import images as image_files
from superglue_sift.images import BadImage, decode_gray


def encode(pixels, extension=".jpg", *options) -> bytes:
    return cv2.imencode(extension, pixels, list(options))[1].tobytes()


def reason(data: bytes) -> str:
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
    for path in sorted((shared_data / "coco" / "val").glob("*.jpg"))[:40]:
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
    assert decode_gray(encode(color_photo)).ndim == 2
    wide = decode_gray(encode(photo.astype(np.uint16) * 257, ".png"))
    assert np.abs(wide.astype(int) - photo).max() <= 1
    assert decode_gray(encode(np.dstack([color_photo, photo[:300, :451]]), ".png")).shape == (
        300,
        451,
    )
    cmyk = io.BytesIO()
    Image.fromarray(color_photo).convert("CMYK").save(cmyk, "JPEG")
    assert decode_gray(cmyk.getvalue()).shape == (300, 451)
    assert image_files.decode_color(encode(photo)).shape == (*photo.shape, 3)


def test_exif_orientation_is_ignored(photo):
    turned = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # "turn me by 90 degrees"
    Image.fromarray(photo).save(turned, "JPEG", exif=exif)
    assert decode_gray(turned.getvalue()).shape == photo.shape


@pytest.mark.parametrize("extension", [".jpg", ".png", ".webp"])
def test_a_file_cut_anywhere_is_refused(photo, extension):
    data = encode(photo, extension)
    whole = len(data) - 4 * (extension == ".png")  # without the checksum of an empty chunk, IEND
    for length in np.linspace(0, whole - 1, 60).astype(int):
        reason(data[:length])


def test_progressive_jpeg_and_trailing_bytes_are_fine_and_a_cut_thumbnail_does_not_fool(photo):
    progressive = encode(
        photo, ".jpg", cv2.IMWRITE_JPEG_PROGRESSIVE, 1, cv2.IMWRITE_JPEG_OPTIMIZE, 1
    )
    assert decode_gray(progressive + b"\0" * 5000).shape == photo.shape
    thumbnail = encode(photo[:60, :60])
    inside = (
        progressive[:2]
        + b"\xff\xe1"
        + struct.pack(">H", len(thumbnail) + 2)
        + thumbnail
        + progressive[2:]
    )
    assert decode_gray(inside).shape == photo.shape
    assert "end-of-image" in reason(inside[: len(inside) * 2 // 3])


def test_holes_of_zeros_are_found_where_decoders_see_nothing(photo):
    data = encode(photo, ".jpg", cv2.IMWRITE_JPEG_QUALITY, 95)
    holed = data[:20000] + bytes(4096) + data[24096:]
    assert cv2.imdecode(np.frombuffer(holed, np.uint8), 0) is not None
    assert "zero bytes" in reason(holed)
    png = encode(photo, ".png")
    assert "checksum" in reason(png[:20000] + bytes(4096) + png[24096:])


def test_a_flat_picture_is_not_taken_for_a_hole():
    for value in (0, 128, 255):
        flat = np.full((2000, 3000), value, np.uint8)
        for progressive in (0, 1):
            options = (cv2.IMWRITE_JPEG_OPTIMIZE, 1, cv2.IMWRITE_JPEG_PROGRESSIVE, progressive)
            assert decode_gray(encode(flat, ".jpg", *options)).shape == flat.shape


def test_things_that_are_no_images_are_named():
    assert reason(b"") == "empty file"
    assert "web page" in reason(b"\n<!DOCTYPE html><html>404</html>")
    assert "not an image" in reason(b"something else entirely" * 50)
    assert "not an image" in reason(b"%!PS-Adobe-3.0\n(would run Ghostscript)\n")
    assert "damaged JPEG" in reason(b"\xff\xd8\xff\xe0\x00\x10JFIF")


@pytest.fixture
def undecoded(monkeypatch) -> None:
    """Fail when pixels are decoded."""
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda *_: pytest.fail("decoded"))


def png_of(*chunks: tuple) -> bytes:
    body = (
        struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def header_of(width: int, height: int) -> tuple:
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


def tiff_of(*tags: tuple) -> bytes:
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


@pytest.mark.parametrize(
    "data, said",
    [
        (b"P5\n#" + b"c" * 2000 + b"\n30000 30000\n255\n", "too large: 30000x30000"),
        (b"P530000 30000 255\n", "damaged PPM"),
        (b"P7\nWIDTH 30000\nHEIGHT 30000\nDEPTH 1\nMAXVAL 255\nENDHDR\n", "not an image"),
        (b"RIFF\x16\0\0\0WEBPABCD" + bytes(14), "not an image"),
        (b"II*\0\x08\0\0\0\0\0" + bytes(8), "damaged TIFF"),
    ],
)
def test_a_size_that_is_hidden_is_found_or_the_file_refused(data, said, undecoded):
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


def test_profiles_print_nothing(capfd, root):
    import skimage

    decode_gray((Path(skimage.__file__).parent / "data" / "astronaut.png").read_bytes())
    assert capfd.readouterr() == ("", "")


def test_read_gray_names_the_file_and_the_reason(tmp_path):
    with pytest.raises(RequestError, match=r"no\.jpg: cannot be read"):
        image_files.read_gray(tmp_path / "no.jpg")
    (tmp_path / "page.jpg").write_bytes(b"<html>")
    with pytest.raises(RequestError, match=r"page.jpg: a web page"):
        image_files.read_gray(tmp_path / "page.jpg")


def test_list_images_is_nested_sorted_and_leaves_hidden_files_out(image_folder):
    (image_folder / "._coffee.png").write_bytes(b"x")
    (image_folder / ".cache").mkdir()
    (image_folder / ".cache" / "a.png").write_bytes(b"x")
    (image_folder / "notes.txt").write_text("x")
    (image_folder / "folder.jpg").mkdir()
    (image_folder / "gone.jpg").symlink_to("nowhere")
    names = [
        path.relative_to(image_folder).as_posix() for path in sources.list_images(image_folder)
    ]
    assert names == ["chelsea.jpg", "coffee.png", "flipped.webp", "gone.jpg", "nested/turned.JPG"]
    with pytest.raises(RequestError, match="no such folder"):
        sources.list_images(image_folder / "nothing")


def test_manifest_survives_a_round_trip_and_does_not_depend_on_order(tmp_path):
    entries = [
        Entry('b, with "quotes".jpg', "train", "train", "b.jpg", 5, "0000abcd"),
        Entry("new\nline.jpg", "train", "train", "c.jpg", 5, "", 30, 4, 8),
        Entry("a.jpg", "val", "val", "a.jpg", 0, ""),
        Entry(os.fsdecode(b"caf\xe9.jpg"), "test", "train", "d.jpg", 1, "00000001"),
    ]
    manifest.write(tmp_path / "1.csv", entries)
    manifest.write(tmp_path / "2.csv", entries[::-1])
    assert (tmp_path / "1.csv").read_bytes() == (tmp_path / "2.csv").read_bytes()
    assert manifest.read(tmp_path / "1.csv") == manifest.sort(entries)


def test_a_damaged_manifest_names_its_line(tmp_path):
    path = tmp_path / "manifest.csv"
    with pytest.raises(RequestError, match="run `dvc repro fetch`"):
        manifest.read(path)
    path.write_text(
        "name,split,container,member,size,crc32,offset,packed,method\na,train,c,m,many,,0,0,0\n"
    )
    with pytest.raises(RequestError, match="line 2"):
        manifest.read(path)


def test_images_read_back_and_a_changed_one_is_bad(image_folder, tmp_path):
    names = ["chelsea.jpg", "coffee.png"]
    images = sources.ImageSet(
        sources.folder_entries(image_folder, names, "train", "train"), {"train": str(image_folder)}
    )
    first, second = images.entries("train")
    assert images.read(first) == (image_folder / "chelsea.jpg").read_bytes()
    (image_folder / "coffee.png").write_bytes(b"x" * second.size)
    with pytest.raises(BadImage, match="CRC-32"):
        images.read(second)
    (image_folder / "coffee.png").write_bytes(b"x")
    with pytest.raises(BadImage, match=f"has 1 bytes, {second.size} when"):
        images.read(second)
    (image_folder / "coffee.png").unlink()
    with pytest.raises(BadImage, match="cannot be read"):
        images.read(second)


@pytest.fixture
def zipped(image_folder, tmp_path) -> Path:
    path = tmp_path / "images.zip"
    with zipfile.ZipFile(path, "w") as out:
        out.write(image_folder / "chelsea.jpg", "set/chelsea.jpg")
        out.write(image_folder / "coffee.png", "set/coffee.png", zipfile.ZIP_DEFLATED)
        out.writestr("set/readme.txt", "no image")
    return path


def test_images_inside_a_zip_are_read_in_place(zipped, image_folder):
    container = containers.zip_container(zipped)
    entries = [container.entry(name, "train", "train") for name in container.names]
    images = sources.ImageSet(entries, {"train": str(zipped)})
    assert [entry.name for entry in entries] == ["set/chelsea.jpg", "set/coffee.png"]
    for entry in entries:
        assert images.read(entry) == (image_folder / Path(entry.name).name).read_bytes()
    data = bytearray(zipped.read_bytes())
    data[entries[0].offset + 5000] ^= 1
    zipped.write_bytes(data)
    with pytest.raises(BadImage, match="CRC-32"):
        images.read(entries[0])


@pytest.mark.parametrize(
    "name", ["../out.jpg", "/etc/out.jpg", "a/../../b.jpg", "C:/x.jpg", "\\\\host\\x.jpg"]
)
def test_archives_with_names_that_lead_outside_are_refused(tmp_path, name):
    with zipfile.ZipFile(tmp_path / "slip.zip", "w") as out:
        out.writestr(name, b"x")
    with pytest.raises(RequestError, match="points outside"):
        containers.zip_container(tmp_path / "slip.zip")


def test_bombs_links_and_doubles_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("a.jpg", bytes(10_000_000))
    with pytest.raises(RequestError, match=r"'a.jpg' would grow from \d+ to 10000000"):
        containers.zip_container(tmp_path / "bomb.zip")
    link = zipfile.ZipInfo("a.jpg")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "link.zip", "w") as out:
        out.writestr(link, "/etc/passwd")
    with pytest.raises(RequestError, match="symbolic link"):
        containers.zip_container(tmp_path / "link.zip")
    with zipfile.ZipFile(tmp_path / "twice.zip", "w") as out, pytest.warns(UserWarning):
        out.writestr("a.jpg", b"1")
        out.writestr("a.jpg", b"2")
    with pytest.raises(RequestError, match="in it twice"):
        containers.zip_container(tmp_path / "twice.zip")


def test_a_cut_archive_is_refused(zipped):
    data = zipped.read_bytes()
    for length in np.linspace(0, len(data) - 1, 20).astype(int):
        zipped.write_bytes(data[:length])
        with pytest.raises(RequestError, match=r"images\.zip"):
            containers.zip_container(zipped)


@given(
    st.lists(st.text(min_size=1, max_size=8), unique=True, max_size=40),
    st.floats(0, 1),
    st.integers(0, 5),
)
def test_hold_out_partitions_and_depends_on_names_alone(names, fraction, seed):
    kept, held = sources.hold_out(names, fraction, seed)
    assert sorted(kept + held) == sorted(names)
    assert (kept, held) == sources.hold_out(names[::-1], fraction, seed)
    if len(names) > 1 and 0 < fraction < 1:
        assert kept and held
    if len(names) > 20:  # a name stays on its side when others leave (unless a side would be empty)
        fewer_kept, fewer_held = sources.hold_out(names[:-1], fraction, seed)
        moved = (set(fewer_kept) & set(held)) | (set(fewer_held) & set(kept))
        assert len(moved) <= 1


def claiming(extension: str, width: int, height: int) -> bytes:
    """A whole small image whose header promises another size."""
    data = bytearray(encode(np.zeros((16, 24), np.uint8), extension))
    if extension == ".jpg":
        at = data.index(b"\xff\xc0") + 5
        data[at : at + 4] = struct.pack(">HH", height, width)
    elif extension == ".png":
        data[16:24] = struct.pack(">II", width, height)
        data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    elif extension == ".bmp":
        data[18:26] = struct.pack("<ii", width, -height)
    elif extension == ".pgm":
        data[:] = data.replace(b"24 16", f"# made\n{width} {height}".encode())
    else:
        directory = struct.unpack_from("<I", data, 4)[0]
        for at in range(directory + 2, directory + 26, 12):
            tag, _, count, _ = struct.unpack_from("<HHII", data, at)
            if tag in (256, 257):
                struct.pack_into("<HHII", data, at, tag, 4, count, width if tag == 256 else height)
    return bytes(data)


@pytest.mark.parametrize("extension", [".jpg", ".png", ".bmp", ".pgm", ".tiff"])
def test_an_image_above_200_megapixels_is_refused_by_its_header(extension, undecoded):
    """No decoder is asked, which would take a byte a pixel at the least."""
    assert image_files.MAX_PIXELS == 200_000_000
    if extension != ".png":  # of which all bytes are checked
        image_files.open_image(claiming(extension, 20_000, 10_000), "at the limit")
    data = claiming(extension, 20_000, 10_001)
    tracemalloc.start()
    with pytest.raises(BadImage, match="too large: 20000x10001 pixels, at most 200 megapixels"):
        decode_gray(data, "huge")
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
