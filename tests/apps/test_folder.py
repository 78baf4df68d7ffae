"""Which pairs are matched, what their files are called and hold, and how stopped work goes on."""

import functools
import itertools
import os
import re
import unicodedata
from pathlib import Path, PureWindowsPath

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_scenes import TURN, write_model
from reading import read_files, read_json

from superglue_sift import Matcher, RequestError, errors, match_folder
from superglue_sift.apps import cli, pairing, results


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
    words = cli.add_command(words.split())
    defaults = ["--model", "model.safetensors", "--device", "cpu", "--max-keypoints", "300"]
    return errors.run_main(cli.main, [*words[:1], *defaults, *words[1:]])


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
    np.testing.assert_allclose(found["refined1"][index], expected.refined1, atol=1e-3)
    assert "6 pairs matched" in capsys.readouterr().out
    assert len(read_json(work / "found/cup0_cup1_matches.json")["matches"]) == len(index)


def test_bad_images_are_listed_by_their_paths_as_given(work, capsys):
    Path("photos/nested").mkdir()
    Path("photos/nested/torn.jpg").write_bytes(b"")
    Path("pairs.txt").write_text("cup0.png nested/torn.jpg\ncup0.png gone.png\n")
    asked = ("photos", "photos/cup0.png photos/nested/torn.jpg", "list pairs.txt --root photos")
    found = []
    for number, words in enumerate(asked):
        assert run(f"{words} --out-dir {number}") == 1
        found.append(Path(str(number), "bad_images.csv").read_text().splitlines())
    assert "images cannot be read" in capsys.readouterr().err
    assert len(npz_names("0")) == 6
    assert found[0] == found[1] == ["image,reason", "photos/nested/torn.jpg,empty file"]
    assert found[2][2] == "photos/gone.png,cannot be read: No such file or directory"


def test_features_are_computed_once_and_damaged_ones_again(work, monkeypatch):
    run("photos --out-dir one --features features")
    assert len(list((work / "features").iterdir())) == 4
    for number, path in enumerate((work / "features").iterdir()):
        if number % 2:
            path.write_bytes(path.read_bytes()[:100])
        else:
            np.savez(path, records=np.zeros(3))
    assert run("photos --out-dir two --features features") == 0
    monkeypatch.setattr(
        "superglue_sift.matcher.extract_features", lambda *_: pytest.fail("computed twice")
    )
    assert run("photos --out-dir three --features features") == 0
    assert read_files(work / "one") == read_files(work / "two") == read_files(work / "three")


def test_a_pair_whose_file_fits_is_done(work, capsys, caplog):
    assert run("photos --out-dir found") == 0
    before = read_files(work / "found")
    (work / "found/cup0_cup1_matches.npz").unlink()
    capsys.readouterr()
    assert run("photos --out-dir found") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 pairs matched: found" and lines[1].startswith("5 pairs were matched")
    assert read_files(work / "found") == before and caplog.messages == []


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


def write_masks():
    mask = np.full((400, 600), 255, np.uint8)
    mask[:, :300] = 0
    Path("masks").mkdir()
    cv2.imwrite("masks/cup1.png.png", mask)


def rotate(name):
    cv2.imwrite(name, np.ascontiguousarray(np.rot90(cv2.imread(name), 2)))


def cut(name):
    Path(name).write_bytes(Path(name).read_bytes()[:100])


RESULT = "found/cup0_cup1_matches.npz"
FILES = "photos/cup0.png photos/cup1.png photos/cats/cat0.png --pairing sequential --k 1"
CHANGES = {
    "threshold": (2, results.OTHER_SETTINGS, "--threshold 0.9", None),
    "keypoints": (2, results.OTHER_SETTINGS, "--max-keypoints 200", None),
    "model": (2, results.OTHER_SETTINGS, "", lambda: write_model("model.safetensors", layers=2)),
    "scene": (2, results.OTHER_SETTINGS, "--scene", None),
    "photograph": (2, results.OTHER_PHOTOS, "", lambda: rotate("photos/cup1.png")),
    "mask": (2, results.OTHER_PHOTOS, "--masks masks", write_masks),
    "cut": (1, results.DAMAGED, "", lambda: cut(RESULT)),
    "foreign": (
        1, results.OTHER_PROGRAM, "", lambda: np.savez(RESULT, matches=np.zeros((0, 2)))
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_results_that_do_not_fit_are_made_again_with_all_their_files(work, caplog, change):
    assert run(f"{FILES} --out-dir found --pictures --json-files") == 0
    count, reason, words, act = CHANGES[change]
    if act:
        act()
    assert run(f"{FILES} --out-dir found {words}") == 0  # the pictures are not asked for again
    assert caplog.messages == [f"{count} pairs are matched again: {count} {reason}"]
    assert run(f"{FILES} --out-dir new --pictures --json-files {words}") == 0
    files = [read_files(work / name) for name in ("found", "new")]
    assert {name: data for name, data in files[0].items() if "features" not in name} == {
        name: data for name, data in files[1].items() if "features" not in name
    }


def test_an_accepted_pair_is_judged_again_by_another_limit(work):
    words = "photos/cup0.png photos/cup1.png --out-dir found --scene --network-keypoints 300"
    for limit, accepted in (("0", "1"), ("1", "0")):
        assert run(f"{words} --min-matches 0 --accept {limit}") == 0
        assert Path("found/pairs.csv").read_text().splitlines()[1].split(",")[4] == accepted
    # A table of a scene does not stay beside results that are of none.
    assert run(words.replace(" --scene", "")) == 0
    assert not Path("found/pairs.csv").exists()


def test_a_damaged_picture_or_json_file_is_made_again_of_the_matches(work, monkeypatch):
    assert run("photos --out-dir found --pictures --json-files") == 0
    before = read_files(work / "found")
    for ending in ("jpg", "json"):
        cut(f"found/cup0_cup1_matches.{ending}")
    forbid_matching(monkeypatch)
    assert run("photos --out-dir found --pictures --json-files") == 0
    assert read_files(work / "found") == before


def test_results_of_other_pairs_are_counted_and_stay(work, capsys):
    assert run("photos --out-dir found") == 0
    before = read_files(work / "found")
    capsys.readouterr()
    assert run("photos/cup0.png photos/cup1.png --out-dir found") == 0
    assert "5 results of other pairs are in found" in capsys.readouterr().out
    assert before.items() <= read_files(work / "found").items()


def test_a_photograph_that_is_replaced_during_the_work_ends_it_in_one_line(work, monkeypatch):
    matcher = Matcher.load("model.safetensors", "cpu", max_keypoints=300)
    match_batch = Matcher.match_batch

    def replace_then_match(*arguments):
        rotate("photos/cup1.png")
        yield from match_batch(*arguments)

    monkeypatch.setattr(Matcher, "match_batch", replace_then_match)
    with pytest.raises(RequestError, match=r"photos/cup1\.png: .* replaced while it was matched"):
        match_folder(matcher, "photos", "found")


def test_a_folder_is_matched_from_python_as_by_the_command(work):
    matcher = Matcher.load("model.safetensors", "cpu", max_keypoints=300)
    assert run("photos --out-dir command --pairing sequential --k 2") == 0
    threads = torch.get_num_threads()
    report = match_folder(matcher, "photos", "python", pairing="sequential", k=2)
    assert report.matched == 5 and report.bad_images == {}
    assert matcher.workers == 1 and torch.get_num_threads() == threads
    assert read_files(work / "command") == read_files(work / "python")
    again = match_folder(matcher, "photos", "python", pairing="sequential", k=2)
    assert (again.matched, again.unchanged) == (0, 5)
    pairs = [("cup0.png", "cup1.png"), ("cup0.png", "gone.png"), ("cup0.png", "cup1.png")]
    report = match_folder(matcher, "photos", "listed", pairs=pairs, pictures=True)
    assert report.matched == 1 and list(report.bad_images) == ["photos/gone.png"]
    assert Path("listed/cup0_cup1_matches.jpg").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pairing": "nearby"}, "pairing nearby: must be auto, exhaustive, sequential, nearest"),
        ({"pairing": "exhaustive", "k": 3}, "k goes with"),
        ({"k": 0}, "k 0: must be a whole number, 1 or more"),
        ({"pairs": []}, "pairs: there are none"),
        ({"pairs": [("cup0.png", "./cup0.png")]}, "cup0.png with itself"),
        ({"masks": "model.safetensors"}, "masks model.safetensors: no such folder"),
        ({"masks": "empty"}, "masks empty: holds no mask"),
    ],
)
def test_wrong_arguments_are_one_line_before_any_work(work, arguments, message):
    matcher = Matcher.load("model.safetensors", "cpu")
    Path("empty").mkdir()
    with pytest.raises(RequestError, match=re.escape(message)):
        match_folder(matcher, "photos", "found", **arguments)
    assert not Path("found").exists()


# --- pictures, pairs and names


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
    pairs = pairing.choose_pairs("abcd", None, "sequential", k)
    assert len(set(pairs)) == len(pairs) == count


@pytest.mark.parametrize("count", [2, 16, 17, 40])
def test_exhaustive_pairs_are_each_two_once_and_seldom_far_apart(count):
    pairs = list(pairing.ExhaustivePairs(range(count)))
    assert len(pairs) == len(pairing.ExhaustivePairs(range(count)))
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


names = st.text(st.characters(blacklist_characters="/\0"), min_size=1, max_size=300)


@given(names, names, st.integers(60, 255))
def test_the_names_of_a_pair_fit_any_limit(name0, name1, limit):
    name0, name1 = (os.fsdecode(name.encode("utf-8", "surrogatepass")) for name in (name0, name1))
    stem = results.make_pair_stem(name0, name1, limit)
    assert len(f"{stem}_matches.json".encode("utf-8", "surrogateescape")) <= limit
    assert results.make_pair_stem(name0, name1, limit) == stem
    plain = f"{name0}_{name1}"
    assert stem == plain or len(plain.encode("utf-8", "surrogateescape")) > limit - 13


def test_long_names_that_begin_alike_are_different_pairs():
    stems = {results.make_pair_stem("a" * 200 + tail, "b" * 200) for tail in ("1", "2", "")}
    assert len(stems) == 3


def test_photographs_with_long_names_are_matched(work, photo):
    for letter in "ab":
        cv2.imwrite(f"photos/{letter * 200}é.png", photo)
    assert run("photos --out-dir found --pairing sequential --k 1 --pictures --json-files") == 0
    (path,) = Path("found").glob("aaa*_bbb*.npz")
    with np.load(path) as arrays:
        assert [str(arrays["image0"]), str(arrays["image1"])] == ["a" * 200 + "é", "b" * 200 + "é"]
    assert path.with_suffix(".jpg").exists() and path.with_suffix(".json").exists()
    assert run("photos --out-dir found --pairing sequential --k 1") == 0
    assert len(npz_names("found")) == 5


def names_of(pairs):
    return [[photo.path.name for photo in pair] for pair in pairs]


def test_names_with_spaces_in_a_list_of_pairs(tmp_path):
    lines = ['"a 1.jpg" b.jpg', "a 1.jpg\tc d.jpg", "it's.jpg  b.jpg", "# a b", ""]
    text = "\n".join([*lines, '"a 1.jpg"\t"b.jpg"'])
    (tmp_path / "pairs.txt").write_text(text, encoding="utf-8-sig")  # as Windows' Notepad does
    pairs = pairing.read_pair_list(tmp_path / "pairs.txt", tmp_path)
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
    pairs = pairing.read_pair_list(tmp_path / "pairs.txt", tmp_path)
    assert names_of(pairs) == [["a.jpg", "b.jpg"]]


@pytest.mark.parametrize("on_disk, in_list", [("NFC", "NFD"), ("NFD", "NFC")])
def test_a_name_from_a_mac_is_the_file_of_the_same_letters(tmp_path, on_disk, in_list):
    (tmp_path / unicodedata.normalize(on_disk, "café.jpg")).touch()
    text = unicodedata.normalize(in_list, "café.jpg b.jpg")
    (tmp_path / "pairs.txt").write_text(text, encoding="utf-8")
    ((photo, _),) = pairing.read_pair_list(tmp_path / "pairs.txt", tmp_path)
    assert photo.path.exists()


def test_photographs_without_keypoints_look_like_none():
    words = np.eye(2, 128, dtype=np.float32)
    assert not pairing.compute_vlad(words[:0], words).any()
    assert pairing.find_nearest_pairs(["alone"], lambda _name: words, 1) == []
