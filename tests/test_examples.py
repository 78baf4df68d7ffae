"""The scripts of examples/ do what they say."""

import runpy
import sys

import cv2
import numpy as np
import pytest
from made_scenes import TURN
from PIL import Image


@pytest.fixture
def run(root, model, monkeypatch, tmp_path):
    """`run("overlay", words...)`: run a script in an empty folder, with an untrained model."""
    monkeypatch.chdir(tmp_path)

    def run_script(name, *words):
        script = str(root / "examples" / f"{name}.py")
        monkeypatch.setattr(sys, "argv", [script, *map(str, words), "--model", str(model)])
        runpy.run_path(script, run_name="__main__")

    return run_script


@pytest.mark.parametrize("ending", [".jpg", ".gif"])
def test_the_first_photograph_lies_on_the_second(run, photo, tmp_path, ending):
    second = cv2.warpPerspective(photo, TURN, photo.shape[::-1])
    cv2.imwrite("a.png", photo)
    cv2.imwrite("b.png", second)
    run("overlay", "a.png", "b.png", f"m{ending}")
    with Image.open(f"m{ending}") as image:
        assert getattr(image, "n_frames", 1) == (2 if ending == ".gif" else 1)
        seen = np.asarray(image.convert("L")).astype(int)
    middle = np.s_[100:-100, 150:-150]  # which both photographs cover
    assert np.abs(seen[middle] - second[middle]).mean() < 8


def test_without_a_homography_there_is_no_overlay(run, photo):
    cv2.imwrite("a.png", photo)
    cv2.imwrite("b.png", np.full_like(photo, 99))
    with pytest.raises(SystemExit, match="no homography"):
        run("overlay", "a.png", "b.png", "m.jpg")


def test_a_missing_photograph_is_one_line(run):
    with pytest.raises(SystemExit, match="error: nowhere"):
        run("overlay", "nowhere.png", "b.png", "m.jpg")


def test_frames_of_a_video_move_as_the_camera_did(run, photo, tmp_path, capsys):
    codec = cv2.VideoWriter_fourcc(*"MJPG")
    writer = cv2.VideoWriter("walk.avi", codec, 10, photo.shape[::-1])
    if not writer.isOpened():
        pytest.skip("this OpenCV writes no video")
    for number in range(6):
        writer.write(cv2.cvtColor(np.roll(photo, 10 * number, axis=1), cv2.COLOR_GRAY2BGR))
    writer.release()
    run("video", "walk.avi", "found", "--every", 2)
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == ["frame 2", "frame 4"]
    for line in said:
        moved = line[line.index("[") + 1 : line.index("]")].split()
        np.testing.assert_allclose(np.array(moved, float), [20, 0], atol=0.5)
    assert len(list((tmp_path / "found").iterdir())) == 2
    with pytest.raises(SystemExit, match="nowhere: OpenCV cannot open it"):
        run("video", "nowhere", "found")
