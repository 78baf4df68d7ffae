"""The command line: two images, help, wrong requests, and photographs that are stored rotated."""

import os
import re
import sys

import cv2
import numpy as np
import pytest
from made_scenes import TURN, write_model
from PIL import Image
from reading import read_error, read_files, read_json

from superglue_sift import Matcher, errors
from superglue_sift.apps import cli
from superglue_sift.features import images
from superglue_sift.features.images import STORED, UPRIGHT
from superglue_sift.geometry.two_view import compute_corner_error

# An extractor of two keypoints with nine numbers each
CORNERS = """
import numpy as np

def find(gray, max_keypoints):
    places = np.array([[5.0, 5], [9, 9]])
    return {"keypoints": places, "scores": np.ones(2), "descriptors": np.eye(2, 9, dtype="float32")}
"""


@pytest.fixture
def work(tmp_path, photo, turned, monkeypatch):
    """A model, two views of a photograph in a folder, and files that are none, in this folder."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model.safetensors", layers=2)
    kind = {"extractor": "corners:find", "descriptor": "float", "descriptor_dim": 9}
    write_model(tmp_path / "corners.safetensors", **kind)
    (tmp_path / "corners.py").write_text(CORNERS)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "photos").mkdir()
    cv2.imwrite("a.png", photo)
    cv2.imwrite("b.jpg", turned)
    cv2.imwrite("photos/c.png", photo)
    (tmp_path / "text.avi").write_text("hello")
    (tmp_path / "three.txt").write_text("a b.png c.png\n")
    return tmp_path


def run(words):
    words = cli.add_command(words.split())
    defaults = ["--model=model.safetensors", "--device=cpu"]
    return errors.run_main(cli.main, [*words[:1], *defaults, *words[1:]])


def test_two_images_give_a_picture_and_json(work, capsys):
    assert run("a.png b.jpg --out new/m.png --json new/m.json") == 0
    report = read_json(work / "new/m.json")
    matches = np.array(report["matches"])
    assert len(matches) > 30
    assert f"{len(matches)} matches" in capsys.readouterr().out
    index0, index1 = matches[:, :2].T.astype(int)
    np.testing.assert_array_equal(np.array(report["matches0"])[index0], index1)
    np.testing.assert_array_equal(np.array(report["matching_scores0"])[index0], matches[:, 2])
    assert compute_corner_error(np.array(report["H_0to1"]), TURN, (600, 400)) < 3
    assert cv2.imread("new/m.png").shape[1] > 1200


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("a.png b.jpg --out m.png", "pair"),
        ("--no-refine a.png b.jpg", "pair"),
        ("pair a.png b.jpg", "pair"),
        ("--resize 0 photos --out-dir results", "folder"),
        ("a.png b.jpg --out-dir=results", "folder"),
        ("--version", "--version"),
    ],
)
def test_pair_and_folder_may_be_left_out(work, words, command):
    completed = cli.add_command(words.split())
    assert completed[0] == command
    assert completed == words.split() or completed[1:] == words.split()


def test_a_command_lists_its_own_options_only(capsys):
    help_texts = {}
    for command in cli.COMMANDS:
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        help_texts[command] = capsys.readouterr().out
    for option, commands in {
        "--json": "pair",
        "--out-dir": "folder list",
        "--root": "list",
        "--pairing": "folder database",
        "--dry-run": "database",
        "--frame": "pair folder list",
        "--refine": "pair folder list serve",
        "--min-matches": "pair folder list database serve",
    }.items():
        listed = [name for name, text in help_texts.items() if re.search(rf"{option}\b(?!-)", text)]
        assert listed == commands.split()


@pytest.mark.parametrize("words", ["--json m.json", "--out-dir results --json-files"])
def test_black_pixels_of_a_mask_give_no_keypoint(work, words):
    mask = np.full((400, 600), 255, np.uint8)
    mask[:, :300] = 0
    os.mkdir("masks")
    cv2.imwrite("masks/a.png.png", mask)  # COLMAP's name of the mask of a.png
    assert run(f"a.png b.jpg --masks masks {words}") == 0
    report = read_json(work / ("m.json" if "m.json" in words else "results/a_b_matches.json"))
    assert min(x for x, _ in report["keypoints0"]) > 299 > min(x for x, _ in report["keypoints1"])
    assert len(report["matches"]) > 30


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("serve --frame stored", "--frame"),  # an option of other commands
        ("a.png b.png --accept 0.3", "accept"),  # an option without effect
        ("a.png b.jpg --threshold 2", "threshold"),
        ("folder a.png b.jpg --out-dir x --model corners.safetensors", "corners:find"),
        ("a.png nowhere.png", "nowhere.png"),
        ("a.png b.jpg --out m.pdf", "pdf"),
        ("list three.txt --out-dir x", "three.txt:1"),
        # Files that a result would replace
        ("a.png b.png --out a.png", "a.png"),
        ("a.png b.jpg --json ./b.jpg", "b.jpg"),
        ("folder photos --out-dir x --colmap text.avi", "text.avi"),
    ],
)
def test_wrong_requests_are_one_line_that_names_the_file_or_option(work, capfd, words, name):
    if "--colmap" in words:
        pytest.importorskip("pycolmap")
    before = read_files(work)
    assert run(words) == 2
    assert name in read_error(capfd)
    assert read_files(work) == before


@pytest.mark.parametrize(
    ("module", "words", "extra"),
    [
        ("pycolmap", "folder photos --out-dir x --colmap x.db", "colmap"),
        ("pycolmap", "database x.db", "colmap"),
        ("flask", "serve", "serve"),
    ],
)
def test_a_missing_package_is_named_before_any_work(
    work, monkeypatch, capsys, module, words, extra
):
    monkeypatch.setitem(sys.modules, module, None)
    assert run(words) == 2
    assert f"superglue-sift[{extra}]" in read_error(capsys)
    assert not os.path.exists("x")


@pytest.fixture
def rotated(work, photo, turned):
    """Both views as files that a camera stored rotated: by orientation 6, and by 3."""
    os.mkdir("rotated")
    for name, view, orientation in zip(("a", "b"), (photo, turned), (6, 3)):
        exif = Image.Exif()
        exif[images.ORIENTATION] = orientation
        pixels = images.turn_upright(view, images.invert_orientation(orientation))
        Image.fromarray(pixels).save(f"rotated/{name}.png", exif=exif)
    return work


@pytest.mark.parametrize("frame", images.FRAMES)
def test_results_of_rotated_files_are_in_the_frame_of_the_option(rotated, frame):
    files = f"rotated/a.png rotated/b.png --frame {frame}"
    assert run(f"{files} --json m.json") == 0
    report = read_json(rotated / "m.json")
    assert report["frame"] == frame
    assert report["image_size0"] == ([600, 400] if frame == UPRIGHT else [400, 600])
    assert run(f"{files} --out-dir results --pictures") == 0
    with np.load("results/a_b_matches.npz") as file:
        assert str(file["frame"]) == frame
        assert file["turned"].tolist() == ([6, 3] if frame == UPRIGHT else [1, 1])
        np.testing.assert_allclose(file["keypoints0"], report["keypoints0"], atol=1e-3)
    assert cv2.imread("results/a_b_matches.jpg").shape[1] == 600 + 8 + 600  # upright


def test_a_colmap_database_is_of_stored_pixels_in_any_case(rotated):
    pycolmap = pytest.importorskip("pycolmap")
    os.symlink("disk/real.db", "d.db")
    words = "--out-dir results --colmap d.db --no-scene --no-refine --frame upright"
    assert run(f"folder rotated {words}") == 0
    assert os.path.islink("d.db") and os.listdir("disk") == ["real.db"]
    stored = Matcher.load("model.safetensors", "cpu", frame=STORED)
    with pycolmap.Database.open("d.db") as database:
        for image in database.read_all_images():
            camera = database.read_camera(image.camera_id)
            size = (400, 600) if image.name == "a.png" else (600, 400)
            assert (camera.width, camera.height) == size
            # SIFT of the stored pixels finds most of the places that SIFT of the upright ones does
            keypoints = database.read_keypoints(image.image_id)[:, :2]
            expected = stored.extract(f"rotated/{image.name}").keypoints + 0.5
            nearest = np.linalg.norm(keypoints[:, None] - expected[None], axis=2).min(axis=1)
            assert np.median(nearest) < 0.1
        assert len(database.read_matches(1, 2)) > 30
