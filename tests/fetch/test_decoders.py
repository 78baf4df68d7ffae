"""DALI and torchvision give the pixels, order and verdicts of Pillow."""

import io
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from pipeline.errors import RequestError
from pipeline.fetch import decoders
from pipeline.fetch.dataset import Entry, ImageSet, read_file_entry
from superglue_sift.features.images import BadImage, decode_gray


def find_missing(decoder):
    """Why a decoder cannot be used here, or ""."""
    try:
        decoders.make_decoder(decoder)
    except RequestError as error:
        return str(error)
    return ""


NO_DALI = find_missing("dali")
NO_TORCHVISION = find_missing("torchvision")
needs_dali = pytest.mark.skipif(bool(NO_DALI), reason=NO_DALI)
needs_torchvision = pytest.mark.skipif(bool(NO_TORCHVISION), reason=NO_TORCHVISION)
both_decoders = pytest.mark.parametrize(
    "decoder",
    [
        pytest.param("dali", marks=needs_dali),
        pytest.param("torchvision", marks=[needs_torchvision, pytest.mark.cu111]),
    ],
)
on_cpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="nvJPEG's pixels differ by a few levels"
)


def encode(pixels, mode="RGB", **options):
    stream = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(stream, "JPEG", **options)
    return stream.getvalue()


@pytest.fixture
def images(tmp_path, color_photo):
    """25 files: JPEG of every kind, others that Pillow reads, and some that nobody can."""
    turned = Image.Exif()
    turned[274] = 6
    folder = tmp_path / "photographs"
    folder.mkdir()
    kinds = (
        {},
        {"progressive": True},
        {"subsampling": 0},
        {"subsampling": 2, "quality": 40},
        {"mode": "L"},
        {"exif": turned},
        {"mode": "CMYK"},
    )
    for index in range(18):
        piece = np.ascontiguousarray(color_photo[index : 240 + index, : 320 + 7 * index])
        (folder / f"{index:02d}.jpg").write_bytes(encode(piece, **kinds[index % len(kinds)]))
    Image.fromarray(color_photo).save(folder / "05-color.png")
    (folder / "07-wrong-name.jpg").write_bytes((folder / "05-color.png").read_bytes())
    (folder / "09-empty.jpg").write_bytes(b"")
    (folder / "11-cut.jpg").write_bytes((folder / "00.jpg").read_bytes()[:3000])
    whole = (folder / "01.jpg").read_bytes()
    (folder / "13-without-end.jpg").write_bytes(whole[:-2])
    (folder / "15-trailing-bytes.jpg").write_bytes(whole + bytes(9))
    (folder / "99-page.jpg").write_bytes(b"<html>gone</html>")
    names = sorted(path.name for path in folder.iterdir())
    entries = [read_file_entry(folder, name, "train", "photographs") for name in names]
    return ImageSet(entries, {"photographs": str(folder)})


def decode_by_pillow(images, entry):
    """Pixels, or the reason why there are none."""
    try:
        return decode_gray(images.read(entry), entry.name)
    except BadImage as bad:
        return bad


def complete(images, decoded):
    """Each entry with its pixels or the reason; Pillow decides where there are none."""
    for item in decoded:
        yield (item, decode_by_pillow(images, item)) if isinstance(item, Entry) else item


def check_same(decoded, images, leave_out=()):
    """The entries in order, with Pillow's pixels or reason."""
    entries = images.select_entries("train")
    results = list(complete(images, decoded))
    assert [entry for entry, _ in results] == entries
    for entry, pixels in results:
        expected = decode_by_pillow(images, entry)
        if isinstance(expected, BadImage):
            assert str(pixels) == str(expected)
        elif entry.name not in leave_out:
            np.testing.assert_array_equal(pixels, expected, entry.name)
            assert pixels.dtype == np.uint8


@on_cpu
@both_decoders
@pytest.mark.parametrize("batch", [1, 4, 5, 64])  # the last one whole, partial, the only one
def test_pixels_order_and_verdicts_are_those_of_pillow(images, decoder, batch, monkeypatch):
    monkeypatch.setattr(decoders, "BATCH", batch)
    check_same(decoders.read_and_decode(decoder, images, images.select_entries("train")), images)
    no_jpegs = [
        entry for entry in images.select_entries("train") if entry.name.startswith(("05-", "09-"))
    ]
    assert list(decoders.read_and_decode(decoder, images, no_jpegs)) == no_jpegs


@on_cpu
@both_decoders
def test_pillow_decodes_a_batch_that_a_decoder_refuses(images, monkeypatch, decoder):
    """Without our checks it gets web pages and PNG; the whole batch is then Pillow's."""
    cmyk = [f"{index:02d}.jpg" for index in range(6, 18, 7)]  # taken as it is
    monkeypatch.setattr(decoders, "is_plain_jpeg", lambda data, _: data[:1] in (b"<", b"\xff"))
    check_same(
        decoders.read_and_decode(decoder, images, images.select_entries("train")), images, cmyk
    )


@pytest.mark.gpu
@both_decoders
def test_pixels_of_a_gpu_differ_by_less_than_a_level(images, decoder):
    entries = images.select_entries("train")
    for entry, pixels in complete(images, decoders.read_and_decode(decoder, images, entries)):
        expected = decode_by_pillow(images, entry)
        assert isinstance(pixels, BadImage) == isinstance(expected, BadImage), entry.name
        if not isinstance(pixels, BadImage):
            assert pixels.shape == expected.shape
            assert np.abs(pixels.astype(int) - expected).mean() < 1.0, entry.name


@pytest.mark.parametrize(
    "decoder, module", [("dali", "nvidia.dali"), ("torchvision", "torchvision")]
)
def test_a_missing_package_names_the_key(monkeypatch, decoder, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RequestError, match=r"keypoints\.decoder"):
        decoders.make_decoder(decoder)
