"""Folders, zips and lists of images, the manifest, and reading its images."""

import hashlib
import json
import os
import shutil
import zipfile
import zlib

import cv2
import pytest

from pipeline.errors import RequestError
from pipeline.fetch import dataset
from pipeline.fetch.dataset import Entry, open_container
from superglue_sift.features.images import BadImage


def test_manifest_survives_a_round_trip_and_does_not_depend_on_order(tmp_path):
    entries = [
        Entry('b, with "quotes".jpg', "train", "train", "b.jpg", 5, "0000abcd"),
        Entry("new\nline.jpg", "train", "train", "c.jpg", 5, "", 30, 4, 8),
        Entry("a.jpg", "val", "val", "a.jpg", 0, ""),
        Entry(os.fsdecode(b"caf\xe9.jpg"), "test", "train", "d.jpg", 1, "00000001"),
    ]
    dataset.write_manifest(tmp_path / "1.csv", entries)
    dataset.write_manifest(tmp_path / "2.csv", entries[::-1])
    assert (tmp_path / "1.csv").read_bytes() == (tmp_path / "2.csv").read_bytes()
    assert dataset.read_manifest(tmp_path / "1.csv") == [
        entries[3],
        entries[0],
        entries[1],
        entries[2],
    ]


def test_a_missing_manifest_is_named(tmp_path):
    with pytest.raises(RequestError, match=r"manifest\.csv"):
        dataset.open_manifest(tmp_path)


def test_images_read_back_and_a_changed_one_is_bad(image_folder):
    names = ["chelsea.jpg", "coffee.png"]
    entries = [dataset.read_file_entry(image_folder, name, "train", "train") for name in names]
    images = dataset.ImageSet(entries, {"train": str(image_folder)})
    first, second = images.select_entries("train")
    assert images.read(first) == (image_folder / "chelsea.jpg").read_bytes()
    (image_folder / "coffee.png").write_bytes(b"x" * second.size)
    with pytest.raises(BadImage, match="CRC-32"):
        images.read(second)
    (image_folder / "coffee.png").write_bytes(b"x")
    with pytest.raises(BadImage, match="1 bytes"):
        images.read(second)
    (image_folder / "coffee.png").unlink()
    with pytest.raises(BadImage):
        images.read(second)


def test_a_name_that_is_not_utf8_is_escaped(tmp_path):
    member = os.fsdecode(b"caf\xe9.jpg")
    (tmp_path / member).write_bytes(b"x")
    container = open_container(tmp_path)
    (entry,) = container.read_entries(container.names, "train", "train")
    assert entry.name == r"caf\xe9.jpg" and entry.member == member
    assert list(container.contents) == [member]
    assert dataset.ImageSet([entry], {"train": str(tmp_path)}).read(entry) == b"x"


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_images_of_a_zip_are_read_in_place(tmp_path, photo, method):
    data = cv2.imencode(".bmp", photo)[1].tobytes()
    with zipfile.ZipFile(tmp_path / "a.zip", "w", method) as out:
        out.writestr("readme.txt", "no image")
        out.writestr("b/ä.bmp", data)
    container = open_container(tmp_path / "a.zip")
    assert container.names == ["b/ä.bmp"]
    (entry,) = container.read_entries(container.names, "train", "train")
    images = dataset.ImageSet([entry], {"train": str(tmp_path / "a.zip")})
    assert images.read(entry) == data


def test_images_of_a_zip_that_cannot_be_read_in_place_are_bad(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_LZMA) as out:
        out.writestr("a.jpg", bytes(1000))
    container = open_container(tmp_path / "a.zip")
    (entry,) = container.read_entries(container.names, "train", "train")
    with pytest.raises(BadImage):
        dataset.ImageSet([entry], {"train": str(tmp_path / "a.zip")}).read(entry)


def test_files_of_equal_size_and_end_have_different_contents(tmp_path, photo):
    """Uncompressed photographs of one size, with a white line below."""
    for number in range(3):
        picture = photo[number : number + 200, :300].copy()
        picture[-10:] = 255
        assert cv2.imwrite(str(tmp_path / f"{number}.bmp"), picture)
    assert len(set(open_container(tmp_path).contents.values())) == 3


# --- lists and annotation files

NAMES = ["café.jpg", "nested/turned.JPG"]


@pytest.fixture
def roots(image_folder, tmp_path):
    """The photographs in a folder and in a zip."""
    (image_folder / "chelsea.jpg").rename(image_folder / "café.jpg")
    return image_folder, shutil.make_archive(str(tmp_path / "zipped"), "zip", image_folder)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("suffix", [".txt", ".json"])
def test_lists_and_annotations_name_images_of_a_folder_or_zip(roots, tmp_path, suffix, encoding):
    text = "\r\n".join([NAMES[1], "  # a comment", "", NAMES[0], NAMES[0]])
    if suffix == ".json":
        text = json.dumps({"images": [{"file_name": name} for name in NAMES]}, ensure_ascii=False)
    list_file = tmp_path / f"list{suffix}"
    list_file.write_bytes(text.encode(encoding))
    for root in roots:
        assert open_container(list_file, str(root)).names == NAMES


def test_names_may_lead_to_other_folders(image_folder, tmp_path):
    (tmp_path / "lists").mkdir()
    list_file = tmp_path / "lists/list.txt"
    names = [str(image_folder / "chelsea.jpg"), f"../{image_folder.name}/coffee.png"]
    list_file.write_text("\n".join(names))
    container = open_container(list_file)
    entries = container.read_entries(container.names)
    data = [(image_folder / name).read_bytes() for name in ("coffee.png", "chelsea.jpg")]
    assert [entry.crc32 for entry in entries] == [f"{zlib.crc32(part):08x}" for part in data]


def test_a_missing_image_of_a_list_is_bad(image_folder, tmp_path):
    (tmp_path / "list.txt").write_text("gone.jpg\nchelsea.jpg\n")
    container = open_container(tmp_path / "list.txt", str(image_folder))
    assert [entry.crc32 == "" for entry in container.read_entries(container.names)] == [False, True]


@pytest.mark.parametrize(
    "name, text, file",
    [
        ("list.txt", "gone.jpg\n", r"gone\.jpg"),
        ("list.txt", "\n", r"list\.txt"),
        ("x.pdf", "x", r"x\.pdf"),
        ("torn.zip", "PK", r"torn\.zip"),
    ],
)
def test_a_wrong_list_is_named(image_folder, tmp_path, name, text, file):
    (tmp_path / name).write_text(text)
    with pytest.raises(RequestError, match=file):
        open_container(tmp_path / name, str(image_folder))


# --- the split


def test_an_image_is_held_out_if_its_hash_is_below_the_fraction():
    names = [f"{number}.jpg" for number in range(1000)]
    train, held_out = dataset.hold_out(names, 0.3, seed=0)
    assert set(held_out) == {name for name in names if dataset.hash_fraction(0, name) < 0.3}
    assert sorted(train + held_out) == sorted(names)
    digest = hashlib.sha256(b"0\n7.jpg").digest()
    assert dataset.hash_fraction(0, "7.jpg") == int.from_bytes(digest[:8], "big") / 2**64


def test_the_smallest_hashes_fill_up_a_split_that_is_too_small():
    names = sorted("abcdefgh", key=lambda name: dataset.hash_fraction(0, name))
    assert dataset.hold_out(names, 1e-9, 0, (1, 3))[1] == sorted(names[:3])
    assert dataset.hold_out(names, 1 - 1e-9, 0, (2, 1))[0] == sorted(names[-2:])
    assert dataset.hold_out(names, 0.0, 0, (1, 3))[1] == []
    assert dataset.hold_out(names, 1.0, 0, (1, 3))[0] == []


def test_half_of_the_held_out_images_are_test_images(make_params):
    names = [f"{number}.jpg" for number in range(1000)]
    splits = dataset.split_names(names, make_params("fetch", val_fraction=0.4), {})
    val, test = len(splits["val"]), len(splits["test"])
    # Three standard deviations of 400 coin tosses
    assert abs(val + test - 400) < 3 * 16 and abs(val - test) < 3 * 20


@pytest.mark.parametrize("set_name", "abcdefgh")
def test_twelve_of_24_images_are_held_out_six_to_validate_and_six_to_test(make_params, set_name):
    names = [f"{set_name}-{number}.jpg" for number in range(24)]
    splits = dataset.split_names(names, make_params("fetch", val_fraction=0.2), {})
    assert {split: len(held) for split, held in splits.items()} == {
        "train": 12,
        "val": 6,
        "test": 6,
    }
