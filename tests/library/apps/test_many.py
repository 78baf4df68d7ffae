"""Many pairs: a folder, a list, a video; stopped work is resumed, bad images are listed."""

import functools
import hashlib
import itertools
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from made_scenes import TURN, write_model
from reading import read_files, read_json

from superglue_sift import Matcher, RequestError, __version__, errors
from superglue_sift.apps import cli, pairing, results, retrieval
from superglue_sift.files import write_atomic
from superglue_sift.geometry.two_view import corner_error


@pytest.fixture
def work(tmp_path, photo, color_photo):
    """A model and a folder of two views each of two scenes, one of them nested."""
    write_model(tmp_path / "model.safetensors")
    (tmp_path / "photos/cats").mkdir(parents=True)
    cat = cv2.cvtColor(color_photo, cv2.COLOR_RGB2GRAY)
    for name, scene in (("cup", photo), ("cats/cat", cat)):
        for view, H in enumerate((np.eye(3), TURN)):
            path = tmp_path / "photos" / f"{name}{view}.png"
            cv2.imwrite(str(path), cv2.warpPerspective(scene, H, scene.shape[::-1]))
    return tmp_path


def run(folder, *words):
    extra = ["--model", folder / "model.safetensors", "--device", "cpu", "--max-keypoints", "300"]
    return errors.exit_code(cli.main, [str(word) for word in [*words, *extra]])


def match(work, folder, *words):
    """Match the folder of photographs."""
    return run(work, work / "photos", "--out-dir", work / folder, *words)


def npz_names(folder):
    return {path.name for path in folder.glob("*_matches.npz")}


def forbid_matching(monkeypatch):
    monkeypatch.setattr(
        "superglue_sift.matcher.match_pairs", lambda *_: pytest.fail("matched twice")
    )


def test_all_pairs_of_a_folder_in_the_layout_that_others_read(work, capsys):
    assert match(work, "found", "--threshold", "0.3", "--json-files") == 0
    names = ["cats-cat0", "cats-cat1", "cup0", "cup1"]
    pairs = {f"{a}_{b}_matches.npz" for a, b in itertools.combinations(names, 2)}
    assert npz_names(work / "found") == pairs
    with np.load(work / "found/cup0_cup1_matches.npz", allow_pickle=False) as file:
        found = dict(file)
    given = {"keypoints0", "keypoints1", "matches", "match_confidence", "frame", "turned"}
    assert set(found) == {*given, "made_from", *results.ALIGNED}
    matcher = Matcher.load(work / "model.safetensors", "cpu", max_keypoints=300, threshold=0.3)
    photos = [work / "photos" / name for name in ("cup0.png", "cup1.png")]
    expected = matcher.match(*photos)
    np.testing.assert_array_equal(found["keypoints0"], expected.keypoints0)
    index = np.flatnonzero(found["matches"] >= 0)
    np.testing.assert_array_equal(np.stack([index, found["matches"][index]], 1), expected.matches)
    np.testing.assert_array_equal(found["match_confidence"][index], expected.scores)
    np.testing.assert_allclose(found["aligned1"][index], expected.aligned1, atol=1e-3)
    assert "6 pairs matched" in capsys.readouterr().out
    made = json.loads(str(found["made_from"]))
    digests = [
        hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (*photos, work / "model.safetensors")
    ]
    assert [made[name] for name in ("image0", "image1", "weights")] == digests
    assert made["threshold"] == 0.3 and made["superglue_sift"] == __version__
    record = read_json(work / "found/cup0_cup1_matches.json")
    assert record["made_from"] == made


def test_bad_images_are_listed_by_their_paths_as_given(work, monkeypatch, capsys):
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
    assert "1 image cannot be read, the others are matched" in capsys.readouterr().err
    assert len(npz_names(Path("0"))) == 6
    assert found[0] == found[1] == ["image,reason", "photos/nested/torn.jpg,empty file"]
    assert found[2][2] == "photos/gone.png,cannot be read: No such file or directory"


def test_features_are_computed_once_and_damaged_ones_again(work, monkeypatch):
    features = ("--features", work / "features")
    match(work, "one", *features)
    assert len(list((work / "features").iterdir())) == 4
    for path in (work / "features").iterdir():
        path.write_bytes(path.read_bytes()[:100])
    assert match(work, "two", *features) == 0
    monkeypatch.setattr("superglue_sift.matcher.extract", lambda *_: pytest.fail("computed twice"))
    assert match(work, "three", *features) == 0
    assert read_files(work / "one") == read_files(work / "two") == read_files(work / "three")


def test_what_is_done_is_not_redone(work, capsys, monkeypatch):
    assert match(work, "found") == 0
    (work / "found/cup0_cup1_matches.npz").unlink()
    assert match(work, "found") == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == f"1 pairs matched of 6, the others before: {work / 'found'}"
    forbid_matching(monkeypatch)
    assert match(work, "found") == 0
    for path in (work / "photos/cats").iterdir():
        path.unlink()
    assert match(work, "found") == 0
    assert "also holds 5 pairs of other commands, which are kept" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "why", "again"),
    [
        ("image1", "was made with another image1", 3),
        ("threshold", "was made with another threshold", 6),
        ("weights", "was made with another weights", 6),
        ("torn", "does not state its inputs", 1),
    ],
)
def test_a_pair_of_other_inputs_or_a_damaged_one_is_matched_again(
    work, photo, capsys, change, why, again
):
    assert match(work, "found", "--pictures") == 0
    words = ["--threshold", "0.9"] if change == "threshold" else []
    path = work / "found/cup0_cup1_matches.npz"
    if change == "image1":
        cv2.imwrite(str(work / "photos/cup1.png"), np.ascontiguousarray(np.rot90(photo, 2)))
    elif change == "weights":
        write_model(work / "model.safetensors", sinkhorn_iterations=3)
    elif change == "torn":
        path.write_bytes(path.read_bytes()[:200])
    assert match(work, "found", *words) == 0
    said = capsys.readouterr()
    assert f"{why}; it is computed again" in said.err
    assert f"; {again} of them again, since their inputs changed" in said.out.replace(
        "6 pairs matched:", ""
    )
    assert match(work, "new", *words) == 0
    # no picture of earlier matches either
    new = read_files(work / "new")
    assert {name: read_files(work / "found").get(name) for name in new} == new
    assert len(list((work / "found").glob("*_matches.*"))) == 6 + (6 - again)


def test_files_asked_for_later_are_made_of_the_matches_that_are_there(work, monkeypatch, capsys):
    asked = ("--pictures", "--json-files", "--homography")
    assert match(work, "whole", *asked) == 0
    assert match(work, "found") == 0
    forbid_matching(monkeypatch)
    for count in range(1, 4):
        assert match(work, "found", *asked[:count]) == 0
        assert "of the others were completed" in capsys.readouterr().out
    assert read_files(work / "found") == read_files(work / "whole")
    assert {"cup0_cup1_overlay.jpg", "cup0_cup1_blink.gif"} <= set(read_files(work / "found"))
    assert match(work, "found", *asked) == 0
    assert "completed" not in capsys.readouterr().out


def test_the_output_is_never_input(work, capsys):
    # neither that of this command nor of another
    for folder in ("photos/found", "photos/found", "photos/second"):
        assert match(work, folder, "--pictures") == 0
        assert len(npz_names(work / folder)) == 6
    cv2.imwrite(str(work / "photos/second/own.png"), np.zeros((50, 50), np.uint8))
    capsys.readouterr()
    assert match(work, "photos/second") == 0
    assert "second: 1 images there are ignored: it is the output" in capsys.readouterr().err
    assert match(work, "photos") == 2
    assert "is the folder of the photographs" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--pairing", "nearest", "--k", "1"), ("--k", "1")])
def test_nearest_finds_the_other_view_of_each_scene(work, words):
    assert match(work, "found", *words) == 0
    assert npz_names(work / "found") == {"cats-cat0_cats-cat1_matches.npz", "cup0_cup1_matches.npz"}


def test_an_error_of_writing_names_the_file_and_not_a_temporary_one(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError) as error:
        write_atomic(tmp_path / "folder", b"")
    assert error.value.filename == str(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


@pytest.mark.parametrize("k, count", [(1, 3), (2, 5), (9, 6)])
def test_sequential_pairs_each_with_those_before_it(k, count):
    pairs, total = pairing.choose_pairs("abcd", None, "sequential", k)
    assert len(set(pairs)) == total == count


@pytest.mark.parametrize("count", [2, 16, 17, 40])
def test_exhaustive_pairs_are_each_two_once_and_seldom_far_apart(count):
    pairs = list(pairing.exhaustive(range(count)))
    assert sorted(pairs) == list(itertools.combinations(range(count), 2))
    store = functools.lru_cache(32)(lambda item: item)
    for item in itertools.chain.from_iterable(pairs):
        store(item)
    assert store.cache_info().misses <= 2 * count


def test_a_video_is_matched_frame_by_frame(work, photo, capsys):
    for name, step in (("walk", 10), ("back", -10)):
        codec = cv2.VideoWriter_fourcc(*"MJPG")
        writer = cv2.VideoWriter(str(work / f"{name}.avi"), codec, 10, photo.shape[::-1])
        if not writer.isOpened():
            pytest.skip("this OpenCV writes no video")
        for number in range(6):
            writer.write(cv2.cvtColor(np.roll(photo, step * number, axis=1), cv2.COLOR_GRAY2BGR))
        writer.release()
    words = ("--every", 2, "--k", 1, "--json-files")
    for name in ("walk", "walk", "back", "walk"):  # other frames of the same numbers
        assert run(work, work / f"{name}.avi", "--out-dir", work / "found", *words) == 0
    counts = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    again = "2 pairs matched; 2 of them again, since their inputs changed"
    assert counts == ["2 pairs matched", "0 pairs matched", again, again]
    pairs = ["frame000000_frame000002", "frame000002_frame000004"]
    assert npz_names(work / "found") == {f"{pair}_matches.npz" for pair in pairs}
    for pair in pairs:
        H = np.array(read_json(work / "found" / f"{pair}_matches.json")["H_0to1"])
        assert corner_error(H, np.array([[1.0, 0, 20], [0, 1, 0], [0, 0, 1]]), (600, 400)) < 1


@pytest.mark.parametrize(
    "files, names",
    [
        ("a.jpg b/c.png", "a b-c"),
        ("a.jpg a.png", "a.jpg a.png"),  # one stem twice
        ("a.jpg a_b.jpg b_c.jpg", "a.jpg a_b.jpg b_c.jpg"),  # a_b_c would be two pairs
        ("img_1.jpg img_10.jpg", "img_1 img_10"),
        ("bare", "bare"),
    ],
)
def test_a_name_of_two_images_means_one_pair(files, names):
    paths = [Path("root") / file for file in files.split()]
    assert [photo.name for photo in pairing.name_photos(paths, Path("root"))] == names.split()
    with pytest.raises(RequestError, match=r"a-b\.png: the results of two images"):
        pairing.name_photos([Path("a/b.png"), Path("a-b.png")], Path("."))
    with pytest.raises(RequestError, match=r"too long for A_B_matches\.npz"):
        pairing.name_photos([Path("a" * 122), Path("b" * 122)], Path("."))


@pytest.mark.parametrize(
    "words, message",
    [
        ("", "name two images"),
        ("a.png b.png c.png", "--out-dir DIR"),
        ("photos b.png --out-dir x", "photos: a folder among 2 inputs"),
        ("a.png b.png --out-dir x --out m.png", "are for two images; with --out-dir, use"),
        ("photos --json m.json --out-dir x", "are for two images; with --out-dir, use"),
        ("a.png b.png --every 2", "--every goes with a video"),
        ("a.png b.png --k 2", "--k goes with a folder"),
        ("--pairs three.txt --out-dir x", "three.txt:1: needs two names, has 'a b.png c.png'; put"),
        ("--pairs pairs.csv --out-dir .", "pairs.csv: a table of results would overwrite it"),
        ("--pairs same.txt --out-dir x", "same.txt:1: ./a.png with itself"),
        ("a.png b.png --root photos", "--root goes with --pairs"),
        ("a.png b.png --out m.png --json m.png", "m.png: is another result"),
        ("m_overlay.jpg b.png --out m.png --homography", "m_overlay.jpg: is an input"),
        ("photos --out-dir x --features text.avi", "text.avi: cannot be written"),
        ("--pairs wide.txt --out-dir x", "wide.txt:1: needs two names"),
        ("a.png b.png --out a.png", "a.png: is an input, and would be overwritten"),
        ("--serve --out-dir x", "--out-dir goes with"),
        ("nowhere.JPG --out-dir x", "nowhere.JPG: one image; matching needs two: superglue-match"),
        ("nowhere --out-dir x", "nowhere: no such folder or video"),
        ("text.avi --out-dir x", "text.avi: OpenCV cannot open it"),
        ("--pairs nowhere.txt --out-dir x", "nowhere.txt: cannot be read: No such file"),
        ("--pairs text.avi --out-dir x --k 0", "--k 0: must be a whole number, 1 or more"),
        ("a.png b.png --accept 0.3", "--accept goes with --scene"),
        ("a.png b.png --scene --accept 12", "--accept 12.0: must be between 0 and 1"),
        ("photos --out-dir x --dry-run", "--dry-run goes with"),
        ("photos --out-dir x --colmap text.avi", "text.avi: exists already; name another"),
        ("a.png b.png --out-dir x --colmap x.db", "--colmap goes with a folder or --pairs"),
        ("a.png b.png --homography", "--homography goes with --out or --out-dir"),
        ("--serve --port 99999", "--port 99999: must be between 0 and 65535"),
        ("a.png b.png --port 0", "--port goes with --serve"),
        ("photos --out-dir x --pairing exhaustive --k 3", "--k goes with --pairing sequential"),
        ("--serve --frame stored", "--frame stored goes with photographs"),
    ],
)
def test_wrong_requests_are_one_line(work, monkeypatch, capfd, words, message):
    monkeypatch.chdir(work)
    (work / "text.avi").write_text("hello")
    (work / "three.txt").write_text("a b.png c.png\n")
    (work / "same.txt").write_text("./a.png a.png\n")
    (work / "wide.txt").write_text("a" * 200_000)
    assert run(work, *words.split()) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and message in lines[0]


def test_files_that_the_shell_lists_are_matched_as_their_folder_is(work):
    shutil.copy(work / "photos/cats/cat0.png", work / "photos/cat0.png")
    names = sorted((work / "photos").glob("*.png"))
    assert run(work, *names, "--out-dir", work / "found") == 0
    shutil.rmtree(work / "photos/cats")
    assert match(work, "whole") == 0
    assert read_files(work / "found") == read_files(work / "whole") and len(names) == 3


def test_names_with_spaces_in_a_list_of_pairs(tmp_path):
    lines = ['"a 1.jpg" b.jpg', "a 1.jpg\tc d.jpg", "it's.jpg  b.jpg", "# a b", ""]
    text = "\n".join([*lines, '"a 1.jpg"\t"b.jpg"'])
    (tmp_path / "pairs.txt").write_text(text, encoding="utf-8-sig")  # as Windows' Notepad does
    pairs = pairing.listed_pairs(tmp_path / "pairs.txt", tmp_path)
    names = [[item.image.name for item in pair] for pair in pairs]
    assert names == [["a 1.jpg", "b.jpg"], ["a 1.jpg", "c d.jpg"], ["it's.jpg", "b.jpg"]]


def test_pairs_that_are_accepted_with_a_third_are_proposed_best_first():
    known = retrieval.Expansion("abcde")

    def add(pair, score):
        known(*pair, SimpleNamespace(pair_score=score, accepted=score >= 10))

    for pair, score in (("ba", 50), ("bc", 30), ("cd", 40), ("de", 9), ("ad", 0)):
        add(pair, score)
    # a and c through b, 30; b and d through c, 30; a and d were tried; nothing through d and e, who
    # do not go together
    assert known.propose() == [("a", "c"), ("b", "d")]
    add("ac", 60)
    assert known.propose() == [("b", "d")]
    add("be", 70)
    # a and e through b, 50; c and e, 30; b and d, 30: with one for each image a-e, then b-d, and
    # c-e for c
    assert known.propose(1) == [("a", "e"), ("b", "d"), ("c", "e")]
    assert retrieval.Expansion("ab").propose() == []


@pytest.mark.parametrize(
    ("module", "words", "extra"),
    [("pycolmap", "photos --out-dir x --colmap x.db", "colmap"), ("flask", "--serve", "serve")],
)
def test_a_missing_package_is_named_before_any_work(
    work, monkeypatch, capsys, module, words, extra
):
    monkeypatch.chdir(work)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(Matcher, "load", lambda *_, **__: pytest.fail("the model was loaded first"))
    assert run(work, *words.split()) == 2
    assert f"pip install 'superglue-sift[{extra}]'" in capsys.readouterr().err
    assert not (work / "x").exists()
