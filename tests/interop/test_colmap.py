"""COLMAP databases: a new one as COLMAP's importer writes it, and matches of an existing one."""

import contextlib
import sqlite3
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import PIL.Image
import pytest
from made_matches import make_track_pair, view_surface
from made_pairs import make_features_at
from made_scenes import TURN
from PIL.TiffImagePlugin import IFDRational
from reading import read_error

from superglue_sift import Features, RequestError, errors
from superglue_sift.apps import cli
from superglue_sift.apps.store import PhotoFile
from superglue_sift.features import sift
from superglue_sift.features.descriptors import to_root_sift
from superglue_sift.features.nearest import match_by_ratio
from superglue_sift.geometry import two_view
from superglue_sift.geometry.tracks import refine_tracks
from superglue_sift.interop import colmap
from superglue_sift.interop.colmap import CENTER
from superglue_sift.match_result import MatchResult
from superglue_sift.matches import Matches

pycolmap = pytest.importorskip("pycolmap")

NAMES = ("a.png", "b.png", "c.png")


def open_database(path="x.db"):
    return pycolmap.Database.open(str(path))


def run(words):
    return cli.main([*words.split(), "--device", "cpu"])


@pytest.fixture(scope="module")
def extracted(photo, turned, tmp_path_factory):
    """COLMAP's SIFT of a photograph, of a turned view of it, and of a part of it."""
    folder = tmp_path_factory.mktemp("stored")
    views = photo, turned, photo[:300, :400]
    (folder / "photos").mkdir()
    for name, view in zip(NAMES, views):
        cv2.imwrite(str(folder / "photos" / name), view)
    path = folder / "made.db"
    pycolmap.extract_features(str(path), str(folder / "photos"), device=pycolmap.Device.cpu)
    return path


@pytest.fixture
def database(extracted, tmp_path, monkeypatch):
    """A function that changes a copy, x.db in the working folder, by SQL."""
    monkeypatch.chdir(tmp_path)
    Path("x.db").write_bytes(extracted.read_bytes())

    def change(command):
        with contextlib.closing(sqlite3.connect("x.db")) as content, content:
            content.execute("PRAGMA foreign_keys = OFF")
            content.execute(command)

    return change


def test_keypoints_of_colmap_are_those_of_opencv(extracted, photo):
    with open_database(extracted) as content:
        number = content.read_image_with_name("a.png").image_id
        keypoints = content.read_keypoints(number)
        descriptors = content.read_descriptors(number).data
    stored = Features.of_colmap(keypoints, descriptors, (600, 400))
    opencv = sift.extract(photo, 500)
    indices = match_by_ratio(stored, opencv).indices
    colmaps, opencvs = (view.select(index) for view, index in zip((stored, opencv), indices.T))
    is_same = np.linalg.norm(colmaps.keypoints - opencvs.keypoints, axis=1) < 0.5
    is_same &= np.abs(colmaps.scales / opencvs.scales - 1) < 0.1
    is_same &= np.cos(np.deg2rad(colmaps.oris[:, 0] - opencvs.oris[:, 0])) > 0.98
    assert is_same.sum() > 375  # COLMAP finds none below a contrast of 0.02
    roots = [to_root_sift(features.descriptors[:, 0]) for features in (colmaps, opencvs)]
    cosines = (roots[0] * roots[1]).sum(1)
    assert np.median(cosines) > 0.99
    # Keypoints without an affine shape
    columns = np.column_stack([keypoints[:, :2], stored.scales / 2, np.deg2rad(stored.oris)])
    without_shape = Features.of_colmap(columns, descriptors, (600, 400))
    for name in ("keypoints", "scales", "oris", "scores", "descriptors"):
        expected = getattr(stored, name)
        np.testing.assert_allclose(getattr(without_shape, name), expected, rtol=1e-4, atol=1e-2)


def test_only_pairs_without_matches_are_added(database, capsys):
    before = np.array([[0, 0], [1, 2]], np.uint32)
    with open_database() as content:
        a, b, c = (content.read_image_with_name(name).image_id for name in NAMES)
        content.write_matches(a, c, before)
    assert run("database x.db --dry-run") == 0
    assert "3 pairs, 2 " in capsys.readouterr().out
    assert run("database x.db --no-scene") == 0
    with open_database() as content:
        assert np.array_equal(content.read_matches(a, c), before)
        matches = content.read_matches(a, b)
        verified = content.read_two_view_geometry(a, b).inlier_matches
        points0, points1 = (
            content.read_keypoints(number)[rows, :2].astype(float) - CENTER
            for number, rows in zip((a, b), matches.T)
        )
    is_right = np.linalg.norm(two_view.transform(points0, TURN) - points1, axis=1) < 3
    assert len(matches) > 100 and is_right.mean() > 0.9
    assert len(verified) > 0.8 * len(matches)


def test_a_pair_is_written_whole_or_not_at_all(database, monkeypatch):
    with monkeypatch.context() as stopped:
        stopped.setattr(pycolmap, "estimate_two_view_geometry", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run("database x.db --no-scene")
    with open_database() as content:
        assert content.num_matched_image_pairs() == 0
    assert run("database x.db --no-scene") == 0
    with open_database() as content:
        assert content.num_verified_image_pairs() == content.num_matched_image_pairs() == 3


def test_a_rejected_pair_is_not_tried_again(database, capsys):
    for counts in ("3 pairs matched, 0 ", "3 pairs, 0 "):
        assert run("database x.db --accept 1") == 0
        assert counts in capsys.readouterr().out


B = "(SELECT image_id FROM images WHERE name = 'b.png')"


@pytest.mark.parametrize(
    "change",
    [
        f"UPDATE descriptors SET type = 2 WHERE image_id = {B}",
        f"UPDATE descriptors SET rows = 9, data = zeroblob(9 * 128) WHERE image_id = {B}",
        f"UPDATE keypoints SET cols = 2, data = zeroblob(rows * 8) WHERE image_id = {B}",
        # Keypoints outside of the image
        "UPDATE cameras SET width = 60 WHERE camera_id ="
        " (SELECT camera_id FROM images WHERE name = 'b.png')",
    ],
)
def test_an_image_whose_features_cannot_be_matched_is_named_and_left_out(database, capsys, change):
    database(change)
    for words, count in (("--dry-run", 0), ("--no-scene", 1)):
        assert errors.run_main(lambda _: run(f"database x.db {words}")) == 1  # noqa: B023
        assert "b.png" in capsys.readouterr().err.splitlines()[-1]
        with open_database() as content:
            assert content.num_matched_image_pairs() == count


@pytest.mark.parametrize(
    "change",
    ["DELETE FROM descriptors", "locked", lambda path: path.write_text("photographs" * 999)],
)
def test_a_database_that_cannot_be_matched_is_named(database, capsys, change):
    with contextlib.closing(sqlite3.connect("x.db")) as connection:
        if change == "locked":
            connection.execute("BEGIN IMMEDIATE")
        elif isinstance(change, str):
            database(change)
        else:
            change(Path("x.db"))
        assert errors.run_main(lambda _: run("database x.db --no-scene")) == 2
    assert "x.db" in read_error(capsys)


def test_a_database_of_superglue_match_is_named_when_it_is_matched_again(save, capsys):
    save()
    assert run(f"folder photos {SMALL}") == 0
    assert errors.run_main(lambda _: run("database x.db")) == 2
    assert "scale" in read_error(capsys)


# a new database


@pytest.fixture
def save(photo, tmp_path, monkeypatch):
    """A function that saves three overlapping views, one of them in a folder."""
    monkeypatch.chdir(tmp_path)

    def views(ending=".jpg", **options):
        Path("photos/more").mkdir(parents=True)
        for name, left in (("0", 0), ("1", 60), ("more/2", 120)):
            crop = np.ascontiguousarray(photo[:, left : left + 420])
            PIL.Image.fromarray(crop).save(f"photos/{name}{ending}", **options)

    return views


def exif_of_a_drone():
    """A camera with its focal length, at 47 degrees north and 8 degrees east, 123 m high."""
    exif = PIL.Image.Exif()
    exif.update({0x010F: "Maker", 0x0110: "Model"})
    exif.get_ifd(0x8769).update({0x920A: IFDRational(361, 100), 0xA405: 20})
    north, east = ((IFDRational(degrees), 0.0, 0.0) for degrees in (47, 8))
    gps = {1: "N", 2: north, 3: "E", 4: east, 5: b"\0", 6: IFDRational(123)}
    exif.get_ifd(0x8825).update(gps)
    return exif


def read_new(path="x.db"):
    """Names of the images of each camera, and positions by GPS, of a database."""
    with open_database(path) as content:
        cameras = {}
        for image in content.read_all_images():
            cameras.setdefault(image.camera_id, []).append(image.name)
        priors = [prior.position.ravel().tolist() for prior in content.read_all_pose_priors()]
        return sorted(map(sorted, cameras.values())), priors


SMALL = "--colmap x.db --out-dir results --no-scene --max-keypoints 200"


@pytest.mark.parametrize(
    "words, cameras",
    [
        ("", [["0.jpg", "1.jpg", "more/2.jpg"]]),
        ("--camera-per folder", [["0.jpg", "1.jpg"], ["more/2.jpg"]]),
        ("--camera-per image", [["0.jpg"], ["1.jpg"], ["more/2.jpg"]]),
    ],
)
def test_cameras_and_positions_are_those_of_colmaps_importer(save, words, cameras):
    save(exif=exif_of_a_drone())
    assert run(f"folder photos {SMALL} {words}") == 0
    assert read_new() == (cameras, [[47.0, 8.0, 123.0]] * 3)
    with open_database() as content:
        assert content.num_rigs() == len(cameras) and content.num_frames() == 3
        assert content.num_keypoints() == 600 and content.num_matched_image_pairs() == 3
    if not words:
        pycolmap.extract_features("colmaps.db", "photos", device=pycolmap.Device.cpu)
        assert read_new("colmaps.db") == read_new()


def test_without_exif_photographs_share_no_camera_and_swapped_pairs_are_matched_once(save):
    save()
    Path("pairs.txt").write_text("0.jpg more/2.jpg\nmore/2.jpg 0.jpg\n0.jpg 1.jpg\n")
    assert run(f"list pairs.txt --root photos {SMALL}") == 0
    assert read_new() == ([["0.jpg"], ["1.jpg"], ["more/2.jpg"]], [])
    with open_database() as content:
        assert content.num_matched_image_pairs() == 2 and content.num_matches() > 100


def test_photographs_that_colmap_cannot_read_are_refused_before_any_work(save):
    save(".webp")
    with pytest.raises(RequestError, match=r"0\.webp"):
        run(f"folder photos {SMALL}")
    assert not list(Path("results").glob("*.npz"))


def test_photographs_of_two_sizes_with_one_camera_are_refused(save):
    save()
    PIL.Image.open("photos/1.jpg").crop((0, 0, 300, 300)).save("photos/1.jpg")
    with pytest.raises(RequestError, match=r"1\.jpg"):
        run(f"folder photos {SMALL} --camera-per folder")


def test_two_photographs_with_one_logo_have_no_geometry(photo, tmp_path, monkeypatch):
    """Their matches of the logo agree exactly, but COLMAP's mapper must not use them."""
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    logo = cv2.resize(photo[100:300, 200:500], (450, 40))
    for name, place in (("0", photo[:, :500]), ("1", photo[::-1, 500:0:-1])):
        image = cv2.GaussianBlur(place, (0, 0), 9)  # without keypoints of its own
        image[355:395, 25:475] = logo
        cv2.imwrite(f"photos/{name}.png", image)
    assert run(f"folder photos {SMALL}") == 0
    with open_database() as content:
        ids = [content.read_image_with_name(f"{name}.png").image_id for name in "01"]
        assert len(content.read_matches(*ids)) > 30
        assert not content.exists_two_view_geometry(*ids)


class StoreWithoutPixels:
    """The features of photographs whose results are refined already."""

    matcher = SimpleNamespace(refine_batch=lambda items: (item[0] for item in items))

    def __init__(self, features):
        self.features = features

    def __call__(self, photo):
        return self.features[photo]

    read_with_pixels = __call__


def test_keypoints_of_photographs_of_different_sizes_are_refined_alike():
    """Limits are multiplied in files of more than 1,600 px."""
    factors = (1, 3)
    keypoints, (_, _, matches, refined1, deviations) = make_track_pair(factors, 0.05)
    sizes = [(1600 * factor, 1200 * factor) for factor in factors]
    result = MatchResult(
        *keypoints,
        Matches(matches, np.ones(80, np.float32)),
        *sizes,
        refined0=keypoints[0],
        refined1=refined1,
        deviations=deviations,
    )

    features = {image: make_features_at(keypoints[image], sizes[image]) for image in (0, 1)}
    pairs = [(0, 1, result)]
    store = StoreWithoutPixels(features)
    positions = colmap.refine_keypoints(dict(enumerate(keypoints)), pairs, store)
    pair = 0, 1, matches, refined1, deviations
    for xy, expected in zip(positions.values(), refine_tracks(keypoints, [pair], factors)):
        np.testing.assert_array_equal(xy, expected)


def test_limits_of_the_verified_matches_grow_with_the_file(tmp_path):
    """A match is 1.5 px off its line in a file of three times 1,600 px, and so within 0.8 px."""
    points0, points1 = view_surface(100)
    points1 *= 3
    points1[::10, 1] += 1.5
    keypoints = points0.astype(np.float32), points1.astype(np.float32)
    sizes = (1600, 1200), (4800, 3600)
    photos = [PhotoFile(name, tmp_path / f"{name}.png") for name in "ab"]
    for photo, size in zip(photos, sizes):
        PIL.Image.new("L", size).save(photo.path)
    features = dict(zip(photos, map(make_features_at, keypoints, sizes)))
    matches = Matches(np.stack([np.arange(100)] * 2, 1), np.ones(100, np.float32))
    result = MatchResult(*keypoints, matches, *sizes, pair_score=0.9)
    store = StoreWithoutPixels(features)
    with colmap.create_database(
        tmp_path / "x.db", tmp_path, photos, store, refine=True
    ) as add_pair:
        add_pair(*photos, result)
    with open_database(tmp_path / "x.db") as content:
        ids = [content.read_image_with_name(f"{name}.png").image_id for name in "ab"]
        assert len(content.read_matches(*ids)) == 100
