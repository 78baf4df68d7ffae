"""The scripts of examples/ do what they say."""

import runpy
import sys

import cv2
import numpy as np
import pytest
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
def test_the_first_photograph_is_warped_onto_the_second(run, photo, turned, ending):
    cv2.imwrite("a.png", photo)
    cv2.imwrite("b.png", turned)
    run("overlay", "a.png", "b.png", f"m{ending}")
    with Image.open(f"m{ending}") as image:
        assert getattr(image, "n_frames", 1) == (2 if ending == ".gif" else 1)
        overlay = np.asarray(image.convert("L")).astype(int)
    middle = np.s_[100:-100, 150:-150]  # which both photographs cover
    assert np.abs(overlay[middle] - turned[middle]).mean() < 8


def test_without_a_homography_there_is_no_overlay(run, photo):
    cv2.imwrite("a.png", photo)
    cv2.imwrite("b.png", np.full_like(photo, 99))
    with pytest.raises(SystemExit, match="no homography"):
        run("overlay", "a.png", "b.png", "m.jpg")


@pytest.fixture
def video(photo, tmp_path):
    """The bytes of a video of six frames, each moved by 10 px."""
    path = tmp_path / "video.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 10, photo.shape[::-1])
    if not writer.isOpened():
        pytest.skip("this OpenCV writes no video")
    for number in range(6):
        writer.write(cv2.cvtColor(np.roll(photo, 10 * number, axis=1), cv2.COLOR_GRAY2BGR))
    writer.release()
    return path.read_bytes()


def test_frames_of_a_video_move_as_the_camera_did(run, video, tmp_path, capsys):
    (tmp_path / "walk.avi").write_bytes(video)
    run("video", "walk.avi", "pictures", "--every", 2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["frame 2", "frame 4"]
    for line in lines:
        shift = line[line.index("[") + 1 : line.index("]")].split()
        np.testing.assert_allclose(np.array(shift, float), [20, 0], atol=0.5)
    assert len(list((tmp_path / "pictures").iterdir())) == 2


@pytest.mark.parametrize("length", [0, 0.6])
def test_a_damaged_video_is_named(run, video, tmp_path, length):
    (tmp_path / "walk.avi").write_bytes(video[: int(length * len(video))])
    with pytest.raises(SystemExit, match=r"walk\.avi"):
        run("video", "walk.avi", "pictures")
