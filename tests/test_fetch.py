"""The stage `fetch`: sources, splits, what it writes, and what it says when the request is wrong."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from pathlib import Path

import pytest
from faulty_server import FaultyServer

from pipeline import fetch
from pipeline.errors import RequestError, WorkError
from pipeline.images import coco, sources, transfer
from pipeline.images.sources import open_manifest


@pytest.fixture
def run(tmp_path, make_params, monkeypatch):
    """`run(source="folder", ...)` runs the stage in tmp_path and gives the folder it wrote."""

    def run_stage(out="out", **changes) -> Path:
        monkeypatch.setattr(fetch.params, "load", lambda *_: make_params("fetch", **changes))
        arguments = ["--out", str(tmp_path / out), "--archives", str(tmp_path / "archives")]
        assert fetch.main([*arguments, "--reports", str(tmp_path / "reports")]) == 0
        return tmp_path / out

    return run_stage


def names(folder, split):
    return [entry.name for entry in open_manifest(folder).entries(split)]


def test_the_sample_is_in_the_wheel_and_its_splits_are_fixed(run, tmp_path):
    folder = run()
    for split, expected in sources.SAMPLE.items():
        assert names(folder, split) == sorted(expected)
    images = open_manifest(folder)
    assert all(images.read(entry) for split in sources.SAMPLE for entry in images.entries(split))
    motorcycles = [
        split for split, listed in sources.SAMPLE.items() for name in listed if "motorcycle" in name
    ]
    assert motorcycles == ["train", "train"]
    assert json.loads((tmp_path / "reports" / "metrics.json").read_text())["train_images"] == 11


def test_the_same_request_writes_the_same_bytes_and_drops_what_is_stale(run):
    folder = run()
    (folder / "sample" / "stale.png").write_bytes(b"x")
    before = {path.name: path.read_bytes() for path in folder.glob("*.*")}
    assert {path.name: path.read_bytes() for path in run().glob("*.*")} == before
    assert not (folder / "sample" / "stale.png").exists()


def test_a_folder_stays_where_it_is_and_a_part_is_held_out(run, image_folder, tmp_path):
    folder = run(source="folder", path=str(image_folder), val_fraction=0.5, test_fraction=0.5)
    found = {split: names(folder, split) for split in ("train", "val", "test")}
    assert sorted([name for each in found.values() for name in each]) == [
        "chelsea.jpg",
        "coffee.png",
        "flipped.webp",
        "nested/turned.JPG",
    ]
    assert found["train"] and found["val"]
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.csv", "source.json"]
    entry = open_manifest(folder).entries("train")[0]
    assert open_manifest(folder).read(entry) == (image_folder / entry.name).read_bytes()


def test_relative_folders_survive_a_move_of_both(run, image_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = run(source="folder", path="images")
    assert json.loads((folder / "source.json").read_text())["containers"]["train"]["path"] == "../images"
    (tmp_path / "moved").mkdir()
    shutil.move(str(image_folder), str(tmp_path / "moved"))
    shutil.move(str(folder), str(tmp_path / "moved"))
    images = open_manifest(tmp_path / "moved" / "out")
    assert images.read(images.entries("train")[0])


def test_a_folder_of_held_out_images_is_shared_among_val_and_test(run, image_folder, tmp_path):
    shutil.copytree(image_folder, tmp_path / "held")
    folder = run(source="folder", path=str(image_folder), val_path=str(tmp_path / "held"), test_fraction=0.5)
    assert len(names(folder, "train")) == 4
    assert len(names(folder, "val")) + len(names(folder, "test")) == 4
    assert names(folder, "val") and names(folder, "test")


def test_the_order_of_files_on_disk_does_not_matter(run, image_folder, tmp_path):
    other = tmp_path / "other" / "images"
    for path in sorted(image_folder.rglob("*"), reverse=True):
        if path.is_file():
            target = other / path.relative_to(image_folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    first = run("a", source="folder", path=str(image_folder))
    second = run("b", source="folder", path=str(other))
    assert (first / "manifest.csv").read_bytes() == (second / "manifest.csv").read_bytes()


def test_a_smaller_limit_takes_a_part_of_a_larger_one(run, tmp_path, photo):
    import cv2

    many = tmp_path / "many"
    many.mkdir()
    for index in range(12):
        cv2.imwrite(str(many / f"{index}.png"), photo[:40, :40])
    large = run("a", source="folder", path=str(many), limit=5, val_fraction=0.3)
    small = run("b", source="folder", path=str(many), limit=2, val_fraction=0.3)
    assert len(names(small, "train")) == 2 and set(names(small, "train")) < set(names(large, "train"))


def test_wrong_requests_are_named(run, image_folder, tmp_path):
    with pytest.raises(RequestError, match="nowhere: no such folder"):
        run(source="folder", path=str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(RequestError, match="empty: holds no images"):
        run(source="folder", path=str(tmp_path / "empty"))
    with pytest.raises(RequestError, match="val_path: is the same folder"):
        run(source="folder", path=str(image_folder), val_path=str(image_folder / "nested" / ".."))


def test_an_incomplete_output_is_named(tmp_path, run):
    with pytest.raises(RequestError, match="run `dvc repro fetch`"):
        open_manifest(tmp_path)
    folder = run()
    (folder / "source.json").write_text("[]")
    with pytest.raises(RequestError, match=r"source\.json"):
        open_manifest(folder)


# --- archives over HTTP -----------------------------------------------------------------------------------


@pytest.fixture
def archive_server(image_folder, tmp_path, monkeypatch):
    """A server of an archive with COCO's layout, named as val2017.zip in the table of archives."""
    path = tmp_path / "made.zip"
    with zipfile.ZipFile(path, "w") as out:
        for index, name in enumerate(["chelsea.jpg", "coffee.png", "flipped.webp", "nested/turned.JPG"]):
            out.write(image_folder / name, f"val2017/{index:012d}.jpg")
    server = FaultyServer(path.read_bytes())
    made = coco.Archive("val2017.zip", hashlib.md5(server.data).hexdigest(), 4)
    monkeypatch.setitem(coco.SOURCES, "coco2017-val", coco.Source(made, None))
    monkeypatch.setattr(transfer, "sleep", lambda _: None)
    yield server
    server.close()


def test_an_archive_is_downloaded_once_checked_and_read_in_place(run, archive_server, image_folder, tmp_path):
    folder = run(source="coco2017-val", mirror=archive_server.url)
    images = open_manifest(folder)
    entries = [entry for split in ("train", "val", "test") for entry in images.entries(split)]
    assert sorted(entry.name for entry in entries)[0] == "val2017/000000000000.jpg" and len(entries) == 4
    chelsea = next(entry for entry in entries if entry.name.endswith("0.jpg"))
    assert images.read(chelsea) == (image_folder / "chelsea.jpg").read_bytes()
    assert sorted(path.name for path in (tmp_path / "archives").iterdir()) == [
        "val2017.zip",
        "val2017.zip.json",
    ]
    note = json.loads((folder / "source.json").read_text())["containers"]["train"]
    assert note["sha256"] == hashlib.sha256(archive_server.data).hexdigest()
    run(source="coco2017-val", mirror=archive_server.url)
    assert len(archive_server.requests) == 1


def test_a_cut_download_goes_on_where_it_stopped(run, archive_server):
    size = len(archive_server.data)
    archive_server.faults = [size // 100, size // 3]
    run(source="coco2017-val", mirror=archive_server.url)
    assert archive_server.requests[1:] == [f"bytes={size // 100}-", f"bytes={size // 100 + size // 3}-"]
    assert archive_server.sent == size


def test_a_download_that_never_ends_well_keeps_what_it_has(run, archive_server, tmp_path):
    archive_server.faults = [1000] * 50
    with pytest.raises(WorkError, match=r"6000 bytes are kept, run again"):
        run(source="coco2017-val", mirror=archive_server.url)
    archive_server.faults = []
    run(source="coco2017-val", mirror=archive_server.url)
    assert archive_server.sent == len(archive_server.data)


def test_a_wrong_checksum_is_put_aside_and_both_are_named(run, archive_server, tmp_path):
    right = archive_server.data
    archive_server.data = bytes([right[0] ^ 1]) + right[1:]
    with pytest.raises(
        WorkError, match=f"wrong MD5 {hashlib.md5(archive_server.data).hexdigest()}, expected"
    ):
        run(source="coco2017-val", mirror=archive_server.url)
    assert sorted(path.name for path in (tmp_path / "archives").glob("val2017.zip*")) == ["val2017.zip.bad"]
    archive_server.data = right
    run(source="coco2017-val", mirror=archive_server.url)
