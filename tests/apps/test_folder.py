"""Which pairs are matched, what their files are called and hold, and how stopped work goes on."""

import functools
import itertools
import unicodedata
from pathlib import Path, PureWindowsPath

import cv2
import numpy as np
import pytest
from made_scenes import TURN, write_model
from reading import read_files, read_json

from superglue_sift import Matcher, RequestError, errors
from superglue_sift.apps import cli, pairing


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
    for words in ("--pictures", "--pictures --json-files"):
        assert run(f"photos --out-dir found {words}") == 0
    assert read_files(work / "found") == read_files(work / "whole")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("torn", "cup0_cup1_matches.npz: is damaged, or of another program; --overwrite"),
        ("foreign", "cup0_cup1_matches.npz: is damaged, or of another program; --overwrite"),
        ("image", "_cup1_matches.npz: was made with other images or settings; --overwrite matches"),
        (
            "--scene --max-keypoints 300 --resize 1024",
            "was made without --scene, which --colmap implies",
        ),
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
    for name in ("photos/found", "photos/second"):
        assert run(f"photos --out-dir {name} --pictures") == 0
        assert len(npz_names(name)) == 6


@pytest.mark.parametrize("words", ["--pairing nearest --k 1", "--k 1"])
def test_nearest_finds_the_other_view_of_each_scene(work, words):
    assert run(f"photos --out-dir found {words}") == 0
    assert npz_names("found") == {"cats-cat0_cats-cat1_matches.npz", "cup0_cup1_matches.npz"}


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


@pytest.mark.parametrize(
    "files, names",
    [
        ("a.jpg b/c.png", "a b-c"),
        ("a.jpg a.png", "a.jpg a.png"),  # one stem twice
        ("a.jpg A.png", "a.jpg A.png"),  # one file name on Windows and macOS
        ("a.jpg a_b.jpg b_c.jpg", "a.jpg a_b.jpg b_c.jpg"),  # a_b_c would be two pairs
        ("img_1.jpg img_10.jpg", "img_1 img_10"),
        ("bare", "bare"),
    ],
)
def test_a_name_of_two_images_means_one_pair(files, names):
    paths = [Path("root") / file for file in files.split()]
    assert [photo.name for photo in pairing.name_photos(paths, Path("root"))] == names.split()


def test_two_images_of_one_name_are_refused():
    with pytest.raises(RequestError, match=r"a-b\.png: the results of two images"):
        pairing.name_photos([Path("a/b.png"), Path("a-b.png")], Path("."))


def test_names_of_windows_have_neither_drives_nor_backslashes():
    root = PureWindowsPath("C:/photos")
    paths = [PureWindowsPath(name) for name in ("C:/photos/cats/a.jpg", "D:/b.jpg")]
    assert [photo.name for photo in pairing.name_photos(paths, root)] == ["cats-a", "b"]


def names_of(pairs):
    return [[item.image.name for item in pair] for pair in pairs]


def test_names_with_spaces_in_a_list_of_pairs(tmp_path):
    lines = ['"a 1.jpg" b.jpg', "a 1.jpg\tc d.jpg", "it's.jpg  b.jpg", "# a b", ""]
    text = "\n".join([*lines, '"a 1.jpg"\t"b.jpg"'])
    (tmp_path / "pairs.txt").write_text(text, encoding="utf-8-sig")  # as Windows' Notepad does
    pairs = pairing.listed_pairs(tmp_path / "pairs.txt", tmp_path)
    assert names_of(pairs) == [["a 1.jpg", "b.jpg"], ["a 1.jpg", "c d.jpg"], ["it's.jpg", "b.jpg"]]


POSE = " ".join(["0.5"] * 34)


@pytest.mark.parametrize(
    "text, encoding",
    [
        ("a.jpg b.jpg 0 0\n", "utf-8"),  # SuperGlue's two rotations
        (f"a.jpg b.jpg 0 0 {POSE}\n", "utf-8"),  # and intrinsics and pose
        ("a.jpg b.jpg\r\n", "utf-16"),  # PowerShell's `>`
    ],
)
def test_lists_as_other_programs_write_them(tmp_path, text, encoding):
    (tmp_path / "pairs.txt").write_bytes(text.encode(encoding))
    pairs = pairing.listed_pairs(tmp_path / "pairs.txt", tmp_path)
    assert names_of(pairs) == [["a.jpg", "b.jpg"]]


@pytest.mark.parametrize("on_disk, in_list", [("NFC", "NFD"), ("NFD", "NFC")])
def test_a_name_from_a_mac_is_the_file_of_the_same_letters(tmp_path, on_disk, in_list):
    (tmp_path / unicodedata.normalize(on_disk, "café.jpg")).touch()
    text = unicodedata.normalize(in_list, "café.jpg b.jpg")
    (tmp_path / "pairs.txt").write_text(text, encoding="utf-8")
    ((photo, _),) = pairing.listed_pairs(tmp_path / "pairs.txt", tmp_path)
    assert photo.image.exists()


def test_photographs_without_keypoints_look_like_none():
    words = np.eye(2, 128, dtype=np.float32)
    assert not pairing.vlad(words[:0], words).any()
    assert pairing.nearest_pairs(["alone"], lambda _name: words, 1) == []
