"""COLMAP databases: a new one as COLMAP's importer writes it, and matches of an existing one."""

import contextlib
import sqlite3
from pathlib import Path

import cv2
import numpy as np
import PIL.Image
import pytest
from made_scenes import TURN
from PIL.TiffImagePlugin import IFDRational

from superglue_sift import Features, RequestError
from superglue_sift.apps import cli
from superglue_sift.features import sift
from superglue_sift.features.sift import root_sift_of
from superglue_sift.geometry import two_view
from superglue_sift.interop.colmap import CENTRE

pycolmap = pytest.importorskip("pycolmap")

NAMES = ("a.png", "b.png", "c.png")
WORDS = ["--device", "cpu", "--no-scene"]


@pytest.fixture(scope="module")
def extracted(photo, tmp_path_factory):
    """COLMAP's SIFT of a photograph, of a turned view of it, and of a part of it."""
    folder = tmp_path_factory.mktemp("stored")
    views = (photo, cv2.warpPerspective(photo, TURN, (600, 400)), photo[:300, :400])
    (folder / "photos").mkdir()
    for name, view in zip(NAMES, views):
        cv2.imwrite(str(folder / "photos" / name), view)
    path = folder / "made.db"
    device = pycolmap.Device.cpu
    pycolmap.extract_features(str(path), str(folder / "photos"), device=device)
    return path


@pytest.fixture
def database(extracted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("x.db")
    path.write_bytes(extracted.read_bytes())
    return path


def run(*words):
    """Match a database, or only look at it."""
    return cli.main(["--colmap", "x.db", *words])


def opened(path="x.db"):
    return pycolmap.Database.open(str(path))


def read(path, name):
    """Keypoints and descriptors of an image, as COLMAP has them."""
    with opened(path) as content:
        number = content.read_image_with_name(name).image_id
        return content.read_keypoints(number), content.read_descriptors(number).data


def test_its_keypoints_are_those_of_opencv(extracted, photo):
    keypoints, descriptors = read(extracted, "a.png")
    stored = Features.of_colmap(keypoints, descriptors, (600, 400)).records
    opencv = sift.extract(photo, 500)
    # The nearest keypoint of the database by place, scale and angle
    far = np.hypot(stored["x"][:, None] - opencv["x"], stored["y"][:, None] - opencv["y"])
    far += np.abs(np.log(stored["scale"][:, None] / opencv["scale"]))
    far += np.abs((stored["angle"][:, None] - opencv["angle"] + 180) % 360 - 180) / 20
    nearest = np.argmin(far, axis=0)
    same = far.min(axis=0) < 0.5
    assert same.mean() > 0.75  # COLMAP finds none below a contrast of 0.02
    cosines = root_sift_of(stored["descriptor"][nearest]) * root_sift_of(opencv["descriptor"])
    assert np.median(cosines.sum(1)[same]) > 0.99
    four = np.column_stack([keypoints[:, :2], stored["scale"] / 2, np.deg2rad(stored["angle"])])
    again = Features.of_colmap(four, descriptors, (600, 400)).records
    for name in sift.KEYPOINT.names or ():
        np.testing.assert_allclose(again[name], stored[name], rtol=1e-4, atol=1e-2)


def test_only_pairs_without_matches_are_added(database, capsys):
    before = np.array([[0, 0], [1, 2]], np.uint32)
    with opened() as content:
        numbers = [content.read_image_with_name(name).image_id for name in NAMES]
        content.write_matches(numbers[0], numbers[2], before)
    assert run("--dry-run") == 0
    assert "3 images with features, 3 pairs, 2 of them without" in capsys.readouterr().out
    assert run(*WORDS) == 0
    with opened() as content:
        assert np.array_equal(content.read_matches(numbers[0], numbers[2]), before)
        matches = content.read_matches(numbers[0], numbers[1])
        verified = content.read_two_view_geometry(numbers[0], numbers[1]).inlier_matches
    points = [read(database, name)[0][:, :2] - CENTRE for name in NAMES]
    moved = two_view.transform(points[0][matches[:, 0]].astype(float), TURN)
    right = np.linalg.norm(moved - points[1][matches[:, 1]], axis=1) < 3
    assert len(matches) > 100 and right.mean() > 0.9
    assert len(verified) > 0.8 * len(matches)
    assert run(*WORDS) == 0
    assert "nothing is written" in capsys.readouterr().out


def test_a_pair_is_written_whole_or_not_at_all(database, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as stopped:
        stopped.setattr(pycolmap, "estimate_two_view_geometry", stop)
        with pytest.raises(KeyboardInterrupt):
            run(*WORDS)
    with opened() as content:
        assert content.num_matched_image_pairs() == 0
    assert run(*WORDS) == 0
    with opened() as content:
        assert content.num_verified_image_pairs() == content.num_matched_image_pairs() == 3


def test_a_rejected_pair_is_not_tried_again(database, capsys):
    words = ["--device", "cpu", "--accept", "1"]
    assert run(*words) == 0
    assert "3 pairs matched, 0 of them with matches" in capsys.readouterr().out
    assert run(*words) == 0
    assert "0 of them without matches" in capsys.readouterr().out


def change(path, *commands):
    with contextlib.closing(sqlite3.connect(path)) as content, content:
        for command in commands:
            content.execute(command)


def test_images_without_features_are_named_and_left_out(database, capsys):
    change(database, "DELETE FROM descriptors WHERE image_id = 2")
    assert run("--dry-run") == 0
    said = capsys.readouterr()
    assert "2 images with features, 1 pairs" in said.out
    assert said.err.count("left out: ") == 1


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("DELETE FROM descriptors", "x.db: has no features; run colmap feature_extractor"),
        ("UPDATE descriptors SET type = 2", "has descriptors of ALIKED_N32"),
    ],
)
def test_what_cannot_be_matched_is_said_in_one_line(database, command, said):
    change(database, "PRAGMA foreign_keys = OFF", command)
    with pytest.raises(RequestError, match=said):
        run(*WORDS)


def test_no_database_and_a_locked_one_are_said_in_one_line(database):
    with pytest.raises(RequestError, match=r"y\.db: no such database"):
        cli.main(["--colmap", "y.db"])
    Path("z.db").write_text("photographs" * 999)
    with pytest.raises(RequestError, match=r"z\.db: is not a database"):
        cli.main(["--colmap", "z.db"])
    with contextlib.closing(sqlite3.connect(database)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(RequestError, match="another program writes it"):
            run(*WORDS)


# a new database


def save_photos(folder, photo, ending=".jpg", exif=None):
    """Three overlapping views, one of them in a folder."""
    (folder / "photos/more").mkdir(parents=True)
    for name, left in (("0", 0), ("1", 60), ("more/2", 120)):
        crop = np.ascontiguousarray(photo[:, left : left + 420])
        options = {"exif": exif} if exif else {}
        PIL.Image.fromarray(crop).save(folder / f"photos/{name}{ending}", **options)


def exif_of_a_drone():
    """A camera with its focal length, at 47 degrees north and 8 degrees east, 123 m high."""
    exif = PIL.Image.Exif()
    exif[0x010F], exif[0x0110] = "Maker", "Model"
    exif.get_ifd(0x8769).update({0x920A: IFDRational(361, 100), 0xA405: 20})
    zero = IFDRational(0)
    north, east = (IFDRational(47), zero, zero), (IFDRational(8), zero, zero)
    gps = {1: "N", 2: north, 3: "E", 4: east, 5: b"\0", 6: IFDRational(123)}
    exif.get_ifd(0x8825).update(gps)
    return exif


def read_new(path):
    """Names of the images of each camera, and positions by GPS, of a database."""
    with opened(path) as content:
        cameras = {}
        for image in content.read_all_images():
            cameras.setdefault(image.camera_id, []).append(image.name)
        priors = [prior.position.ravel().tolist() for prior in content.read_all_pose_priors()]
        return sorted(map(sorted, cameras.values())), priors


SMALL = "--out-dir found --no-scene --max-keypoints 300 --device cpu"


@pytest.mark.parametrize(
    "words, cameras",
    [
        ("", [["0.jpg", "1.jpg", "more/2.jpg"]]),
        ("--camera-per folder", [["0.jpg", "1.jpg"], ["more/2.jpg"]]),
        ("--camera-per image", [["0.jpg"], ["1.jpg"], ["more/2.jpg"]]),
    ],
)
def test_cameras_and_positions_are_those_of_colmaps_importer(
    photo, tmp_path, monkeypatch, words, cameras
):
    monkeypatch.chdir(tmp_path)
    save_photos(tmp_path, photo, exif=exif_of_a_drone())
    assert cli.main(f"photos {SMALL} --colmap x.db {words}".split()) == 0
    assert read_new("x.db") == (cameras, [[47.0, 8.0, 123.0]] * 3)
    with opened("x.db") as content:
        assert content.num_rigs() == len(cameras) and content.num_frames() == 3
        assert content.num_keypoints() == 900 and content.num_matched_image_pairs() == 3
    if not words:
        device = pycolmap.Device.cpu
        pycolmap.extract_features("own.db", "photos", device=device)
        assert read_new("own.db") == read_new("x.db")


def test_without_exif_each_photograph_has_a_camera_and_a_pair_in_both_orders_is_one(
    photo, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    save_photos(tmp_path, photo)
    Path("pairs.txt").write_text("0.jpg more/2.jpg\nmore/2.jpg 0.jpg\n0.jpg 1.jpg\n")
    assert cli.main(f"--pairs pairs.txt --root photos {SMALL} --colmap x.db".split()) == 0
    assert read_new("x.db") == ([["0.jpg"], ["1.jpg"], ["more/2.jpg"]], [])
    with opened("x.db") as content:
        assert content.num_matched_image_pairs() == 2 and content.num_matches() > 100


def test_photographs_that_colmap_cannot_read_are_refused_before_any_work(
    photo, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    save_photos(tmp_path, photo, ".webp")
    with pytest.raises(RequestError, match=r"0\.webp and 2 more: COLMAP cannot read the file"):
        cli.main(f"photos {SMALL} --colmap x.db".split())
    assert not list(Path("found").glob("*.npz"))
