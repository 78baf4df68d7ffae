"""Which images there are: folders, the manifest, reading them back from folders and archives."""

import os
import zipfile

import pytest

from pipeline.errors import RequestError
from pipeline.fetch import dataset
from pipeline.fetch.dataset import Entry
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
    path.write_text(
        "name,split,container,member,size,crc32,offset,packed,method\na,train,c,m,many,,0,0,0\n"
    )
    with pytest.raises(RequestError, match="line 2"):
        dataset.read_manifest(path)
    path.write_text(path.read_text().splitlines()[0])
    with pytest.raises(RequestError, match="lists no image"):
        dataset.read_manifest(path)


def test_images_read_back_and_a_changed_one_is_bad(image_folder):
    names = ["chelsea.jpg", "coffee.png"]
    entries = [dataset.file_entry(image_folder, name, "train", "train") for name in names]
    images = dataset.ImageSet(entries, {"train": str(image_folder)})
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


@pytest.mark.parametrize(
    "name", ["../out.jpg", "/etc/out.jpg", "a/../../b.jpg", "C:/x.jpg", "\\\\host\\x.jpg"]
)
def test_archives_with_names_that_lead_outside_are_refused(tmp_path, name):
    with zipfile.ZipFile(tmp_path / "slip.zip", "w") as out:
        out.writestr(name, b"x")
    with pytest.raises(RequestError, match="points outside"):
        dataset.zip_container(tmp_path / "slip.zip")


def test_bombs_links_and_doubles_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("a.jpg", bytes(10_000_000))
    with pytest.raises(RequestError, match=r"'a.jpg' would grow from \d+ to 10000000"):
        dataset.zip_container(tmp_path / "bomb.zip")
    link = zipfile.ZipInfo("a.jpg")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "link.zip", "w") as out:
        out.writestr(link, "/etc/passwd")
    with pytest.raises(RequestError, match="symbolic link"):
        dataset.zip_container(tmp_path / "link.zip")
    with zipfile.ZipFile(tmp_path / "twice.zip", "w") as out, pytest.warns(UserWarning):
        out.writestr("a.jpg", b"1")
        out.writestr("a.jpg", b"2")
    with pytest.raises(RequestError, match="in it twice"):
        dataset.zip_container(tmp_path / "twice.zip")
