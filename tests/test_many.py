"""Many pairs from the command line: a folder, a list, a video; what was stopped goes on, what is bad is listed."""

from __future__ import annotations

import csv
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import cv2
import numpy as np
import pytest
from made_scenes import TURN, write_model

from superglue_sift import Features, Matcher, RequestError, cli, errors, many, retrieval
from superglue_sift.geometry import corner_error


@pytest.fixture
def work(tmp_path, photo, color_photo) -> Path:
    """A model and a folder of two views each of two scenes, one of them nested."""
    write_model(tmp_path / "model.safetensors")
    (tmp_path / "photos" / "cats").mkdir(parents=True)
    cat = cv2.cvtColor(color_photo, cv2.COLOR_RGB2GRAY)
    for name, scene in (("cup", photo), ("cats/cat", cat)):
        size = scene.shape[::-1]
        for view, H in enumerate((np.eye(3), TURN)):
            cv2.imwrite(str(tmp_path / "photos" / f"{name}{view}.png"), cv2.warpPerspective(scene, H, size))
    return tmp_path


def run(folder: Path, *words: object) -> int:
    extra = ["--model", folder / "model.safetensors", "--device", "cpu", "--max-keypoints", "300"]
    return errors.exit_code(cli.main, [str(word) for word in [*words, *extra]])


def npz_names(folder: Path) -> set:
    return {path.name for path in folder.glob("*_matches.npz")}


def test_all_pairs_of_a_folder_in_the_layout_that_others_read(work, capsys):
    assert run(work, work / "photos", "--out-dir", work / "found") == 0
    names = ["cats-cat0", "cats-cat1", "cup0", "cup1"]
    assert npz_names(work / "found") == {f"{a}_{b}_matches.npz" for a, b in itertools.combinations(names, 2)}
    with np.load(work / "found" / "cup0_cup1_matches.npz", allow_pickle=False) as file:
        found = dict(file)
    assert set(found) == {"keypoints0", "keypoints1", "matches", "match_confidence"}
    matcher = Matcher.load(work / "model.safetensors", "cpu", max_keypoints=300)
    expected = matcher.match(work / "photos" / "cup0.png", work / "photos" / "cup1.png")
    np.testing.assert_array_equal(found["keypoints0"], expected.keypoints0)
    index = np.flatnonzero(found["matches"] >= 0)
    np.testing.assert_array_equal(np.stack([index, found["matches"][index]], 1), expected.matches)
    np.testing.assert_array_equal(found["match_confidence"][index], expected.scores)
    assert "6 pairs matched" in capsys.readouterr().out


def test_bad_images_are_listed_and_the_rest_is_done(work, capsys):
    (work / "photos" / "torn.jpg").write_bytes(b"\xff\xd8\xff\xe0 torn")
    assert run(work, work / "photos", "--out-dir", work / "found") == 1
    assert "1 images cannot be read, the rest is done" in capsys.readouterr().err
    assert len(npz_names(work / "found")) == 6
    with (work / "found" / "bad_images.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == ["torn"] and "torn.jpg" in rows[0]["reason"]


def test_features_are_computed_once_and_found_again(work, monkeypatch):
    run(work, work / "photos", "--out-dir", work / "one", "--features", work / "features")
    assert len(list((work / "features").iterdir())) == 4
    monkeypatch.setattr("superglue_sift.sift.extract", lambda *_: pytest.fail("computed twice"))
    assert run(work, work / "photos", "--out-dir", work / "two", "--features", work / "features") == 0
    for name in npz_names(work / "one"):
        assert (work / "one" / name).read_bytes() == (work / "two" / name).read_bytes()


def test_damaged_features_are_computed_again(work):
    run(work, work / "photos", "--out-dir", work / "one", "--features", work / "features")
    for path in (work / "features").iterdir():
        path.write_bytes(path.read_bytes()[:100])
    assert run(work, work / "photos", "--out-dir", work / "two", "--features", work / "features") == 0
    for name in npz_names(work / "one"):
        assert (work / "one" / name).read_bytes() == (work / "two" / name).read_bytes()


def test_what_is_done_is_not_redone_and_other_settings_are_refused(work, monkeypatch, capsys):
    assert run(work, work / "photos", "--out-dir", work / "found") == 0
    (work / "found" / "cup0_cup1_matches.npz").unlink()
    assert run(work, work / "photos", "--out-dir", work / "found") == 0
    assert "1 pairs matched of 6, the others before" in capsys.readouterr().out
    assert run(work, work / "photos", "--out-dir", work / "found", "--threshold", "0.9") == 2
    assert "settings.json" in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bytes(work):
    def command(folder: str) -> list:
        words = [work / "photos", "--out-dir", work / folder, "--model", work / "model.safetensors"]
        return [sys.executable, "-m", "superglue_sift.cli", *map(str, words), "--device", "cpu"]

    started = subprocess.Popen(command("killed"), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(npz_names(work / "killed")) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(started.pid, signal.SIGKILL)
    started.wait()
    assert 2 <= len(npz_names(work / "killed")) < 6
    for folder in ("killed", "whole"):
        subprocess.run(command(folder), check=True, capture_output=True)
    assert npz_names(work / "killed") == npz_names(work / "whole")
    for name in npz_names(work / "whole"):
        assert (work / "killed" / name).read_bytes() == (work / "whole" / name).read_bytes()


def test_a_pairs_file_names_what_is_matched(work):
    (work / "pairs.txt").write_text("# comment\ncup0.png cup1.png 0 0\n\ncup0.png cup1.png\ncup1.png gone.png\n")
    assert run(work, "--pairs", work / "pairs.txt", "--root", work / "photos", "--out-dir", work / "found") == 1
    assert npz_names(work / "found") == {"cup0_cup1_matches.npz"}
    assert "gone" in (work / "found" / "bad_images.csv").read_text()


def test_nearest_finds_the_other_view_of_each_scene(work):
    words = ("--pairing", "nearest", "--k", "1")
    assert run(work, work / "photos", "--out-dir", work / "found", *words) == 0
    assert npz_names(work / "found") == {"cats-cat0_cats-cat1_matches.npz", "cup0_cup1_matches.npz"}


def test_nearest_of_images_without_keypoints_is_no_error():
    nothing = np.zeros((0, 128), np.uint8)
    assert retrieval.nearest_pairs(["a", "b"], lambda _: nothing, 5) == [(0, 1)]
    assert retrieval.nearest_pairs(["a"], lambda _: nothing, 5) == []


@pytest.mark.parametrize("k, count", [(1, 3), (2, 5), (9, 6)])
def test_sequential_pairs_each_with_those_before_it(work, k, count):
    words = ("--pairing", "sequential", "--k", k)
    assert run(work, work / "photos", "--out-dir", work / "found", *words) == 0
    assert len(npz_names(work / "found")) == count


def test_a_video_is_matched_frame_by_frame(work, photo):
    writer = cv2.VideoWriter(str(work / "walk.avi"), cv2.VideoWriter_fourcc(*"MJPG"), 10, photo.shape[::-1])
    if not writer.isOpened():
        pytest.skip("this OpenCV writes no video")
    for step in range(6):
        writer.write(cv2.cvtColor(np.roll(photo, 10 * step, axis=1), cv2.COLOR_GRAY2BGR))
    writer.release()
    words = ("--every", 2, "--k", 1, "--json-files", "--pictures")
    assert run(work, work / "walk.avi", "--out-dir", work / "found", *words) == 0
    pairs = ["frame000000_frame000002", "frame000002_frame000004"]
    assert npz_names(work / "found") == {f"{pair}_matches.npz" for pair in pairs}
    for pair in pairs:
        H = np.array(json.loads((work / "found" / f"{pair}_matches.json").read_text())["H_0to1"])
        assert corner_error(H, np.array([[1.0, 0, 20], [0, 1, 0], [0, 0, 1]]), (600, 400)) < 1
        assert cv2.imread(str(work / "found" / f"{pair}_matches.jpg")) is not None
    assert run(work, work / "walk.avi", "--out-dir", work / "two", "--frames", 2, "--k", 1) == 0
    assert npz_names(work / "two") == {"frame000000_frame000001_matches.npz"}


def test_a_homography_is_shown_as_overlay_and_blinking(work):
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    pair = work / "photos" / "cup0.png", work / "photos" / "cup1.png"
    assert run(work, *pair, "--out", work / "m.png", "--homography") == 0
    overlay = cv2.imread(str(work / "m_overlay.jpg"), cv2.IMREAD_GRAYSCALE)
    # where both fall together, half of each is the second image itself
    second = cv2.imread(str(pair[1]), cv2.IMREAD_GRAYSCALE)
    inside = cv2.warpPerspective(np.full(second.shape, 255, np.uint8), TURN, second.shape[::-1]) == 255
    assert np.abs(overlay.astype(int) - second)[inside].mean() < 6
    with image.open(work / "m_blink.gif") as gif:
        assert gif.n_frames == 2 and gif.info["loop"] == 0 and gif.size == (600, 400)


def test_two_images_in_a_folder_of_their_own(work):
    one, two = work / "photos" / "cup0.png", work / "photos" / "cats" / "cat0.png"
    assert run(work, one, two, "--out-dir", work / "found") == 0
    assert npz_names(work / "found") == {"cup0_cats-cat0_matches.npz"}


@pytest.mark.parametrize(
    "files, names",
    [
        (["a.jpg", "b/c.png"], ["a", "b-c"]),
        (["a.jpg", "a.png"], ["a.jpg", "a.png"]),  # one stem twice
        (["a.jpg", "a_b.jpg", "b_c.jpg"], ["a.jpg", "a_b.jpg", "b_c.jpg"]),  # a_b_c would be two pairs
        (["img_1.jpg", "img_10.jpg"], ["img_1", "img_10"]),
        (["bare"], ["bare"]),
    ],
)
def test_a_name_of_two_images_means_one_pair(files, names):
    root = Path("root")
    assert [photo.name for photo in many.named([root / file for file in files], root)] == names


def test_images_that_would_share_their_results_are_refused():
    with pytest.raises(RequestError, match=r"a-b\.png: two images"):
        many.named([Path("a/b.png"), Path("a-b.png")], Path("."))


def test_memory_does_not_grow_with_the_number_of_images(work, tmp_path):
    # 80 small images, pairs within a window: at no time are more held than the store may hold and a pair needs
    generator = np.random.default_rng(0)
    photos = []
    for number in range(80):
        path = tmp_path / f"{number:03d}.png"
        noise = cv2.resize(generator.integers(0, 255, (8, 8), np.uint8), (64, 64), interpolation=cv2.INTER_CUBIC)
        cv2.imwrite(str(path), noise)
        photos.append(many.Item(path.stem, path))
    matcher = Matcher.load(work / "model.safetensors", "cpu", max_keypoints=20)
    store = many.FeatureStore(matcher, tmp_path / "features", held=16)
    most = 0

    def pairs():
        nonlocal most
        for number, pair in enumerate(many.sequential(photos, 2)):
            if number % 10 == 0:
                most = max(most, sum(type(each) is Features for each in gc.get_objects()))
            yield pair

    assert many.match(pairs(), None, store, many.Output(tmp_path / "found")) == 2 * 80 - 3
    assert 16 <= most <= 16 + 2


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "name two images"),
        (["a.png", "b.png", "c.png"], "name two images"),
        (["photos", "--camera", "0"], "name two images"),
        (["photos"], "--out-dir DIR"),
        (["photos", "--out-dir", "x", "--out", "m.png"], "are for two images"),
        (["empty", "--out-dir", "x"], "0 images; matching needs two"),
        (["nowhere", "--out-dir", "x"], "nowhere: no such folder or video"),
        (["text.avi", "--out-dir", "x"], "text.avi: OpenCV cannot open it"),
        (["--pairs", "nowhere.txt", "--out-dir", "x"], "nowhere.txt: cannot be read"),
        (["--pairs", "one.txt", "--out-dir", "x"], "one.txt:1: needs two names"),
        (["--pairs", "text.avi", "--out-dir", "x", "--k", "0"], "--k 0: must be 1"),
        (["a.png", "b.png", "--features", "kept"], "--features goes with --out-dir"),
        (["a.png", "b.png", "--out-dir", "x", "--colmap", "x.db"], "--colmap needs a folder"),
        (["a.png", "b.png", "--homography"], "--homography writes beside"),
    ],
)
def test_wrong_requests_are_one_line(work, monkeypatch, capfd, words, message):
    monkeypatch.chdir(work)
    (work / "empty").mkdir()
    (work / "text.avi").write_text("hello")
    (work / "one.txt").write_text("a.png\n")
    assert run(work, *words) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and message in lines[0]
