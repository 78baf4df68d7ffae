"""Many pairs from the command line: a folder, a list, a video; stopped work is resumed, bad images
are listed.
"""

from __future__ import annotations

import csv
import gc
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from made_scenes import TURN, write_model
from PIL import Image

from superglue_sift import Features, Matcher, RequestError, __version__, errors
from superglue_sift.apps import cli, many, results, retrieval
from superglue_sift.files import write_atomic
from superglue_sift.geometry import corner_error
from superglue_sift.match_result import MatchResult


@pytest.fixture
def work(tmp_path, photo, color_photo) -> Path:
    """A model and a folder of two views each of two scenes, one of them nested."""
    write_model(tmp_path / "model.safetensors")
    (tmp_path / "photos" / "cats").mkdir(parents=True)
    cat = cv2.cvtColor(color_photo, cv2.COLOR_RGB2GRAY)
    for name, scene in (("cup", photo), ("cats/cat", cat)):
        size = scene.shape[::-1]
        for view, H in enumerate((np.eye(3), TURN)):
            cv2.imwrite(
                str(tmp_path / "photos" / f"{name}{view}.png"), cv2.warpPerspective(scene, H, size)
            )
    return tmp_path


def run(folder: Path, *words: object) -> int:
    extra = ["--model", folder / "model.safetensors", "--device", "cpu", "--max-keypoints", "300"]
    return errors.exit_code(cli.main, [str(word) for word in [*words, *extra]])


def npz_names(folder: Path) -> set:
    return {path.name for path in folder.glob("*_matches.npz")}


def test_all_pairs_of_a_folder_in_the_layout_that_others_read(work, capsys):
    assert run(work, work / "photos", "--out-dir", work / "found") == 0
    names = ["cats-cat0", "cats-cat1", "cup0", "cup1"]
    assert npz_names(work / "found") == {
        f"{a}_{b}_matches.npz" for a, b in itertools.combinations(names, 2)
    }
    with np.load(work / "found" / "cup0_cup1_matches.npz", allow_pickle=False) as file:
        found = dict(file)
    given = {
        "keypoints0",
        "keypoints1",
        "matches",
        "match_confidence",
        "made_from",
        "frame",
        "turned",
    }
    assert set(found) == {*given, "aligned0", "aligned1", "deviations", "correlations"}
    matcher = Matcher.load(work / "model.safetensors", "cpu", max_keypoints=300)
    expected = matcher.match(work / "photos" / "cup0.png", work / "photos" / "cup1.png")
    np.testing.assert_array_equal(found["keypoints0"], expected.keypoints0)
    index = np.flatnonzero(found["matches"] >= 0)
    np.testing.assert_array_equal(np.stack([index, found["matches"][index]], 1), expected.matches)
    np.testing.assert_array_equal(found["match_confidence"][index], expected.scores)
    np.testing.assert_allclose(found["aligned1"][index], expected.aligned1, atol=1e-3)
    np.testing.assert_array_equal(
        np.isnan(found["deviations"][index]), np.isnan(expected.deviations)
    )
    assert np.isnan(np.delete(found["aligned1"], index, 0)).all()
    assert "6 pairs matched" in capsys.readouterr().out


def test_bad_images_are_listed_and_the_rest_is_done(work, capsys):
    (work / "photos" / "torn.jpg").write_bytes(b"\xff\xd8\xff\xe0 torn")
    assert run(work, work / "photos", "--out-dir", work / "found") == 1
    assert "1 image cannot be read, the others are matched" in capsys.readouterr().err
    assert len(npz_names(work / "found")) == 6
    with (work / "found" / "bad_images.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["image"] for row in rows] == [str(work / "photos" / "torn.jpg")]
    assert re.match("damaged JPEG|truncated JPEG", rows[0]["reason"])


def test_bad_images_have_their_paths_as_they_were_given(work, monkeypatch):
    monkeypatch.chdir(work)
    Path("photos/nested").mkdir()
    Path("photos/nested/torn.jpg").write_bytes(b"")
    Path("pairs.txt").write_text("cup0.png nested/torn.jpg\ncup0.png gone.png\n")
    asked = (
        ["photos"],
        ["photos/cup0.png", "photos/nested/torn.jpg"],
        ["--pairs", "pairs.txt", "--root", "photos"],
    )
    found = []
    for number, words in enumerate(asked):
        assert run(work, *words, "--out-dir", str(number)) == 1
        found.append(Path(str(number), "bad_images.csv").read_text().splitlines())
    assert found[0] == found[1] == ["image,reason", "photos/nested/torn.jpg,empty file"]
    assert found[2][1:] == [
        found[0][1],
        "photos/gone.png,cannot be read: No such file or directory",
    ]


def test_features_are_computed_once_and_found_again(work, monkeypatch):
    run(work, work / "photos", "--out-dir", work / "one", "--features", work / "features")
    assert len(list((work / "features").iterdir())) == 4
    monkeypatch.setattr("superglue_sift.matcher.extract", lambda *_: pytest.fail("computed twice"))
    assert (
        run(work, work / "photos", "--out-dir", work / "two", "--features", work / "features") == 0
    )
    for name in npz_names(work / "one"):
        assert (work / "one" / name).read_bytes() == (work / "two" / name).read_bytes()


def test_damaged_features_are_computed_again(work):
    run(work, work / "photos", "--out-dir", work / "one", "--features", work / "features")
    for path in (work / "features").iterdir():
        path.write_bytes(path.read_bytes()[:100])
    assert (
        run(work, work / "photos", "--out-dir", work / "two", "--features", work / "features") == 0
    )
    for name in npz_names(work / "one"):
        assert (work / "one" / name).read_bytes() == (work / "two" / name).read_bytes()


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def all_files(folder: Path) -> dict:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_what_is_done_is_not_redone(work, capsys, monkeypatch):
    assert run(work, work / "photos", "--out-dir", work / "found") == 0
    (work / "found" / "cup0_cup1_matches.npz").unlink()
    assert run(work, work / "photos", "--out-dir", work / "found") == 0
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == f"1 pairs matched of 6, the others before: {work / 'found'}"
    )
    monkeypatch.setattr(
        "superglue_sift.matcher.match_pairs", lambda *_: pytest.fail("matched twice")
    )
    assert run(work, work / "photos", "--out-dir", work / "found") == 0


def test_a_result_says_what_it_was_made_from(work):
    run(work, work / "photos", "--out-dir", work / "found", "--json-files", "--threshold", "0.3")
    with np.load(work / "found" / "cats-cat0_cup1_matches.npz", allow_pickle=False) as file:
        made = json.loads(str(file["made_from"]))
    assert made["image0"] == digest(work / "photos" / "cats" / "cat0.png")
    assert made["image1"] == digest(work / "photos" / "cup1.png")
    assert made["weights"] == digest(work / "model.safetensors")
    assert (made["threshold"], made["max_keypoints"], made["precision"]) == (0.3, 300, "float32")
    assert made["superglue_sift"] == __version__ and made["opencv"] == cv2.__version__
    assert (
        json.loads((work / "found" / "cats-cat0_cup1_matches.json").read_text())["made_from"]
        == made
    )


def test_photographs_replaced_under_their_names_are_matched_again(work, photo, capsys):
    asked = ("--pictures", "--json-files")
    assert run(work, work / "photos", "--out-dir", work / "found", *asked) == 0
    cv2.imwrite(str(work / "photos" / "cup1.png"), np.ascontiguousarray(np.rot90(photo, 2)))
    capsys.readouterr()
    assert run(work, work / "photos", "--out-dir", work / "found", *asked) == 0
    said = capsys.readouterr()
    assert "was made with another image1; it is computed again" in said.err
    assert (
        "3 pairs matched of 6, the others before; 3 of them again, since their inputs changed"
        in said.out
    )
    assert run(work, work / "photos", "--out-dir", work / "new", *asked) == 0
    assert all_files(work / "found") == all_files(work / "new")


def test_another_folder_of_the_same_names_gets_its_own_matches(work, photo, capsys):
    assert run(work, work / "photos", "--out-dir", work / "found") == 0
    shutil.copytree(work / "photos", work / "others")
    for path in (work / "others").rglob("*.png"):
        cv2.imwrite(str(path), np.ascontiguousarray(cv2.imread(str(path))[:, ::-1]))
    assert run(work, work / "others", "--out-dir", work / "found") == 0
    assert "6 of them again" in capsys.readouterr().out
    assert run(work, work / "others", "--out-dir", work / "new") == 0
    assert all_files(work / "found") == all_files(work / "new")


@pytest.mark.parametrize("change", ["threshold", "weights"])
def test_other_settings_or_weights_are_matched_again(work, capsys, change):
    assert run(work, work / "photos", "--out-dir", work / "found", "--pictures") == 0
    if change == "weights":
        write_model(work / "model.safetensors", sinkhorn_iterations=3)
    words = ("--threshold", "0.9") if change == "threshold" else ()
    assert run(work, work / "photos", "--out-dir", work / "found", *words) == 0
    said = capsys.readouterr()
    assert f"was made with another {change};" in said.err and "6 of them again" in said.out
    assert run(work, work / "photos", "--out-dir", work / "new", *words) == 0
    # No picture of the matches before either
    assert all_files(work / "found") == all_files(work / "new")


def test_a_result_of_before_these_records_or_a_damaged_one_is_made_again(work, capsys):
    assert run(work, work / "photos", "--out-dir", work / "found") == 0
    expected = all_files(work / "found")
    old = work / "found" / "cup0_cup1_matches.npz"
    torn = work / "found" / "cats-cat0_cup0_matches.npz"
    with np.load(old, allow_pickle=False) as file:
        np.savez(old, **{name: file[name] for name in file.files if name != "made_from"})
    torn.write_bytes(torn.read_bytes()[:200])
    assert run(work, work / "photos", "--out-dir", work / "found") == 0
    said = capsys.readouterr()
    assert (
        "does not state its inputs; it is computed again" in said.err
        and "2 of them again" in said.out
    )
    assert all_files(work / "found") == expected


def test_pairs_of_an_earlier_command_are_named(work, capsys):
    assert run(work, work / "photos", "--out-dir", work / "found") == 0
    for path in (work / "photos" / "cats").iterdir():
        path.unlink()
    assert run(work, work / "photos", "--out-dir", work / "found") == 0
    assert "also holds 5 pairs of other commands, which are kept" in capsys.readouterr().out


def test_files_asked_for_later_are_made_of_the_matches_that_are_there(work, monkeypatch, capsys):
    asked = ("--pictures", "--json-files", "--homography")
    assert run(work, work / "photos", "--out-dir", work / "whole", *asked) == 0
    assert run(work, work / "photos", "--out-dir", work / "found") == 0
    monkeypatch.setattr(
        "superglue_sift.matcher.match_pairs", lambda *_: pytest.fail("matched twice")
    )
    for count in range(1, 4):
        assert run(work, work / "photos", "--out-dir", work / "found", *asked[:count]) == 0
        assert "of the others were completed" in capsys.readouterr().out
    assert all_files(work / "found") == all_files(work / "whole")
    assert {"cup0_cup1_overlay.jpg", "cup0_cup1_blink.gif"} <= set(all_files(work / "found"))
    assert run(work, work / "photos", "--out-dir", work / "found", *asked) == 0
    assert "completed" not in capsys.readouterr().out


def test_the_output_is_never_input(work, capsys):
    for _ in range(2):
        assert run(work, work / "photos", "--out-dir", work / "photos" / "found", "--pictures") == 0
        assert len(npz_names(work / "photos" / "found")) == 6
    # Nor that of another command
    assert run(work, work / "photos", "--out-dir", work / "photos" / "second") == 0
    assert len(npz_names(work / "photos" / "second")) == 6
    cv2.imwrite(str(work / "photos" / "second" / "own.png"), np.zeros((50, 50), np.uint8))
    capsys.readouterr()
    assert run(work, work / "photos", "--out-dir", work / "photos" / "second") == 0
    assert "second: 1 images there are ignored: it is the output" in capsys.readouterr().err
    assert run(work, work / "photos", "--out-dir", work / "photos") == 2
    assert "is the folder of the photographs" in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bytes(work):
    def command(folder: str) -> list:
        words = [work / "photos", "--out-dir", work / folder, "--model", work / "model.safetensors"]
        return [
            sys.executable,
            "-m",
            "superglue_sift.apps.cli",
            *map(str, words),
            "--device",
            "cpu",
        ]

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
    (work / "pairs.txt").write_text(
        '# comment\n"cup0.png" cup1.png\n\ncup0.png cup1.png\ncup1.png gone.png\n'
    )
    assert (
        run(
            work,
            "--pairs",
            work / "pairs.txt",
            "--root",
            work / "photos",
            "--out-dir",
            work / "found",
        )
        == 1
    )
    assert npz_names(work / "found") == {"cup0_cup1_matches.npz"}
    assert "gone" in (work / "found" / "bad_images.csv").read_text()


def test_nearest_finds_the_other_view_of_each_scene(work):
    words = ("--pairing", "nearest", "--k", "1")
    assert run(work, work / "photos", "--out-dir", work / "found", *words) == 0
    assert npz_names(work / "found") == {"cats-cat0_cats-cat1_matches.npz", "cup0_cup1_matches.npz"}


def test_threads_that_write_one_file_at_once_do_not_meet(tmp_path, monkeypatch):
    """A folder with two copies of a photograph: both threads write the same features."""
    path = tmp_path / "features.npz"
    both = threading.Barrier(2, timeout=30)
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *names: both.wait() >= 0 and replace(*names))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: write_atomic(path, b"the same"), range(2)))
    assert path.read_bytes() == b"the same" and list(tmp_path.iterdir()) == [path]


def test_an_error_of_writing_names_the_file_and_not_a_temporary_one(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError) as error:
        write_atomic(tmp_path / "folder", b"")
    assert error.value.filename == str(tmp_path / "folder") and list(tmp_path.iterdir()) == [
        tmp_path / "folder"
    ]


def test_words_need_nothing_that_opencv_5_took_out(monkeypatch):
    """Two groups around two directions, far apart: each word is of one group, and each group has
    some.
    """
    monkeypatch.delattr(cv2, "BOWKMeansTrainer", raising=False)
    rng = np.random.default_rng(0)
    groups = [
        np.float32(np.eye(128)[axis] + 0.01 * rng.standard_normal((200, 128))) for axis in (3, 90)
    ]
    words = retrieval.vocabulary(groups)
    assert words.shape == (64, 128) and words.dtype == np.float32
    assert set(np.argmax(words, axis=1)) == {3, 90}
    assert np.array_equal(words, retrieval.vocabulary(groups))


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
    writer = cv2.VideoWriter(
        str(work / "walk.avi"), cv2.VideoWriter_fourcc(*"MJPG"), 10, photo.shape[::-1]
    )
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


def test_another_video_of_the_same_frames_numbers_is_matched_again(work, photo, capsys):
    for name, step in (("walk", 10), ("back", -10)):
        writer = cv2.VideoWriter(
            str(work / f"{name}.avi"), cv2.VideoWriter_fourcc(*"MJPG"), 10, photo.shape[::-1]
        )
        if not writer.isOpened():
            pytest.skip("this OpenCV writes no video")
        for number in range(3):
            writer.write(cv2.cvtColor(np.roll(photo, step * number, axis=1), cv2.COLOR_GRAY2BGR))
        writer.release()
    for name, folder in (("walk", "found"), ("walk", "found"), ("back", "found"), ("back", "new")):
        assert run(work, work / f"{name}.avi", "--out-dir", work / folder, "--json-files") == 0
    counts = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    again = "3 pairs matched; 3 of them again, since their inputs changed"
    assert counts == ["3 pairs matched", "0 pairs matched", again, "3 pairs matched"]
    assert all_files(work / "found") == all_files(work / "new")


def test_a_homography_is_shown_as_overlay_and_blinking(work):
    pair = work / "photos" / "cup0.png", work / "photos" / "cup1.png"
    assert run(work, *pair, "--out", work / "m.png", "--homography") == 0
    overlay = cv2.imread(str(work / "m_overlay.jpg"), cv2.IMREAD_GRAYSCALE)
    # where both fall together, half of each is the second image itself
    second = cv2.imread(str(pair[1]), cv2.IMREAD_GRAYSCALE)
    inside = (
        cv2.warpPerspective(np.full(second.shape, 255, np.uint8), TURN, second.shape[::-1]) == 255
    )
    assert np.abs(overlay.astype(int) - second)[inside].mean() < 6
    with Image.open(work / "m_blink.gif") as gif:
        assert gif.n_frames == 2 and gif.info["loop"] == 0 and gif.size == (600, 400)


def test_two_images_in_a_folder_of_their_own(work):
    one = work / "photos" / "cup0.png"
    two = work / "photos" / "cats" / "cat0.png"
    assert run(work, one, two, "--out-dir", work / "found") == 0
    assert npz_names(work / "found") == {"cup0_cats-cat0_matches.npz"}


@pytest.mark.parametrize(
    "files, names",
    [
        (["a.jpg", "b/c.png"], ["a", "b-c"]),
        (["a.jpg", "a.png"], ["a.jpg", "a.png"]),  # one stem twice
        (
            ["a.jpg", "a_b.jpg", "b_c.jpg"],
            ["a.jpg", "a_b.jpg", "b_c.jpg"],
        ),  # a_b_c would be two pairs
        (["img_1.jpg", "img_10.jpg"], ["img_1", "img_10"]),
        (["bare"], ["bare"]),
    ],
)
def test_a_name_of_two_images_means_one_pair(files, names):
    root = Path("root")
    assert [photo.name for photo in many.named([root / file for file in files], root)] == names


def test_images_that_would_share_their_results_are_refused():
    with pytest.raises(RequestError, match=r"a-b\.png: the results of two images"):
        many.named([Path("a/b.png"), Path("a-b.png")], Path("."))


def test_memory_does_not_grow_with_the_number_of_images(work, tmp_path):
    # 80 small images, pairs within a window: at no time are more held than the store may hold and
    # two batches need
    generator = np.random.default_rng(0)
    photos = []
    for number in range(80):
        path = tmp_path / f"{number:03d}.png"
        noise = cv2.resize(
            generator.integers(0, 255, (8, 8), np.uint8), (64, 64), interpolation=cv2.INTER_CUBIC
        )
        cv2.imwrite(str(path), noise)
        photos.append(many.Item(path.stem, path))
    matcher = Matcher.load(work / "model.safetensors", "cpu", max_keypoints=20)
    store = many.FeatureStore(matcher, tmp_path / "features", held=16)
    most = 0

    def pairs():
        nonlocal most
        for number, pair in enumerate(many.sequential(photos, 2)):
            if number % 20 == 0:
                most = max(most, sum(type(each) is Features for each in gc.get_objects()))
            yield pair

    matching = many.Run(store, many.Output(tmp_path / "found"))
    matching.match(pairs(), None)
    assert matching.matched == 2 * 80 - 3
    assert 16 <= most <= 16 + 2 * 2 * many.PAIRS_OF_A_WORKER * matcher.workers


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "name two images"),
        (["a.png", "b.png", "c.png"], "--out-dir DIR"),
        (["photos", "b.png", "--out-dir", "x"], "photos: a folder among 2 inputs"),
        (["a.png", "a.png", "--out-dir", "x"], "a.png: named twice"),
        (
            ["a.png", "b.png", "--out-dir", "x", "--out", "m.png"],
            "are for two images; with --out-dir, use",
        ),
        (["a.png", "b.png", "--every", "2"], "--every goes with a video"),
        (["photos", "--out-dir", "x", "--frames", "2"], "--frames goes with a video"),
        (["a.png", "b.png", "--pairing", "nearest"], "--pairing goes with a folder"),
        (["a.png", "b.png", "--k", "2"], "--k goes with a folder"),
        (
            ["--pairs", "three.txt", "--out-dir", "x"],
            "three.txt:1: needs two names, has 'a b.png c.png'; put names",
        ),
        (["a.png"], "a.png: one image; matching needs two: superglue-match a.png OTHER.png"),
        (["nowhere.JPG", "--out-dir", "x"], "nowhere.JPG: one image; matching needs two"),
        (["photos", "--camera", "0"], "name two images"),
        (["photos"], "--out-dir DIR"),
        (["photos", "--out-dir", "x", "--out", "m.png"], "are for two images"),
        (["empty", "--out-dir", "x"], "0 images; matching needs two"),
        (["nowhere", "--out-dir", "x"], "nowhere: no such folder or video"),
        (["text.avi", "--out-dir", "x"], "text.avi: OpenCV cannot open it"),
        (
            ["--pairs", "nowhere.txt", "--out-dir", "x"],
            "nowhere.txt: cannot be read: No such file or directory",
        ),
        (["--pairs", "binary.txt", "--out-dir", "x"], "binary.txt: is not a text file"),
        (["--pairs", "one.txt", "--out-dir", "x"], "one.txt:1: needs two names"),
        (["--pairs", "text.avi", "--out-dir", "x", "--k", "0"], "--k 0: must be 1"),
        (["a.png", "b.png", "--features", "kept"], "--features goes with --out-dir"),
        (["a.png", "b.png", "--out-dir", "x", "--colmap", "x.db"], "--colmap needs a folder"),
        (["a.png", "b.png", "--homography"], "--homography needs --out"),
        (["--serve", "--port", "99999"], "--port 99999: must be between 0 and 65535"),
        (["--serve", "--frame", "stored"], "--frame stored goes with photographs"),
        (
            ["walk.mp4", "--frame", "stored", "--out-dir", "x"],
            "--frame stored goes with photographs",
        ),
    ],
)
def test_wrong_requests_are_one_line(work, monkeypatch, capfd, words, message):
    monkeypatch.chdir(work)
    (work / "empty").mkdir()
    (work / "text.avi").write_text("hello")
    (work / "one.txt").write_text("a.png\n")
    (work / "three.txt").write_text("a b.png c.png\n")
    (work / "binary.txt").write_bytes(b"\xff\xd8\xff")
    assert run(work, *words) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and message in lines[0]


def test_files_that_the_shell_lists_are_matched_as_their_folder_is(work):
    shutil.copy(work / "photos" / "cats" / "cat0.png", work / "photos" / "cat0.png")
    names = sorted((work / "photos").glob("*.png"))
    assert run(work, *names, "--out-dir", work / "found") == 0
    shutil.rmtree(work / "photos" / "cats")
    assert run(work, work / "photos", "--out-dir", work / "whole") == 0
    assert all_files(work / "found") == all_files(work / "whole") and len(names) == 3


def test_names_with_spaces_in_a_list_of_pairs(tmp_path):
    lines = [
        '"a 1.jpg" b.jpg',
        "a 1.jpg\tc d.jpg",
        "it's.jpg  b.jpg",
        "# a b",
        "",
        '"a 1.jpg"\t"b.jpg"',
    ]
    (tmp_path / "pairs.txt").write_text("\n".join(lines))
    pairs = many.listed_pairs(tmp_path / "pairs.txt", tmp_path)
    names = [[item.image.name for item in pair] for pair in pairs]
    assert names == [["a 1.jpg", "b.jpg"], ["a 1.jpg", "c d.jpg"], ["it's.jpg", "b.jpg"]]


def found(score: int):
    """What is known of a pair, accepted with `score` or not."""
    return SimpleNamespace(pair_score=score, accepted=score >= 10)


def test_pairs_that_are_accepted_with_a_third_are_proposed_best_first():
    known = retrieval.Expansion("abcde")
    for one, other, score in [
        ("b", "a", 50),
        ("b", "c", 30),
        ("c", "d", 40),
        ("d", "e", 9),
        ("a", "d", 0),
    ]:
        known(one, other, found(score))
    # a and c through b, 30; b and d through c, 30; a and d were tried; nothing through d and e, who
    # do not go together
    assert known.proposed() == [("a", "c"), ("b", "d")]
    known("a", "c", found(60))
    assert known.proposed() == [("b", "d")]
    known("b", "e", found(70))
    # a and e through b, 50; c and e, 30; b and d, 30: with one for each image a-e, then b-d, and
    # c-e for c
    assert known.proposed(1) == [("a", "e"), ("b", "d"), ("c", "e")]
    assert retrieval.Expansion("ab").proposed() == []


def test_auto_goes_on_to_the_neighbours_of_neighbours(shared_data, tmp_path, monkeypatch, capsys):
    folder = shared_data / "poses" / "strecha"
    (tmp_path / "photos").mkdir()
    for number in (3, 4, 5, 6, 7, 8):
        image = cv2.imread(str(folder / f"Herz-Jesus-P25_000{number}.jpg"), cv2.IMREAD_GRAYSCALE)
        cv2.imwrite(str(tmp_path / "photos" / f"{number}.png"), cv2.resize(image, (576, 384)))
    monkeypatch.setattr(many, "MAX_EXHAUSTIVE", 5)
    monkeypatch.setitem(many.NEIGHBOURS, "nearest", 2)
    words = [tmp_path / "photos", "--out-dir", tmp_path / "found", "--scene", "--device", "cpu"]
    monkeypatch.setattr(retrieval, "ROUNDS", 0)
    assert errors.exit_code(cli.main, [*map(str, words)]) == 0
    first = len(list((tmp_path / "found").glob("*_matches.npz")))
    monkeypatch.setattr(retrieval, "ROUNDS", 2)
    assert errors.exit_code(cli.main, [*map(str, words)]) == 0
    with (tmp_path / "found" / "pairs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert 6 <= first < len(rows) <= 15 and len(
        list((tmp_path / "found").glob("*_matches.npz"))
    ) == len(rows)
    assert all(row["accepted"] == "1" for row in rows[:first])


@pytest.mark.parametrize(
    ("module", "words", "extra"),
    [
        ("pycolmap", ["photos", "--out-dir", "x", "--colmap", "x.db"], "colmap"),
        ("flask", ["--serve"], "serve"),
    ],
)
def test_a_missing_package_is_named_before_any_work(
    work, monkeypatch, capsys, module, words, extra
):
    monkeypatch.chdir(work)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(Matcher, "load", lambda *_, **__: pytest.fail("the model was loaded first"))
    assert run(work, *words) == 2
    assert f"pip install 'superglue-sift[{extra}]'" in capsys.readouterr().err
    assert not (work / "x").exists()


@pytest.mark.parametrize(("count", "chosen"), [(200, 19900), (201, 201 * 20)])
def test_auto_pairs_all_of_few_photographs_and_the_nearest_of_more(count, chosen, monkeypatch):
    class Store:
        is_sift = True

        def __call__(self, _photo):
            pytest.fail("features are asked for by retrieval alone")

    monkeypatch.setattr(
        retrieval, "nearest_pairs", lambda photos, _of, k: [(0, 1)] * (len(photos) * k)
    )
    photos = [many.Item(str(number), Path(f"{number}.jpg")) for number in range(count)]
    pairs, total = many.choose_pairs(photos, Store(), "auto")
    assert total == len(list(pairs)) == chosen


def test_any_flipped_bit_of_a_result_is_seen(tmp_path):
    found = MatchResult(
        np.float32([[1, 2], [3, 4]]),
        np.float32([[5, 6]]),
        np.int64([[1, 0]]),
        np.float32([0.5]),
        (9, 9),
        (9, 9),
    )
    path = tmp_path / "a_matches.npz"
    results.write_npz(path, found, "{}")
    content = path.read_bytes()
    assert results.read_made_from(path) == "{}"
    # A file system may flush a file that is cut to nothing first
    file = path.open("r+b", buffering=0)
    for place in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        file.seek(0)
        file.write(flipped)
        assert results.read_made_from(path) == ""
        with pytest.raises(results.DAMAGED):
            results.read_npz(path, (9, 9), (9, 9))
