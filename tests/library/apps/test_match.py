"""Matching two images from the command line."""

from __future__ import annotations

import json

import cv2
import numpy as np
import pytest
from made_scenes import TURN, write_model

from pipeline import errors, match
from superglue_sift.geometry import corner_error, transform


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
    out = work / "new" / "m.png"
    record = work / "new" / "m.json"
    assert run(work, work / "a.png", work / "b.jpg", "--out", out, "--json", record) == 0
    found = json.loads(record.read_text())
    printed = capsys.readouterr().out
    matches = np.array(found["matches"])
    assert len(matches) > 30
    assert f"matches {len(matches)}" in printed and "homography inliers" in printed
    first, second = matches[:, :2].T.astype(int)
    dense = np.full(len(found["keypoints0"]), -1)
    dense[first] = second
    assert found["matches0"] == dense.tolist()
    scores = np.array(found["matching_scores0"])
    assert np.array_equal(scores[first], matches[:, 2]) and matches[:, 2].min() > 0.2
    moved = transform(np.array(found["keypoints0"])[first], TURN)
    error = np.linalg.norm(moved - np.array(found["keypoints1"])[second], axis=1)
    assert (error < 3).mean() > 0.8
    assert corner_error(np.array(found["H_0to1"]), TURN, (600, 400)) < 3
    assert cv2.imread(str(out)).shape[1] > 1200


def test_keypoints_are_pixels_of_the_stored_image_whatever_the_resize(work, capsys):
    keypoints = []
    for resize in (0, 300):
        words = ("--resize", resize, "--json", work / "m.json")
        assert run(work, work / "a.png", work / "a.png", *words) == 0
        record = json.loads((work / "m.json").read_text())
        assert record["image_size0"] == [600, 400]
        keypoints.append(np.array(record["keypoints0"]))
    # most keypoints found in the half-size image lie within a pixel of one found at full size
    apart = keypoints[1][:, None] - keypoints[0][None]
    nearest = np.linalg.norm(apart, axis=2).argmin(1)
    shift = apart[np.arange(len(apart)), nearest]
    near = np.linalg.norm(shift, axis=1) < 1.0
    assert near.mean() > 0.5 and np.abs(np.median(shift[near], axis=0)).max() < 0.2


def test_options_are_obeyed_and_images_without_structure_are_no_error(work, capsys):
    words = ("--max-keypoints", "50", "--threshold", "1.0")
    assert run(work, work / "a.png", work / "b.jpg", *words) == 0
    printed = capsys.readouterr().out
    assert "keypoints 50 and 50, matches 0" in printed and "homography inliers 0" in printed
    files = ("--out", work / "m.png", "--json", work / "m.json")
    assert run(work, work / "a.png", work / "flat.png", *files) == 0
    assert json.loads((work / "m.json").read_text())["matches"] == []
    assert (work / "m.png").is_file()


@pytest.mark.parametrize(
    "words, message",
    [
        ("a.png nowhere.png", "nowhere.png: cannot be read"),
        ("a.png text.jpg", "text.jpg"),
        ("a.png b.jpg --model nowhere.safetensors", "nowhere.safetensors: no such model"),
        ("a.png b.jpg --max-keypoints 0", "--max-keypoints 0"),
        ("a.png b.jpg --threshold 2", "--threshold 2.0"),
        ("a.png b.jpg --resize -5", "--resize -5"),
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
