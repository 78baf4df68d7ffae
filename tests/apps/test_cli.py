"""The command: two images, photographs stored lying, wrong requests, and what it needs."""

import os
import shutil
import sys

import cv2
import numpy as np
import pytest
from made_scenes import TURN, write_model
from PIL import Image
from reading import read_error, read_json

from superglue_sift import Matcher, errors
from superglue_sift.apps import cli
from superglue_sift.features import images
from superglue_sift.features.images import STORED, UPRIGHT
from superglue_sift.geometry.two_view import corner_error

# An extractor of two keypoints with nine numbers each
CORNERS = """
import numpy as np

def find(gray, max_keypoints):
    places = np.array([[5.0, 5], [9, 9]])
    return {"keypoints": places, "scores": np.ones(2), "descriptors": np.eye(2, 9, dtype="float32")}
"""


@pytest.fixture
def work(tmp_path, photo, monkeypatch):
    """A model, two views of a photograph in a folder, and files that are none, in this folder."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model.safetensors", layers=2)
    kind = {"extractor": "corners:find", "descriptor": "float", "descriptor_dim": 9}
    write_model(tmp_path / "corners.safetensors", **kind)
    (tmp_path / "corners.py").write_text(CORNERS)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "photos").mkdir()
    cv2.imwrite("a.png", photo)
    cv2.imwrite("b.jpg", cv2.warpPerspective(photo, TURN, (600, 400)))
    cv2.imwrite("photos/c.png", photo)
    (tmp_path / "text.avi").write_text("hello")
    (tmp_path / "there.txt").write_text("a.png b.jpg\n")
    (tmp_path / "three.txt").write_text("a b.png c.png\n")
    (tmp_path / "same.txt").write_text("./a.png a.png\n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\x00\x81")
    return tmp_path


def run(words):
    extra = ["--model", "model.safetensors", "--device", "cpu"]
    return errors.run_main(cli.main, [*extra, *words.split()])


def test_matches_picture_and_json(work, capsys):
    assert run("a.png b.jpg --out new/m.png --json new/m.json") == 0
    found = read_json(work / "new/m.json")
    matches = np.array(found["matches"])
    assert len(matches) > 30
    assert f"of {len(matches)} matches fit one camera motion" in capsys.readouterr().out
    first, second = matches[:, :2].T.astype(int)
    np.testing.assert_array_equal(np.array(found["matches0"])[first], second)
    np.testing.assert_array_equal(np.array(found["matching_scores0"])[first], matches[:, 2])
    assert corner_error(np.array(found["H_0to1"]), TURN, (600, 400)) < 3
    assert cv2.imread("new/m.png").shape[1] > 1200


@pytest.mark.parametrize("words", ["--json m.json", "--out-dir found --json-files"])
def test_black_pixels_of_a_mask_give_no_keypoint(work, words):
    mask = np.full((400, 600), 255, np.uint8)
    mask[:, :300] = 0
    os.mkdir("masks")
    cv2.imwrite("masks/a.png.png", mask)  # COLMAP's name of the mask of a.png
    assert run(f"a.png b.jpg --masks masks {words}") == 0
    found = read_json(work / ("m.json" if "m.json" in words else "found/a_b_matches.json"))
    assert min(x for x, _ in found["keypoints0"]) > 299 > min(x for x, _ in found["keypoints1"])
    assert len(found["matches"]) > 30


def test_a_pattern_that_the_shell_left_is_the_files_of_that_pattern(work):
    shutil.copy("a.png", "photos/d.png")
    assert run("photos/*.png --out-dir found") == 0
    assert [path.name for path in (work / "found").glob("*.npz")] == ["c_d_matches.npz"]


@pytest.mark.parametrize(
    "words, message",
    [
        ("", "name two images"),
        ("a.png nowhere.png", "nowhere.png: cannot be read"),
        ("a.png b.jpg --model nowhere.safetensors", "nowhere.safetensors: no such model"),
        ("a.png b.jpg --threshold 2", "threshold 2.0: must be between 0 and 1"),
        ("a.png b.jpg --out m.pdf", "m.pdf: must end in"),
        ("a.png b.jpg --json text.avi/m.json", "text.avi/m.json: cannot be written"),
        ("--pairs there.txt --out-dir text.avi/found", "text.avi/found: cannot be written"),
        ("a.png b.png c.png", "--out-dir DIR"),
        ("a.png b.png --out-dir x --out m.png", "--out goes with two images"),
        ("a.png b.png --k 2", "--k goes with images with --out-dir"),
        ("photos --out-dir x --k 2 --pairing exhaustive", "--k goes with --pairing sequential"),
        ("a.png b.jpg --resize big", "--resize: invalid int value: 'big'"),
        ("a.png", "a.png: is one image; name two images or a folder"),
        ("photos a.png --out-dir x", "photos: is a folder; name one folder alone"),
        ("photos --out-dir x", "photos: only one image"),
        ("--pairs three.txt --out-dir x", "three.txt:1: needs two names"),
        ("--pairs same.txt --out-dir x", "same.txt:1: ./a.png with itself"),
        ("--pairs bytes.txt --out-dir x", "bytes.txt: is not a text file"),
        ("a.png b.png --out a.png", "a.png: is an input"),
        ("photos --out-dir x --features text.avi", "text.avi: cannot be written"),
        ("photos --out-dir x --masks nowhere", "--masks nowhere: no such folder"),
        ("a.png b.jpg --masks photos", "--masks photos: holds no mask of any image; a.png.png"),
        ("a.png b.jpg --out-dir x --masks photos", "--masks photos: holds no mask"),
        ("nowhere --out-dir x", "nowhere: no such folder"),
        ("photos --out-dir x --k 0", "--k 0: must be a whole number, 1 or more"),
        ("photos --out-dir x --model corners.safetensors", "--extractor corners:find: required"),
        (
            "photos --out-dir x --model corners.safetensors --extractor corners:find --k 1",
            "--pairing nearest compares SIFT features; use exhaustive or sequential",
        ),
        ("a.png b.png --accept 0.3", "--accept goes with --scene"),
        ("a.png b.png --scene --accept 12", "accept 12.0: must be between 0 and 1"),
        ("photos --out-dir x --colmap text.avi", "text.avi: exists already; name another"),
        ("--serve --frame stored", "--frame goes with two images"),
        ("--colmap text.avi --refine", "--refine goes with two images"),
        ("--colmap text.avi --camera-per image", "--camera-per goes with a folder or --pairs"),
        ("--colmap text.avi --k 0", "--k 0: must be a whole number"),
        ("photos --out-dir x --camera-per image", "--camera-per goes with --colmap"),
        ("a.png b.jpg --pict", "--pictures goes with images with --out-dir"),
    ],
)
def test_wrong_requests_are_one_line(work, capfd, words, message):
    assert run(words) == 2
    assert message in read_error(capfd) and not list(work.glob("x/*.npz"))


@pytest.mark.parametrize(
    ("module", "words", "extra"),
    [("pycolmap", "photos --out-dir x --colmap x.db", "colmap"), ("flask", "--serve", "serve")],
)
def test_a_missing_package_is_named_before_any_work(
    work, monkeypatch, capsys, module, words, extra
):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(Matcher, "load", lambda *_, **__: pytest.fail("the model was loaded first"))
    assert run(words) == 2
    assert f"pip install 'superglue-sift[{extra}]'" in read_error(capsys)
    assert not os.path.exists("x")


@pytest.fixture
def lying(work, photo):
    """Both views as files that a camera stored lying: by orientation 6, and by 3."""
    views = (photo, cv2.warpPerspective(photo, TURN, (600, 400)))
    os.mkdir("lying")
    for name, view, orientation in zip(("a", "b"), views, (6, 3)):
        exif = Image.Exif()
        exif[images.ORIENTATION] = orientation
        pixels = images.turn_upright(view, images.invert_orientation(orientation))
        Image.fromarray(pixels).save(f"lying/{name}.png", exif=exif)
    return work


@pytest.mark.parametrize("frame", images.FRAMES)
def test_results_of_lying_files_are_in_the_frame_that_is_asked_for(lying, frame):
    files = f"lying/a.png lying/b.png --frame {frame}"
    assert run(f"{files} --json m.json") == 0
    found = read_json(lying / "m.json")
    assert found["frame"] == frame
    assert found["image_size0"] == ([600, 400] if frame == UPRIGHT else [400, 600])
    assert run(f"{files} --out-dir found --pictures") == 0
    with np.load("found/a_b_matches.npz") as file:
        assert str(file["frame"]) == frame
        assert file["turned"].tolist() == ([6, 3] if frame == UPRIGHT else [1, 1])
        np.testing.assert_allclose(file["keypoints0"], found["keypoints0"], atol=1e-3)
    assert cv2.imread("found/a_b_matches.jpg").shape[1] == 600 + 8 + 600  # upright


def test_a_colmap_database_is_of_stored_pixels_in_any_case(lying):
    pycolmap = pytest.importorskip("pycolmap")
    os.symlink("disk/real.db", "d.db")
    words = "--out-dir found --colmap d.db --no-scene --no-refine --frame upright"
    assert run(f"lying {words}") == 0
    assert os.path.islink("d.db") and os.listdir("disk") == ["real.db"]
    stored = Matcher.load("model.safetensors", "cpu", frame=STORED)
    with pycolmap.Database.open("d.db") as database:
        for image in database.read_all_images():
            camera = database.read_camera(image.camera_id)
            size = (400, 600) if image.name == "a.png" else (600, 400)
            assert (camera.width, camera.height) == size
            # SIFT of the lying pixels finds most of the places that SIFT of the upright ones does
            keypoints = database.read_keypoints(image.image_id)[:, :2]
            expected = stored.extract(f"lying/{image.name}").keypoints + 0.5
            nearest = np.linalg.norm(keypoints[:, None] - expected[None], axis=2).min(axis=1)
            assert np.median(nearest) < 0.1
        assert len(database.read_matches(1, 2)) > 30
