"""The stage `fetch`: where images come from, how they are split, and wrong requests."""

import hashlib
import io
import shutil
import zipfile
from pathlib import Path

import cv2
import pytest
from faulty_server import FaultyServer
from made_params import make_tree
from made_scenes import write_model
from reading import read_error, read_json

from pipeline import errors, provenance
from pipeline.errors import RequestError, WorkError
from pipeline.evaluate import metrics
from pipeline.fetch import __main__ as fetch
from pipeline.fetch import coco, dataset
from pipeline.fetch.dataset import open_manifest

SPLITS = ("train", "val", "test")
FOUR = ["chelsea.jpg", "coffee.png", "flipped.webp", "nested/turned.JPG"]  # `image_folder`


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`run(source="folder", ...)` runs the stage in tmp_path and gives the folder it wrote."""

    def run_stage(out="out", mirror="", initial="", allow=False, **changes):
        monkeypatch.setenv(coco.MIRROR, mirror)
        tree = make_tree({})
        tree["fetch"].update(changes)
        tree["train"]["init_from"] = str(initial)
        tree["run"]["allow_training_images"] = allow
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
        paths = {name: str(value) for name, value in changes.items() if isinstance(value, Path)}
        return run(out, source="folder", path=str(path), **{**changes, **paths})

    return run_stage


def names(folder, split):
    return [entry.name for entry in open_manifest(folder).select_entries(split)]


def by_split(folder):
    """The names of each split."""
    return {split: names(folder, split) for split in SPLITS}


def test_the_sample_is_in_the_wheel_and_the_same_request_writes_the_same_bytes(run, tmp_path):
    folder = run()
    expected = {split: sorted(names) for split, names in dataset.SAMPLE.items()}
    assert by_split(folder) == expected
    images = open_manifest(folder)
    assert all(images.read(entry) for entry in images.listed)
    count = read_json(tmp_path / "reports/metrics.json")["train_images"]
    assert count == len(dataset.SAMPLE["train"])
    before = {path.name: path.read_bytes() for path in folder.glob("*.*")}
    assert {path.name: path.read_bytes() for path in run().glob("*.*")} == before


def test_a_folder_stays_where_it_is_and_a_part_is_held_out(run_on, image_folder):
    folder = run_on(image_folder, val_fraction=0.5)
    splits = by_split(folder)
    assert sorted(name for split in splits.values() for name in split) == FOUR
    assert splits["train"] and splits["val"]
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.csv", "source.json"]
    entry = open_manifest(folder).select_entries("train")[0]
    assert open_manifest(folder).read(entry) == (image_folder / entry.name).read_bytes()


def write_photographs(folder, numbers):
    folder.mkdir(exist_ok=True)
    for number in numbers:
        (folder / f"{number:03d}.jpg").write_bytes(f"{number:5000d}".encode())
    return folder


def test_copies_of_a_photograph_share_a_split(run_on, tmp_path):
    folder = write_photographs(tmp_path / "many", range(20))
    for copy in range(60):
        shutil.copyfile(folder / f"{copy % 12:03d}.jpg", folder / f"copy-{copy}.jpg")
    zipped = shutil.make_archive(str(tmp_path / "many"), "zip", folder)
    for path in (folder, zipped):
        images = open_manifest(run_on(path, f"out-{Path(path).name}", val_fraction=0.3))
        crcs = {split: {entry.crc32 for entry in images.select_entries(split)} for split in SPLITS}
        assert sum(map(len, crcs.values())) == len(set().union(*crcs.values())) == 20
        assert min(map(len, crcs.values())) >= 3


def test_a_photograph_in_both_folders_is_held_out(run_on, tmp_path, capsys):
    train = write_photographs(tmp_path / "train", range(20))
    held_out = write_photographs(tmp_path / "held_out", range(16, 30))
    splits = by_split(run_on(train, val_path=held_out))
    assert "fetch: 4 training images left out" in capsys.readouterr().out
    assert splits["train"] == [f"{number:03d}.jpg" for number in range(16)]
    assert len(splits["val"] + splits["test"]) == 14 and splits["val"] and splits["test"]


def test_copies_in_the_folder_of_held_out_photographs_share_a_split(run_on, tmp_path):
    train = write_photographs(tmp_path / "train", range(20))
    held_out = write_photographs(tmp_path / "held_out", range(30, 36))
    for copy in range(30):
        shutil.copyfile(held_out / f"{30 + copy % 6:03d}.jpg", held_out / f"copy-{copy}.jpg")
    images = open_manifest(run_on(train, val_path=held_out))
    crcs = [{entry.crc32 for entry in images.select_entries(split)} for split in ("val", "test")]
    assert list(map(len, crcs)) == [3, 3] and not crcs[0] & crcs[1]


@pytest.mark.parametrize(
    "count, least", [(2, 1), (3, 1), (12, 6), (24, 12), (30, 12), (60, 12), (400, 32)]
)
def test_a_small_set_holds_out_enough_to_judge_by(run_on, tmp_path, count, least):
    folder = run_on(write_photographs(tmp_path / "few", range(count)), val_fraction=0.2)
    counts = {split: len(split_names) for split, split_names in by_split(folder).items()}
    assert sum(counts.values()) == count and counts["val"] + counts["test"] >= least
    assert counts["val"] >= max(least // 2, 1) and counts["train"] >= 1
    assert counts["test"] >= least // 2


# What would stop the training or the evaluation after hours


def test_the_fewest_test_images_are_those_that_give_an_interval():
    assert fetch.MIN_TEST_IMAGES == metrics.MIN_SCENES


@pytest.mark.parametrize("count, test_count", [(21, 5), (24, 6)])
def test_too_few_test_images_are_reported(run_on, tmp_path, capsys, count, test_count):
    folder = run_on(write_photographs(tmp_path / "few", range(count)), val_fraction=0.2)
    assert len(names(folder, "test")) == test_count
    assert ("5 test images" in capsys.readouterr().out) == (test_count == 5)


@pytest.fixture
def of_coco(tmp_path):
    """`of_coco(folder)`: forty photographs there, with the names of COCO's 1, 2, ..."""

    def write(folder):
        (tmp_path / folder).mkdir()
        for number in range(1, 41):
            path = tmp_path / folder / f"{number:012d}.jpg"
            path.write_bytes(f"{number:5000d}".encode())
        return tmp_path / folder

    return write


@pytest.fixture
def trained_on(tmp_path):
    """`trained_on(numbers)`: a model that was trained on these photographs of COCO."""

    def write(numbers):
        file = write_model(tmp_path / "initial.safetensors")
        provenance.write_photographs(file, map(str, numbers))
        return file

    return write


def test_held_out_images_that_the_initial_weights_know_are_reported(
    run_on, tmp_path, of_coco, trained_on, capsys
):
    folder = of_coco("train2017")
    splits = by_split(run_on(folder, val_fraction=0.5))
    tested = [int(name[:12]) for name in splits["test"]]
    capsys.readouterr()
    # all test images but three
    model = trained_on(tested[3:])
    run_on(folder, val_fraction=0.5, initial=model)
    printed = capsys.readouterr().out
    assert f"test images: {len(tested) - 3} of {len(tested)} photographs" in printed
    assert "3 test images" in printed
    # all are allowed
    run_on(folder, val_fraction=0.5, initial=model, allow=True)
    assert "3 test images" not in capsys.readouterr().out


@pytest.mark.parametrize("split, title", [("val", "validation"), ("test", "test")])
def test_a_training_that_would_have_no_image_to_judge_by_ends_before_it_begins(
    run_on, tmp_path, of_coco, trained_on, split, title
):
    folder = of_coco("train2017")
    trained = [int(name[:12]) for name in by_split(run_on(folder, val_fraction=0.5))[split]]
    model = trained_on(trained)
    with pytest.raises(RequestError, match=f"{len(trained)} {title} photographs"):
        run_on(folder, "new", val_fraction=0.5, initial=model)
    assert not (tmp_path / "new/manifest.csv").exists()
    assert run_on(folder, "new", val_fraction=0.5, initial=model, allow=True).is_dir()


def test_frames_of_a_video_are_no_photographs_of_coco_and_are_reported(
    run_on, of_coco, trained_on, capsys
):
    folder = run_on(of_coco("video"), val_fraction=0.5, initial=trained_on(range(1, 41)))
    printed = capsys.readouterr().out
    images = open_manifest(folder)
    for split, title in (("val", "validation"), ("test", "test")):
        count = len(images.select_entries(split))
        assert f"{title} images: {count} of {count} " in printed
    assert "left out" not in printed
    assert {images.identify_photograph(entry) for entry in images.listed} == {
        f"{entry.crc32}-5000" for entry in images.listed
    }


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


def test_an_incomplete_folder_of_images_is_named(run):
    folder = run()
    (folder / "source.json").unlink()
    with pytest.raises(RequestError, match=r"source\.json"):
        open_manifest(folder)


# --- archives over HTTP


def serve_val2017(path, count, monkeypatch):
    """A server of a zip of `count` images, named as val2017.zip in the table of archives."""
    server = FaultyServer(path.read_bytes())
    md5 = hashlib.md5(server.data).hexdigest()
    archive = coco.Archive("val2017.zip", md5, count, len(server.data))
    monkeypatch.setitem(coco.SOURCES, "coco2017-val", [archive])
    return server


@pytest.fixture
def archive_server(image_folder, tmp_path, monkeypatch):
    """A server of four photographs as val2017.zip."""
    path = tmp_path / "made.zip"
    with zipfile.ZipFile(path, "w") as out:
        for index, name in enumerate(FOUR):
            out.write(image_folder / name, f"val2017/{index:012d}.jpg")
    server = serve_val2017(path, 4, monkeypatch)
    monkeypatch.setattr(coco, "sleep", lambda _: None)
    yield server
    server.close()


def test_an_archive_is_downloaded_once_and_read_in_place(run, archive_server, image_folder):
    for _ in range(2):
        images = open_manifest(run(source="coco2017-val", mirror=archive_server.url))
        for entry in images.listed:
            assert images.read(entry) == (image_folder / FOUR[int(entry.name[-5])]).read_bytes()
    assert len(archive_server.requests) == 1 and len(images.listed) == 4


def test_a_small_limit_takes_single_images_out_of_the_remote_zip(run, tmp_path, monkeypatch, photo):
    """2 of 40 images for training and 2 held out: a part of the archive crosses the network."""
    pictures = [cv2.imencode(".png", photo[i : i + 300])[1].tobytes() for i in range(40)]
    with zipfile.ZipFile(tmp_path / "made.zip", "w") as out:
        for index, data in enumerate(pictures):
            kind = zipfile.ZIP_DEFLATED if index % 2 else zipfile.ZIP_STORED
            out.writestr(zipfile.ZipInfo(f"val2017/{index:012d}.png"), data, kind)
    server = serve_val2017(tmp_path / "made.zip", 40, monkeypatch)
    server.faults = ["503", 100, None, 5000]
    monkeypatch.setattr(coco, "sleep", lambda _: None)
    folder = run(source="coco2017-val", mirror=server.url, limit=2)
    images = open_manifest(folder)
    assert [len(split_names) for split_names in by_split(folder).values()] == [2, 1, 1]
    for entry in images.listed:
        assert images.read(entry) == pictures[int(entry.name[-10:-4])]
    assert server.sent < 0.2 * len(server.data)
    assert (tmp_path / "archives/val2017.part-of.zip").is_file()
    before = (folder / "manifest.csv").read_bytes()
    sent = server.sent
    assert (
        run(source="coco2017-val", mirror=server.url, limit=2) / "manifest.csv"
    ).read_bytes() == before
    assert server.sent - sent < 80_000  # the directory
    server.close()


def test_a_wrong_byte_in_a_part_is_an_error(run, archive_server):
    archive_server.data = archive_server.data.replace(b"\xff\xd8\xff", b"\xff\xd8\xfe")
    with pytest.raises(WorkError, match="CRC-32"):
        run(source="coco2017-val", mirror=archive_server.url, limit=1, val_fraction=0.0)


def test_archives_on_the_disk_are_not_downloaded(run, archive_server, tmp_path):
    """As a zip or a folder, at fetch.path, in it, or in its folder images."""
    coco_folder = tmp_path / "coco"
    (coco_folder / "images").mkdir(parents=True)
    zip_path = coco_folder / "val2017.zip"
    zip_path.write_bytes(archive_server.data)
    with zipfile.ZipFile(zip_path) as zipped:
        zipped.extractall(coco_folder / "images")
    # Other photographs beside them are not taken.
    shutil.copytree(coco_folder / "images/val2017", coco_folder / "images/train2017")
    shutil.copytree(coco_folder / "images/val2017", coco_folder / "val2014")
    offline = {"source": "coco2017-val", "mirror": "http://127.0.0.1:9"}
    from_zip = run("a", path=str(coco_folder), **offline)
    at_path = run("b", path=str(zip_path), **offline)
    assert (from_zip / "manifest.csv").read_bytes() == (at_path / "manifest.csv").read_bytes()
    expected = by_split(from_zip)
    zip_path.unlink()
    assert sum(map(len, expected.values())) == 4
    for path in (coco_folder, coco_folder / "images", coco_folder / "images/val2017"):
        images = open_manifest(run("c", path=str(path), **offline))
        assert by_split(tmp_path / "c") == expected
        entry = images.listed[0]
        assert images.read(entry) == (coco_folder / "images" / entry.name).read_bytes()


def test_a_part_of_an_archive_is_refused_without_a_limit(run, archive_server, tmp_path):
    folder = tmp_path / "coco/val2017"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(io.BytesIO(archive_server.data)) as zipped:
        for name in zipped.namelist()[:3]:
            zipped.extract(name, tmp_path / "coco")
    request = {"source": "coco2017-val", "path": str(tmp_path / "coco")}
    with pytest.raises(RequestError, match=r"coco.*: 3 images.*4.*fetch\.limit"):
        run(**request)
    assert len(open_manifest(run(**request, limit=3)).listed) == 3


# --- wrong requests

OWN = {"source": "folder", "path": "ours"}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({**OWN, "path": "copies"}, "copies"),
        ({**OWN, "val_path": "held"}, "ours"),  # all photographs are held out
        ({**OWN, "initial": "lost.safetensors"}, "lost.safetensors"),
        ({"source": "coco2017", "path": "coco"}, "val2017"),
    ],
)
def test_a_wrong_request_names_the_file(
    run, image_folder, tmp_path, monkeypatch, capsys, changes, name
):
    monkeypatch.chdir(tmp_path)
    train2017 = coco.TRAIN2017._replace(images=4)
    monkeypatch.setitem(coco.SOURCES, "coco2017", [train2017, coco.VAL2017])
    for folder in ("ours", "held"):
        write_photographs(tmp_path / folder, range(20))
    write_photographs(tmp_path / "copies", [1])
    shutil.copy("copies/001.jpg", "copies/002.jpg")
    shutil.copytree(image_folder, "coco/train2017")
    assert errors.run(lambda _: run(**changes)) == 2
    assert name in read_error(capsys) and not Path("out/manifest.csv").exists()
