"""Which images there are: folders, the manifest, reading them back from folders and archives."""

import json
import os
import shutil
import unicodedata
import zipfile

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


def test_a_damaged_manifest_names_its_line(tmp_path):
    path = tmp_path / "manifest.csv"
    with pytest.raises(RequestError, match="run `dvc repro fetch`"):
        dataset.read_manifest(path)
    path.write_text("name,split,container,member,size,crc32,offset,packed,method\na,b,c,d,many\n")
    with pytest.raises(RequestError, match="line 2"):
        dataset.read_manifest(path)


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
    with pytest.raises(BadImage, match=f"has 1 bytes, {second.size} when"):
        images.read(second)
    (image_folder / "coffee.png").unlink()
    with pytest.raises(BadImage, match="cannot be read"):
        images.read(second)


@pytest.mark.parametrize(
    "name", ["../out.jpg", "/etc/out.jpg", "a/../../b.jpg", "C:/x.jpg", "\\\\host\\x.jpg"]
)
def test_archives_with_names_that_lead_outside_are_refused(tmp_path, name):
    with zipfile.ZipFile(tmp_path / "slip.zip", "w") as out:
        out.writestr(name, b"x")
    with pytest.raises(RequestError, match="points outside"):
        dataset.open_zip(tmp_path / "slip.zip")


def test_bombs_and_other_methods_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "MAX_IMAGE_BYTES", 999_999)
    for method, said in (
        (zipfile.ZIP_DEFLATED, "'a.jpg' would grow to 1000000 bytes"),
        (zipfile.ZIP_LZMA, "another method than stored and deflate"),
    ):
        with zipfile.ZipFile(tmp_path / "bomb.zip", "w", method) as out:
            out.writestr("a.jpg", bytes(1_000_000))
        with pytest.raises(RequestError, match=said):
            dataset.open_zip(tmp_path / "bomb.zip")


def test_files_of_equal_size_and_end_are_no_copies(tmp_path, photo):
    """Uncompressed photographs of one size, with a white line below."""
    for number in range(3):
        picture = photo[number : number + 200, :300].copy()
        picture[-10:] = 255
        assert cv2.imwrite(str(tmp_path / f"{number}.bmp"), picture)
    assert len(set(open_container(tmp_path).contents.values())) == 3


# --- lists and annotation files

CAFE = unicodedata.normalize("NFD", "café.jpg")  # as a Mac spells it
BOTH = ["café.jpg", "nested/turned.JPG"]


@pytest.fixture
def roots(image_folder, tmp_path):
    """The photographs in a folder and in a zip."""
    (image_folder / "chelsea.jpg").rename(image_folder / "café.jpg")
    return image_folder, shutil.make_archive(str(tmp_path / "zipped"), "zip", image_folder)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize(
    "names",
    [
        f"nested\\turned.JPG\r\n  # one\r\n\r\n{CAFE}\r\ncafé.jpg\r\n",
        [{"id": 1, "file_name": "café.jpg"}, {"id": "b", "file_name": "nested/turned.JPG"}],
        # LVIS; Label Studio on Windows, and of uploads; a Mac; others without folder or id
        [{"coco_url": "http://x.org/train2017/caf%C3%A9.jpg"}, {"file_name": "nested\\turned.JPG"}],
        [{"file_name": "../../data/upload/1/café.jpg"}, {"file_name": "/data/turned.JPG"}],
        [{"file_name": CAFE}, {"file_name": "turned.JPG"}],
    ],
)
def test_lists_and_annotations_of_other_systems_and_programs(roots, tmp_path, names, encoding):
    listed = tmp_path / ("list.txt" if isinstance(names, str) else "boxes.json")
    content = {"images": names, "categories": [{"id": 1, "name": 7}], "info": None}
    text = names if isinstance(names, str) else json.dumps(content, ensure_ascii=False)
    listed.write_bytes(text.encode(encoding))
    for root in roots:
        assert open_container(listed, str(root)).names == BOTH
    # whole paths, which count from anywhere above them
    listed = tmp_path / "whole.txt"
    listed.write_text("".join(f"{roots[0] / name}\n" for name in BOTH))
    assert open_container(listed, "/").names == [f"{roots[0]}/{name}"[1:] for name in BOTH]


@pytest.mark.parametrize(
    "name, text, root, said",
    [
        ("list.txt", "../secret.jpg\n", "", r"'secret\.jpg' is not in .* set fetch\.root"),
        ("list.txt", "/secret.jpg\n", "", r"'secret\.jpg' is not in"),
        ("list.txt", "\n", "", "holds no images"),
        ("list.txt", "a.jpg\n", "nowhere", "nowhere: no such folder"),
        ("list.txt", "a\0b", "", "is not a text file"),
        ("boxes.json", {"images": [{"id": 1}]}, "", "each with a `file_name`"),
        ("boxes.json", [], "", "not a COCO annotation file"),
        ("x.pdf", "x", "", r"must be a folder, a \.zip"),
    ],
)
def test_wrong_lists_and_annotations_are_named(image_folder, tmp_path, name, text, root, said):
    (tmp_path / name).write_text(text if isinstance(text, str) else json.dumps(text))
    with pytest.raises(RequestError, match=said):
        open_container(tmp_path / name, root or str(image_folder))
