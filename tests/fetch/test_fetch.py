"""The stage `fetch`: sources, dataset, what it writes, and what it says when the request is
wrong.
"""

import hashlib
import json
import shutil
import unicodedata
import zipfile
from pathlib import Path

import cv2
import pytest
from faulty_server import FaultyServer
from made_params import file_of
from reading import read_json

from pipeline.errors import RequestError, WorkError
from pipeline.fetch import __main__ as fetch
from pipeline.fetch import coco, dataset
from pipeline.fetch.dataset import open_container, open_manifest

SPLITS = ("train", "val", "test")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`run(source="folder", ...)` runs the stage in tmp_path and gives the folder it wrote."""

    def run_stage(out="out", mirror="", **changes):
        monkeypatch.setenv(coco.MIRROR, mirror)
        tree = file_of({})
        tree["fetch"].update(changes)
        for section in ("keypoints", "evaluate"):  # the smallest photographs that are allowed
            tree[section].update(width=64, height=64)
        sections = fetch.params.parse(tree, "params")
        monkeypatch.setattr(fetch.params, "load", lambda *_: sections)
        arguments = ["--out", str(tmp_path / out), "--archives", str(tmp_path / "archives")]
        assert fetch.main([*arguments, "--reports", str(tmp_path / "reports")]) == 0
        return tmp_path / out

    return run_stage


@pytest.fixture
def run_on(run):
    """`run_on(path, ...)`: the same with one's own photographs."""

    def run_stage(path, out="out", **changes):
        given = {name: str(value) for name, value in changes.items() if isinstance(value, Path)}
        return run(out, source="folder", path=str(path), **{**changes, **given})

    return run_stage


def names(folder, split):
    return [entry.name for entry in open_manifest(folder).entries(split)]


def by_split(folder):
    """The names of each split."""
    return {split: names(folder, split) for split in SPLITS}


def all_entries(images):
    return [entry for split in SPLITS for entry in images.entries(split)]


def test_the_sample_is_in_the_wheel_and_the_same_request_writes_the_same_bytes(run, tmp_path):
    folder = run()
    assert by_split(folder) == {key: sorted(each) for key, each in dataset.SAMPLE.items()}
    images = open_manifest(folder)
    assert all(images.read(entry) for entry in images.listed)
    count = read_json(tmp_path / "reports/metrics.json")["train_images"]
    assert count == len(dataset.SAMPLE["train"])
    (folder / "sample/stale.png").write_bytes(b"x")
    before = {path.name: path.read_bytes() for path in folder.glob("*.*")}
    assert {path.name: path.read_bytes() for path in run().glob("*.*")} == before
    assert not (folder / "sample/stale.png").exists()


def test_a_folder_stays_where_it_is_and_a_part_is_held_out(run_on, image_folder):
    folder = run_on(image_folder, val_fraction=0.5, test_fraction=0.5)
    found = by_split(folder)
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


def write_photographs(folder, numbers):
    folder.mkdir(exist_ok=True)
    for number in numbers:
        (folder / f"{number:03d}.jpg").write_bytes(f"{number:5000d}".encode())
    return folder


def test_copies_of_a_photograph_share_a_split(run_on, tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "require_usable", lambda *_: None)
    folder = write_photographs(tmp_path / "many", range(20))
    for copy in range(60):
        shutil.copyfile(folder / f"{copy % 12:03d}.jpg", folder / f"copy-{copy}.jpg")
    zipped = shutil.make_archive(str(tmp_path / "many"), "zip", folder)
    for path in (folder, zipped):
        images = open_manifest(run_on(path, f"out-{Path(path).name}", val_fraction=0.3))
        found = {split: {entry.crc32 for entry in images.entries(split)} for split in SPLITS}
        assert sum(map(len, found.values())) == len(set().union(*found.values())) == 20
        assert min(map(len, found.values())) >= 3
    only = tmp_path / "copies"
    only.mkdir()
    for copy in range(11):
        shutil.copyfile(folder / "000.jpg", only / f"{copy}.jpg")
    with pytest.raises(
        RequestError, match="copies: 1 different image, and none for val; at least two are needed"
    ):
        run_on(only)


def test_a_photograph_in_both_folders_is_held_out(run_on, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dataset, "require_usable", lambda *_: None)
    ours = write_photographs(tmp_path / "ours", range(20))
    held = write_photographs(tmp_path / "held", range(16, 30))
    found = by_split(run_on(ours, val_path=held, test_fraction=0.5))
    assert "fetch: 4 training images left out: copies of held-out ones" in capsys.readouterr().out
    assert found["train"] == [f"{number:03d}.jpg" for number in range(16)]
    assert len(found["val"] + found["test"]) == 14 and found["val"] and found["test"]
    write_photographs(tmp_path / "held", range(20))
    with pytest.raises(RequestError, match=f"ours: holds only copies of images in {held}"):
        run_on(ours, val_path=held)


@pytest.mark.parametrize("count, least", [(40, 8), (400, 32), (12, 4), (3, 2), (2, 1)])
def test_a_small_set_holds_out_its_fraction(run_on, tmp_path, monkeypatch, count, least):
    monkeypatch.setattr(dataset, "require_usable", lambda *_: None)
    folder = run_on(write_photographs(tmp_path / "few", range(count)), val_fraction=0.2)
    counts = {split: len(found) for split, found in by_split(folder).items()}
    assert sum(counts.values()) == count and counts["val"] + counts["test"] >= least
    assert counts["val"] >= least // 2 and counts["train"] >= 1
    assert 3 * counts["val"] > counts["test"] >= min(least // 2, 16)


def test_a_smaller_limit_takes_a_part_of_a_larger_one(run_on, tmp_path, photo):
    many = tmp_path / "many"
    many.mkdir()
    for index in range(12):
        cv2.imwrite(str(many / f"{index}.png"), photo[index : index + 40, :40])
    large, small = (
        set(names(run_on(many, str(limit), limit=limit, val_fraction=0.3), "train"))
        for limit in (5, 2)
    )
    assert len(small) == 2 and small < large


def test_an_incomplete_output_is_named(run):
    folder = run()
    (folder / "source.json").write_text("[]")
    with pytest.raises(RequestError, match=r"source\.json"):
        open_manifest(folder)


# --- archives over HTTP
# -----------------------------------------------------------------------------------


def serve_val2017(path, count, monkeypatch):
    """A server of a zip of `count` images, named as val2017.zip in the table of archives."""
    server = FaultyServer(path.read_bytes())
    md5 = hashlib.md5(server.data).hexdigest()
    made = coco.Archive("val2017.zip", md5, count, len(server.data))
    monkeypatch.setitem(coco.SOURCES, "coco2017-val", [made])
    return server


@pytest.fixture
def archive_server(image_folder, tmp_path, monkeypatch):
    """A server of four photographs as val2017.zip."""
    path = tmp_path / "made.zip"
    with zipfile.ZipFile(path, "w") as out:
        for index, name in enumerate(
            ["chelsea.jpg", "coffee.png", "flipped.webp", "nested/turned.JPG"]
        ):
            out.write(image_folder / name, f"val2017/{index:012d}.jpg")
    server = serve_val2017(path, 4, monkeypatch)
    monkeypatch.setattr(coco, "sleep", lambda _: None)
    yield server
    server.close()


def test_an_archive_is_downloaded_once_checked_and_read_in_place(run, archive_server, image_folder):
    folder = run(source="coco2017-val", mirror=archive_server.url)
    images = open_manifest(folder)
    entries = all_entries(images)
    assert (
        sorted(entry.name for entry in entries)[0] == "val2017/000000000000.jpg"
        and len(entries) == 4
    )
    chelsea = next(entry for entry in entries if entry.name.endswith("0.jpg"))
    assert images.read(chelsea) == (image_folder / "chelsea.jpg").read_bytes()
    note = read_json(folder / "source.json")["containers"]["train"]
    assert note["md5"] == hashlib.md5(archive_server.data).hexdigest()
    run(source="coco2017-val", mirror=archive_server.url)
    assert len(archive_server.requests) == 1


def test_a_small_limit_takes_single_images_out_of_the_remote_zip(run, tmp_path, monkeypatch, photo):
    """2 of 40 images for training and 2 held out: a few per cent of the archive cross the
    network.
    """
    pictures = [cv2.imencode(".png", photo[i : i + 300])[1].tobytes() for i in range(40)]
    with zipfile.ZipFile(tmp_path / "made.zip", "w") as out:
        for index, data in enumerate(pictures):
            kind = zipfile.ZIP_DEFLATED if index % 2 else zipfile.ZIP_STORED
            out.writestr(zipfile.ZipInfo(f"val2017/{index:012d}.png"), data, kind)
    server = serve_val2017(tmp_path / "made.zip", 40, monkeypatch)
    server.faults = ["503", 100, None, 5000]
    folder = run(source="coco2017-val", mirror=server.url, limit=2)
    images = open_manifest(folder)
    assert [len(found) for found in by_split(folder).values()] == [2, 1, 1]
    for entry in all_entries(images):
        assert images.read(entry) == pictures[int(entry.name[-10:-4])]
    assert server.sent < 0.2 * len(server.data)
    assert (tmp_path / "archives/val2017.part-of.zip").is_file()
    before = (folder / "manifest.csv").read_bytes()
    sent = server.sent
    assert (
        run(source="coco2017-val", mirror=server.url, limit=2) / "manifest.csv"
    ).read_bytes() == before
    assert server.sent - sent < 4000  # the directory
    server.close()


def test_a_wrong_byte_in_a_part_is_found(run, archive_server):
    archive_server.data = archive_server.data.replace(b"\xff\xd8\xff", b"\xff\xd8\xfe")
    with pytest.raises(WorkError, match="wrong CRC-32"):
        run(source="coco2017-val", mirror=archive_server.url, limit=1, val_fraction=0.0)


def test_archives_that_are_here_are_not_downloaded(run, archive_server, tmp_path):
    given = tmp_path / "given"
    given.mkdir()
    (given / "val2017.zip").write_bytes(archive_server.data)
    folder = run("a", source="coco2017-val", path=str(given), mirror="http://127.0.0.1:9")
    again = run(
        "b", source="coco2017-val", path=str(given / "val2017.zip"), mirror="http://127.0.0.1:9"
    )
    assert (folder / "manifest.csv").read_bytes() == (again / "manifest.csv").read_bytes()
    expected = by_split(folder)
    with zipfile.ZipFile(given / "val2017.zip") as zipped:
        zipped.extractall(given)
    (given / "val2017.zip").unlink()
    unpacked = run("c", source="coco2017-val", path=str(given), mirror="http://127.0.0.1:9")
    assert by_split(unpacked) == expected
    entry = open_manifest(unpacked).entries("train")[0]
    assert open_manifest(unpacked).read(entry) == (given / entry.name).read_bytes()


@pytest.mark.parametrize("path", ["coco", "coco/train2017", "train2017.zip", "layout"])
def test_training_images_are_never_the_held_out_ones(run, image_folder, tmp_path, path):
    shutil.copytree(image_folder, tmp_path / "coco/train2017")
    shutil.make_archive(str(tmp_path / "train2017"), "zip", image_folder)
    for name in ("train2017", "val2017"):  # in images/, as other projects want them
        shutil.copytree(image_folder, tmp_path / "layout/images" / name)
    with pytest.raises(RequestError, match="must hold train2017 and val2017"):
        run(source="coco2017", path=str(tmp_path / path))


def test_files_of_equal_size_and_end_are_no_copies(tmp_path, photo):
    """Uncompressed photographs of one size, with a white line below."""
    for number in range(3):
        picture = photo[number : number + 200, :300].copy()
        picture[-10:] = 255
        assert cv2.imwrite(str(tmp_path / f"{number}.bmp"), picture)
    assert len(set(open_container(tmp_path).contents.values())) == 3


def test_lists_of_windows_and_of_a_mac(image_folder, tmp_path):
    (image_folder / "chelsea.jpg").rename(image_folder / "café.jpg")
    decomposed = unicodedata.normalize("NFD", "café.jpg")
    text = f"nested\\turned.JPG\r\n  # one\r\n\r\n{decomposed}\r\n"
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-16-le"):
        (tmp_path / "list.txt").write_bytes(text.encode(encoding))
        found = open_container(tmp_path / "list.txt", str(image_folder)).names
        assert found == ["café.jpg", "nested/turned.JPG"]


def test_a_folder_of_an_own_zip_and_a_list(run_on, image_folder, tmp_path, monkeypatch):
    # Which are chosen, not whether they suffice
    monkeypatch.setattr(dataset, "_require_some", lambda *_: None)
    with zipfile.ZipFile(tmp_path / "own.zip", "w") as out:
        for path in image_folder.rglob("*.*"):
            out.write(path, path.relative_to(image_folder).as_posix())
    every = {"chelsea.jpg", "coffee.png", "flipped.webp", "nested/turned.JPG"}

    def chosen(path, **options):
        return {entry.name for entry in all_entries(open_manifest(run_on(path, **options)))}

    assert chosen(tmp_path / "own.zip") == every
    listed = tmp_path / "list.txt"
    for root in (image_folder, tmp_path / "own.zip"):
        listed.write_text("# mine\nchelsea.jpg\n\nnested/turned.JPG\nchelsea.jpg\n")
        assert chosen(listed, root=root) == {"chelsea.jpg", "nested/turned.JPG"}
    # whole paths, which count from anywhere above them
    listed.write_text("".join(f"{image_folder / name}\n" for name in every))
    whole = {f"/{name}" for name in chosen(listed, root="/")}
    assert whole == {f"{image_folder}/{name}" for name in every}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize(
    "images",
    [
        [{"id": 1, "file_name": "café.jpg"}, {"id": "b", "file_name": "nested/turned.JPG"}],
        # LVIS; Label Studio on Windows, and of uploads; a Mac; others without folder or id
        [{"coco_url": "http://x.org/train2017/caf%C3%A9.jpg"}, {"file_name": "nested\\turned.JPG"}],
        [{"file_name": "../../data/upload/1/café.jpg"}, {"file_name": "/data/turned.JPG"}],
        [{"file_name": unicodedata.normalize("NFD", "café.jpg")}, {"file_name": "turned.JPG"}],
    ],
)
def test_annotations_of_other_programs(image_folder, tmp_path, images, encoding):
    (image_folder / "chelsea.jpg").rename(image_folder / "café.jpg")
    shutil.make_archive(str(tmp_path / "zipped"), "zip", image_folder)
    content = {"images": images, "categories": [{"id": 1, "name": 7}], "info": None}
    boxes = tmp_path / "instances.json"
    boxes.write_text(json.dumps(content, ensure_ascii=False), encoding=encoding)
    for root in (image_folder, tmp_path / "zipped.zip"):
        assert open_container(boxes, str(root)).names == ["café.jpg", "nested/turned.JPG"]


@pytest.mark.parametrize(
    "name, text, options, said",
    [
        ("list.txt", "../secret.jpg\n", {}, "'../secret.jpg' leads outside"),
        ("list.txt", "/secret.jpg\n", {}, "'/secret.jpg' leads outside"),
        ("list.txt", "\n", {}, "holds no images"),
        ("list.txt", "a.jpg\n", {}, r"'a\.jpg' is not in .* set fetch\.root"),
        ("list.txt", "a.jpg\n", {"root": "nowhere"}, "nowhere: no such folder"),
        ("list.txt", "a\0b", {}, "is not a text file"),
        ("boxes.json", {"images": [{"id": 1}]}, {}, "each with a `file_name`"),
        ("boxes.json", [], {}, "not a COCO annotation file"),
        ("x.pdf", "x", {}, r"must be a folder, a \.zip"),
    ],
)
def test_wrong_lists_and_annotations_are_named(
    run_on, image_folder, tmp_path, name, text, options, said
):
    (tmp_path / name).write_text(text if isinstance(text, str) else json.dumps(text))
    with pytest.raises(RequestError, match=said):
        run_on(tmp_path / name, **{"root": image_folder, **options})
