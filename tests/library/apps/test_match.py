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
    count = len(found["matches"])
    assert count > 30 and f"matches {count}" in printed and "homography inliers" in printed
    keypoints0 = np.array(found["keypoints0"])
    keypoints1 = np.array(found["keypoints1"])
    assert len(found["matches0"]) == len(found["matching_scores0"]) == len(keypoints0)
    for i, j, score in found["matches"]:
        assert found["matches0"][i] == j and found["matching_scores0"][i] == score > 0.2
    assert sum(j >= 0 for j in found["matches0"]) == count
    first, second, _ = np.array(found["matches"]).T.astype(int)
    error = np.linalg.norm(transform(keypoints0[first], TURN) - keypoints1[second], axis=1)
    assert (error < 3).mean() > 0.8
    assert corner_error(np.array(found["H_0to1"]), TURN, (600, 400)) < 3
    assert cv2.imread(str(out)).shape[1] > 1200


def test_keypoints_are_pixels_of_the_stored_image_whatever_the_resize(work, capsys):
    records = {}
    for resize in (0, 300):
        assert (
            run(work, work / "a.png", work / "a.png", "--resize", resize, "--json", work / "m.json")
            == 0
        )
        records[resize] = json.loads((work / "m.json").read_text())
    assert records[300]["image_size0"] == [600, 400]
    keypoints = {name: np.array(record["keypoints0"]) for name, record in records.items()}
    # most keypoints found in the half-size image lie within a pixel of one found at full size
    distance = np.linalg.norm(keypoints[300][:, None] - keypoints[0][None], axis=2).min(axis=1)
    assert np.median(distance) < 1.0
    shift = (
        keypoints[300]
        - keypoints[0][
            np.linalg.norm(keypoints[300][:, None] - keypoints[0][None], axis=2).argmin(1)
        ]
    )
    assert np.abs(np.median(shift[distance < 1.0], axis=0)).max() < 0.2


def test_options_are_obeyed(work, capsys):
    assert (
        run(work, work / "a.png", work / "b.jpg", "--max-keypoints", "50", "--threshold", "1.0")
        == 0
    )
    printed = capsys.readouterr().out
    assert "keypoints 50 and 50, matches 0" in printed and "homography inliers 0" in printed


def test_images_without_structure(work, capsys):
    out = work / "m.png"
    assert (
        run(work, work / "flat.png", work / "flat.png", "--out", out, "--json", work / "m.json")
        == 0
    )
    assert json.loads((work / "m.json").read_text())["matches"] == []
    assert "keypoints 0 and 0, matches 0" in capsys.readouterr().out and out.is_file()
    assert run(work, work / "a.png", work / "flat.png") == 0


@pytest.mark.parametrize(
    "words, message",
    [
        (["a.png", "nowhere.png"], "nowhere.png: cannot be read"),
        (["a.png", "text.jpg"], "text.jpg"),
        (
            ["a.png", "b.jpg", "--model", "nowhere.safetensors"],
            "nowhere.safetensors: no such model",
        ),
        (["a.png", "b.jpg", "--max-keypoints", "0"], "--max-keypoints 0"),
        (["a.png", "b.jpg", "--threshold", "2"], "--threshold 2.0"),
        (["a.png", "b.jpg", "--resize", "-5"], "--resize -5"),
        (["a.png", "b.jpg", "--out", "m.pdf"], "m.pdf: must end in"),
        (["a.png", "b.jpg", "--json", "text.jpg/m.json"], "text.jpg/m.json: cannot be written"),
        (
            ["a.png", "b.jpg", "--out", "folder.png"],
            "folder.png: cannot be written: Is a directory",
        ),
        (
            ["--pairs", "pairs.txt", "--out-dir", "text.jpg/found"],
            "text.jpg/found: cannot be written",
        ),
    ],
)
def test_wrong_requests_are_one_line(work, monkeypatch, capsys, words, message):
    monkeypatch.chdir(work)
    (work / "text.jpg").write_text("hello")
    (work / "folder.png").mkdir(exist_ok=True)
    before = [] if "--model" in words else ["--model", "model.safetensors"]
    assert errors.run(match.main, [*before, *words]) == 2
    found = capsys.readouterr().err
    assert message in found and found.count("\n") == 1
