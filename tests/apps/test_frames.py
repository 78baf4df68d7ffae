"""Photographs that a camera stored lying, in the results of the command and of the library."""

import cv2
import numpy as np
import pytest
from made_scenes import TURN
from reading import read_json

from pipeline import errors
from superglue_sift import Matcher
from superglue_sift.apps import cli
from superglue_sift.features import images
from superglue_sift.features.images import STORED, UPRIGHT


def save(path, pixels, orientation):
    """Write BGR or gray pixels as they are, with this orientation in their EXIF data."""
    from PIL import Image

    exif = Image.Exif()
    exif[images.ORIENTATION] = orientation
    Image.fromarray(pixels if pixels.ndim == 2 else pixels[..., ::-1]).save(path, exif=exif)


@pytest.fixture(scope="module")
def views(photo):
    return photo, cv2.warpPerspective(photo, TURN, photo.shape[::-1])


@pytest.fixture
def turned_files(tmp_path, views):
    """Both views as files that are stored lying: the first by orientation 6, the second by 3."""
    for name, view, orientation in (("a.png", views[0], 6), ("b.png", views[1], 3)):
        save(tmp_path / name, images.turn_upright(view, images.inverse(orientation)), orientation)
    return tmp_path / "a.png", tmp_path / "b.png"


def run(*words):
    return errors.run(cli.main, [str(word) for word in words])


@pytest.mark.parametrize("frame", images.FRAMES)
def test_json_npz_and_picture_of_the_command(model, turned_files, tmp_path, frame, capsys):
    common = ["--model", model, "--device", "cpu", "--frame", frame]
    assert run(*turned_files, "--json", tmp_path / "m.json", *common) == 0
    found = read_json(tmp_path / "m.json")
    assert found["frame"] == frame
    assert found["image_size0"] == ([600, 400] if frame == UPRIGHT else [400, 600])
    assert run(*turned_files, "--out-dir", tmp_path / "found", "--pictures", *common) == 0
    with np.load(tmp_path / "found/a_b_matches.npz") as file:
        assert str(file["frame"]) == frame
        assert file["turned"].tolist() == ([6, 3] if frame == UPRIGHT else [1, 1])
        np.testing.assert_allclose(file["keypoints0"], found["keypoints0"], atol=1e-3)
    picture = cv2.imread(str(tmp_path / "found/a_b_matches.jpg"))
    assert picture.shape[1] == 600 + 8 + 600  # upright


def test_a_colmap_database_is_of_stored_pixels_in_any_case(model, turned_files, tmp_path):
    pycolmap = pytest.importorskip("pycolmap")
    words = f"--out-dir {tmp_path}/found --colmap {tmp_path}/d.db --no-scene --no-refine"
    settings = f"--model {model} --device cpu --frame upright"
    assert run(tmp_path, *words.split(), *settings.split()) == 0
    stored = Matcher.load(model, "cpu", frame=STORED)
    with pycolmap.Database.open(str(tmp_path / "d.db")) as database:
        for image in database.read_all_images():
            camera = database.read_camera(image.camera_id)
            assert (camera.width, camera.height) == (
                (400, 600) if image.name == "a.png" else (600, 400)
            )
            # SIFT of the lying pixels finds most of the places that SIFT of the upright ones does
            keypoints = database.read_keypoints(image.image_id)[:, :2]
            expected = stored.extract(tmp_path / image.name).keypoints + 0.5
            nearest = np.linalg.norm(keypoints[:, None] - expected[None], axis=2).min(axis=1)
            assert np.median(nearest) < 0.1
        assert len(database.read_matches(1, 2)) > 30
