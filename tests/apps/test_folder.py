"""Many pairs into files: what they hold, how stopped work goes on, which images are bad."""

import itertools
from pathlib import Path

import cv2
import numpy as np
import pytest
from made_scenes import TURN, write_model
from reading import read_files, read_json

from superglue_sift import Matcher, errors
from superglue_sift.apps import cli


@pytest.fixture
def work(tmp_path, photo, color_photo, monkeypatch):
    """A model and a folder of two views each of two scenes, one of them nested, in this folder."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model.safetensors")
    (tmp_path / "photos/cats").mkdir(parents=True)
    cat = cv2.cvtColor(color_photo, cv2.COLOR_RGB2GRAY)
    for name, scene in (("cup", photo), ("cats/cat", cat)):
        for view, H in enumerate((np.eye(3), TURN)):
            cv2.imwrite(
                f"photos/{name}{view}.png", cv2.warpPerspective(scene, H, scene.shape[::-1])
            )
    return tmp_path


def run(words):
    extra = ["--model", "model.safetensors", "--device", "cpu", "--max-keypoints", "300"]
    return errors.exit_code(cli.main, [*extra, *words.split()])


def npz_names(name):
    return {path.name for path in Path(name).glob("*_matches.npz")}


def forbid_matching(monkeypatch):
    monkeypatch.setattr(
        "superglue_sift.matcher.match_pairs", lambda *_: pytest.fail("matched twice")
    )


def test_all_pairs_of_a_folder_in_the_layout_that_others_read(work, capsys):
    assert run("photos --out-dir found --threshold 0.3 --json-files") == 0
    names = ["cats-cat0", "cats-cat1", "cup0", "cup1"]
    pairs = {f"{a}_{b}_matches.npz" for a, b in itertools.combinations(names, 2)}
    assert npz_names("found") == pairs
    with np.load("found/cup0_cup1_matches.npz", allow_pickle=False) as file:
        found = dict(file)
    matcher = Matcher.load("model.safetensors", "cpu", max_keypoints=300, threshold=0.3)
    expected = matcher.match("photos/cup0.png", "photos/cup1.png")
    np.testing.assert_array_equal(found["keypoints0"], expected.keypoints0)
    index = np.flatnonzero(found["matches"] >= 0)
    np.testing.assert_array_equal(np.stack([index, found["matches"][index]], 1), expected.matches)
    np.testing.assert_array_equal(found["match_confidence"][index], expected.scores)
    # the numbers of threads decide the last bits of sums over a patch
    np.testing.assert_allclose(found["aligned1"][index], expected.aligned1, atol=1e-3)
    assert "6 pairs matched" in capsys.readouterr().out
    assert len(read_json(work / "found/cup0_cup1_matches.json")["matches"]) == len(index)


def test_bad_images_are_listed_by_their_paths_as_given(work, capsys):
    Path("photos/nested").mkdir()
    Path("photos/nested/torn.jpg").write_bytes(b"")
    Path("pairs.txt").write_text("cup0.png nested/torn.jpg\ncup0.png gone.png\n")
    asked = ("photos", "photos/cup0.png photos/nested/torn.jpg", "--pairs pairs.txt --root photos")
    found = []
    for number, words in enumerate(asked):
        assert run(f"{words} --out-dir {number}") == 1
        found.append(Path(str(number), "bad_images.csv").read_text().splitlines())
    assert "images cannot be read, the others are matched" in capsys.readouterr().err
    assert len(npz_names("0")) == 6
    assert found[0] == found[1] == ["image,reason", "photos/nested/torn.jpg,empty file"]
    assert found[2][2] == "photos/gone.png,cannot be read: No such file or directory"


def test_features_are_computed_once_and_damaged_ones_again(work, monkeypatch):
    run("photos --out-dir one --features features")
    assert len(list((work / "features").iterdir())) == 4
    for path in (work / "features").iterdir():
        path.write_bytes(path.read_bytes()[:100])
    assert run("photos --out-dir two --features features") == 0
    monkeypatch.setattr("superglue_sift.matcher.extract", lambda *_: pytest.fail("computed twice"))
    assert run("photos --out-dir three --features features") == 0
    assert read_files(work / "one") == read_files(work / "two") == read_files(work / "three")


def test_a_pair_whose_file_exists_is_done(work, capsys):
    assert run("photos --out-dir found") == 0
    before = read_files(work / "found")
    (work / "found/cup0_cup1_matches.npz").unlink()
    capsys.readouterr()
    assert run("photos --out-dir found") == 0
    assert capsys.readouterr().out.splitlines() == [
        "1 pairs matched: found",
        "5 pairs were there before, and are kept; --overwrite matches them again",
    ]
    assert read_files(work / "found") == before


def test_overwrite_matches_again_and_leaves_nothing_of_before(work, capsys):
    assert run("photos --out-dir found --pictures") == 0
    assert run("photos --out-dir found --threshold 0.9 --overwrite") == 0
    assert run("photos --out-dir new --threshold 0.9") == 0
    new = read_files(work / "new")
    assert {name: read_files(work / "found").get(name) for name in new} == new
    assert "6 pairs matched: found" in capsys.readouterr().out


def test_files_asked_for_later_are_made_of_the_matches_that_are_there(work, monkeypatch):
    assert run("photos --out-dir whole --pictures --json-files") == 0
    assert run("photos --out-dir found") == 0
    forbid_matching(monkeypatch)
    for words in ("--pictures", "--pictures --json-files", "--json-files"):
        assert run(f"photos --out-dir found {words}") == 0
    assert read_files(work / "found") == read_files(work / "whole")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("torn", "cup0_cup1_matches.npz: is damaged, or of another program; --overwrite"),
        ("foreign", "cup0_cup1_matches.npz: is damaged, or of another program; --overwrite"),
        ("image", "_cup1_matches.npz: is of other images or settings than those of this command"),
        ("--max-keypoints 200", "is of other images or settings"),
        ("--scene --max-keypoints 300 --resize 1024", "is of other images or settings"),
    ],
)
def test_matches_that_do_not_fit_the_command_are_said_in_one_line(
    work, photo, capsys, change, reason
):
    assert run("photos --out-dir found") == 0
    path = work / "found/cup0_cup1_matches.npz"
    if change == "image":
        cv2.imwrite("photos/cup1.png", np.ascontiguousarray(np.rot90(photo, 2)))
    elif change == "torn":
        path.write_bytes(path.read_bytes()[:200])
    elif change == "foreign":
        np.savez(path, matches=np.zeros((0, 2)))
    words = change if change.startswith("--") else ""
    assert run(f"photos --out-dir found --json-files {words}") == 2
    assert reason in capsys.readouterr().err


def test_pictures_of_matches_are_never_matched(work):
    # neither those of this command nor of another
    for name in ("photos/found", "photos/found", "photos/second"):
        assert run(f"photos --out-dir {name} --pictures") == 0
        assert len(npz_names(name)) == 6


@pytest.mark.parametrize("words", ["--pairing nearest --k 1", "--k 1"])
def test_nearest_finds_the_other_view_of_each_scene(work, words):
    assert run(f"photos --out-dir found {words}") == 0
    assert npz_names("found") == {"cats-cat0_cats-cat1_matches.npz", "cup0_cup1_matches.npz"}
