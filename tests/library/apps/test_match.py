"""Matching two images from the command line."""

import cv2
import numpy as np
import pytest
from made_scenes import TURN, write_model
from reading import read_json

from pipeline import errors, match
from superglue_sift.geometry.two_view import corner_error, transform


@pytest.fixture
def work(tmp_path, photo):
    write_model(tmp_path / "model.safetensors", layers=2)
    cv2.imwrite(str(tmp_path / "a.png"), photo)
    cv2.imwrite(str(tmp_path / "b.jpg"), cv2.warpPerspective(photo, TURN, (600, 400)))
    cv2.imwrite(str(tmp_path / "flat.png"), np.full((200, 300), 99, np.uint8))
    return tmp_path


def run(folder, *words):
    extra = ["--model", folder / "model.safetensors", "--device", "cpu"]
    return errors.run(match.main, [str(word) for word in [*words, *extra]])


def test_matches_picture_and_json(work, capsys):
    out = work / "new/m.png"
    record = work / "new/m.json"
    assert run(work, work / "a.png", work / "b.jpg", "--out", out, "--json", record) == 0
    found = read_json(record)
    printed = capsys.readouterr().out
    matches = np.array(found["matches"])
    assert len(matches) > 30
    assert f"matches {len(matches)}" in printed and "homography inliers" in printed
    first, second = matches[:, :2].T.astype(int)
    np.testing.assert_array_equal(np.array(found["matches0"])[first], second)
    np.testing.assert_array_equal(np.array(found["matching_scores0"])[first], matches[:, 2])
    moved = transform(np.array(found["keypoints0"])[first], TURN)
    error = np.linalg.norm(moved - np.array(found["keypoints1"])[second], axis=1)
    assert (error < 3).mean() > 0.8
    assert corner_error(np.array(found["H_0to1"]), TURN, (600, 400)) < 3
    assert cv2.imread(str(out)).shape[1] > 1200


@pytest.mark.parametrize(
    "words, message",
    [
        ("a.png nowhere.png", "nowhere.png: cannot be read"),
        ("a.png b.jpg --model nowhere.safetensors", "nowhere.safetensors: no such model"),
        ("a.png b.jpg --threshold 2", "--threshold 2.0"),
        ("a.png b.jpg --out m.pdf", "m.pdf: must end in"),
        ("a.png b.jpg --json text.jpg/m.json", "text.jpg/m.json: cannot be written"),
        ("a.png b.jpg --out folder.png", "folder.png: cannot be written: Is a directory"),
        ("--pairs pairs.txt --out-dir text.jpg/found", "text.jpg/found: cannot be written"),
    ],
)
def test_wrong_requests_are_one_line(work, monkeypatch, capsys, words, message):
    monkeypatch.chdir(work)
    (work / "text.jpg").write_text("hello")
    (work / "folder.png").mkdir()
    assert errors.run(match.main, ["--model", "model.safetensors", *words.split()]) == 2
    found = capsys.readouterr().err
    assert message in found and found.count("\n") == 1
