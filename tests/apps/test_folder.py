"""A folder or a list: its photographs and pairs, names and contents of files, and going on."""

import functools
import itertools
import os
import shutil
import time
import unicodedata
from pathlib import Path, PureWindowsPath

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_scenes import TURN, write_model
from reading import read_error, read_files, read_json

from superglue_sift import Matcher, RequestError, errors, match_folder
from superglue_sift.apps import cli, pairing, results
from superglue_sift.apps.store import FeatureStore, PhotoFile
from superglue_sift.features import images, photo_folder


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


def test_all_pairs_of_a_folder_have_files_with_the_matches_of_the_matcher(work, capsys):
    assert run("photos --out-dir results --threshold 0.3 --json-files") == 0
    names = ["cats-cat0", "cats-cat1", "cup0", "cup1"]
    pairs = {f"{a}_{b}_matches.npz" for a, b in itertools.combinations(names, 2)}
    assert npz_names("results") == pairs
    with np.load("results/cup0_cup1_matches.npz", allow_pickle=False) as file:
        arrays = dict(file)
    matcher = Matcher.load("model.safetensors", "cpu", max_keypoints=300, threshold=0.3)
    expected = matcher.match("photos/cup0.png", "photos/cup1.png")
    np.testing.assert_array_equal(arrays["keypoints0"], expected.keypoints0)
    index = np.flatnonzero(arrays["matches"] >= 0)
    np.testing.assert_array_equal(np.stack([index, arrays["matches"][index]], 1), expected.matches)
    np.testing.assert_array_equal(arrays["match_confidence"][index], expected.scores)
    # the numbers of threads decide the last bits of sums over a patch
    np.testing.assert_allclose(arrays["refined1"][index], expected.refined1, atol=1e-3)
    assert "6 pairs matched" in capsys.readouterr().out
    assert len(read_json(work / "results/cup0_cup1_matches.json")["matches"]) == len(index)


def test_bad_images_are_listed_by_their_paths(work, capsys):
    Path("photos/nested").mkdir()
    Path("photos/nested/torn.jpg").write_bytes(b"")
    Path("pairs.txt").write_text("cup0.png nested/torn.jpg\ncup0.png gone.png\n")
    requests = (
        "folder photos",
        "folder photos/cup0.png photos/nested/torn.jpg",
        "list pairs.txt --root photos",
    )
    tables = []
    for number, request in enumerate(requests):
        assert run(f"{request} --out-dir {number}") == 1
        assert f"{number}/bad_images.csv" in capsys.readouterr().err
        tables.append(Path(str(number), "bad_images.csv").read_text().splitlines())
    assert len(npz_names("0")) == 6
    assert tables[0] == tables[1]
    names = [[line.split(",")[0] for line in table[1:]] for table in tables]
    assert names[0] == ["photos/nested/torn.jpg"]
    assert names[2] == ["photos/nested/torn.jpg", "photos/gone.png"]


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


def test_each_photograph_is_decoded_once(work, monkeypatch):
    decoded = []
    decode_photo = images.decode_photo

    def count(data, name, *arguments):
        decoded.append(name)
        return decode_photo(data, name, *arguments)

    for module in ("superglue_sift.features.images", "superglue_sift.matcher"):
        monkeypatch.setattr(f"{module}.decode_photo", count)
    assert run("photos --out-dir results --refine") == 0
    assert len(decoded) == len(set(decoded)) == 4


def test_a_pair_whose_file_is_up_to_date_is_skipped(work, capsys, caplog):
    assert run("photos --out-dir results") == 0
    before = read_files(work / "results")
    (work / "results/cup0_cup1_matches.npz").unlink()
    capsys.readouterr()
    assert run("photos --out-dir results") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["1", "5"]
    assert read_files(work / "results") == before and caplog.messages == []


def test_pictures_and_json_are_added_later_without_matching_again(work, monkeypatch):
    assert run("photos --out-dir whole --pictures --json-files") == 0
    assert run("photos --out-dir results") == 0
    forbid_matching(monkeypatch)
    for words in ("--pictures", "--pictures --json-files"):
        assert run(f"photos --out-dir results {words}") == 0
    assert read_files(work / "results") == read_files(work / "whole")


def write_masks():
    save_masks(["cup1.png.png"])


def rotate(name):
    cv2.imwrite(name, np.ascontiguousarray(np.rot90(cv2.imread(name), 2)))


def swap(name0, name1):
    data = Path(name0).read_bytes()
    Path(name0).write_bytes(Path(name1).read_bytes())
    Path(name1).write_bytes(data)


def cut(name):
    Path(name).write_bytes(Path(name).read_bytes()[:100])


RESULT = "results/cup0_cup1_matches.npz"
FILES = "photos/cup0.png photos/cup1.png photos/cats/cat0.png --pairing sequential --k 1"
# change: number of pairs that no longer fit, options of the second run, and what happens before it
CHANGES = {
    "threshold": (2, "--threshold 0.9", None),
    "keypoints": (2, "--max-keypoints 200", None),
    "model": (2, "", lambda: write_model("model.safetensors", layers=2)),
    "scene": (2, "--scene", None),
    "photograph": (2, "", lambda: rotate("photos/cup1.png")),
    "swapped": (2, "", lambda: swap("photos/cup0.png", "photos/cup1.png")),
    "mask": (2, "--masks masks", write_masks),
    "cut": (1, "", lambda: cut(RESULT)),
    "foreign": (1, "", lambda: np.savez(RESULT, matches=np.zeros((0, 2)))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_results_that_do_not_fit_are_made_again_with_all_their_files(work, caplog, change):
    assert run(f"{FILES} --out-dir results --pictures --json-files") == 0
    count, options, act = CHANGES[change]
    if act:
        act()
    assert run(f"{FILES} --out-dir results {options}") == 0  # without --pictures
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith(f"{count} pairs")
    assert run(f"{FILES} --out-dir new --pictures --json-files {options}") == 0
    files = [read_files(work / name) for name in ("results", "new")]
    assert {name: data for name, data in files[0].items() if "features" not in name} == {
        name: data for name, data in files[1].items() if "features" not in name
    }


def test_a_photograph_has_another_digest_with_another_mask(work):
    matcher = Matcher.load("model.safetensors", device="cpu")
    photo_file = PhotoFile("cup1", work / "photos/cup1.png")
    digests = set()
    for write in (lambda: None, write_masks, lambda: rotate("masks/cup1.png.png")):
        write()
        store = FeatureStore(matcher, work / "features", work / "masks", work / "photos")
        digests.add(store.digest(photo_file))
    assert len(digests) == 3


def test_an_accepted_pair_is_judged_again_by_another_limit(work):
    words = "photos/cup0.png photos/cup1.png --out-dir results --scene --network-keypoints 300"
    for limit, accepted in (("0", "1"), ("1", "0")):
        assert run(f"{words} --min-matches 0 --accept {limit}") == 0
        assert Path("results/pairs.csv").read_text().splitlines()[1].split(",")[4] == accepted
    # A table of a scene does not stay beside results that are of none.
    assert run(words.replace(" --scene", "")) == 0
    assert not Path("results/pairs.csv").exists()


def test_results_of_other_pairs_are_counted_and_stay(work, capsys):
    assert run("photos --out-dir results") == 0
    before = read_files(work / "results")
    capsys.readouterr()
    assert run("photos/cup0.png photos/cup1.png --out-dir results") == 0
    assert "5 results" in capsys.readouterr().out
    assert before.items() <= read_files(work / "results").items()


def test_a_photograph_that_is_replaced_while_it_is_matched_is_an_error(work, monkeypatch):
    matcher = Matcher.load("model.safetensors", "cpu", max_keypoints=300)
    match_batch = Matcher.match_batch

    def replace_then_match(*arguments):
        rotate("photos/cup1.png")
        yield from match_batch(*arguments)

    monkeypatch.setattr(Matcher, "match_batch", replace_then_match)
    with pytest.raises(RequestError, match=r"photos/cup1\.png"):
        match_folder(matcher, "photos", "results")


@pytest.mark.parametrize("step", ["features", "matching"])
def test_after_ctrl_c_no_other_photograph_or_pair_is_started(work, monkeypatch, step):
    """Ctrl-C comes just after the bar has moved, so that threads have more to do."""
    started = []
    extract, match_batch = Matcher.extract_file, Matcher._match_batch

    def count_photos(self, data, path, mask):
        started.append(path)
        time.sleep(0.1)
        return extract(self, data, path, mask)

    def count_pairs(self, batch, *arguments):
        started.extend(batch)
        return match_batch(self, batch, *arguments)

    def interrupt(bar, count=1):
        if getattr(bar, "desc", "") == step:
            raise KeyboardInterrupt

    for number in range(8):
        shutil.copy("photos/cup0.png", f"photos/{number}.png")
    if step == "matching":
        assert run("photos --out-dir other --features features --pairing sequential --k 1") == 0
        monkeypatch.setattr(Matcher, "_match_batch", count_pairs)
    else:
        monkeypatch.setattr(Matcher, "extract_file", count_photos)
    monkeypatch.setattr("superglue_sift.progress.Progress.update", interrupt)
    assert run("photos --out-dir results --features features") == 130
    assert 1 <= len(started) <= 4


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
    pairs = [("cup0.png", "cup1.png"), ("cup0.png", "gone.png")]
    pairs += [("cup0.png", "./cup1.png"), ("cup0.png", "./cup0.png")]  # twice, and with itself
    report = match_folder(matcher, "photos", "listed", pairs=pairs, pictures=True)
    assert report.matched == 1 and list(report.bad_images) == ["photos/gone.png"]
    assert Path("listed/cup0_cup1_matches.jpg").exists()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [({"pairing": "nearby"}, "nearby"), ({"colmap": "model.safetensors"}, "model.safetensors")],
)
def test_wrong_arguments_are_refused_before_any_work(work, arguments, name):
    if "colmap" in arguments:
        pytest.importorskip("pycolmap")
    matcher = Matcher.load("model.safetensors", "cpu")
    with pytest.raises(RequestError, match=name):
        match_folder(matcher, "photos", "results", **arguments)
    assert not Path("results").exists()


def test_the_table_of_a_scene_does_not_replace_the_list_of_pairs(work):
    Path("results").mkdir()
    Path("results/pairs.csv").write_text("cup0.png cup1.png\n")
    assert run("list results/pairs.csv --root photos --out-dir results --scene") == 2
    assert run("list results/pairs.csv --root photos --out-dir results") == 0
    assert Path("results/pairs.csv").read_text() == "cup0.png cup1.png\n"


# --- masks


@pytest.mark.parametrize(
    "names",
    [
        ["cup0.png.png", "cats/cat0.png.png"],  # as in COLMAP
        ["cup1.png", "cats/cat1.png"],
        ["cup0.png.png", "notes.txt", ".hidden.png"],
    ],
)
def test_masks_of_photographs_in_any_folder_are_accepted(work, names):
    save_masks(names)
    photo_folder.check_masks("masks", "photos")


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["cup1.jpg.png"],  # of cup1.png
        ["cup1.png.jpg"],  # not a PNG
        ["cat0.png.png"],  # of cats/cat0.png
    ],
)
def test_a_mask_of_no_photograph_is_named_before_any_work(work, capsys, names):
    save_masks(["cup0.png.png", *names] if names else [])
    assert run("folder photos --out-dir x --masks masks") == 2
    assert f"masks/{names[0]}" if names else "masks" in read_error(capsys)
    assert not Path("x").exists()


def save_masks(names):
    mask = np.full((400, 600), 255, np.uint8)
    mask[:, :300] = 0
    Path("masks").mkdir()
    for name in names:
        Path("masks", name).parent.mkdir(exist_ok=True)
        Path("masks", name).write_bytes(cv2.imencode(".png", mask)[1].tobytes())


# --- pictures, pairs and names


def test_pictures_of_matches_are_never_matched(work):
    for name in ("photos/first", "photos/second", "photos"):
        assert run(f"photos --out-dir {name} --pictures") == 0
        assert len(npz_names(name)) == 6


def test_files_of_the_user_stay_and_are_matched_if_they_are_named(work):
    shutil.copy("photos/cup0.png", "photos/cup_matches.jpg")
    Path("results").mkdir()
    Path("results/bad_images.csv").write_text("mine\n")
    assert run("folder photos/cup1.png photos/cup_matches.jpg --out-dir results") == 0
    assert npz_names("results") == {"cup1_cup_matches_matches.npz"}
    assert Path("results/bad_images.csv").read_text() == "mine\n"


def test_masks_results_and_features_below_the_photographs_are_not_matched(work):
    save_masks(["cup0.png.png"])
    os.rename("masks", "photos/masks")
    Path("photos/results").mkdir()
    shutil.copy("photos/cup0.png", "photos/results/copy.png")
    os.mkfifo("photos/pipe.png")
    options = "--masks photos/masks --features photos/features"
    assert run(f"photos --out-dir photos/results {options}") == 0
    assert len(npz_names("photos/results")) == 6


@pytest.mark.parametrize("words", ["--pairing nearest --k 1", "--k 1"])
def test_nearest_finds_the_other_view_of_each_scene(work, words):
    assert run(f"photos --out-dir results {words}") == 0
    assert npz_names("results") == {"cats-cat0_cats-cat1_matches.npz", "cup0_cup1_matches.npz"}


@pytest.mark.parametrize("k, count", [(1, 3), (2, 5), (9, 6)])
def test_sequential_pairing_joins_a_photograph_and_the_k_before_it(k, count):
    pairs = pairing.choose_pairs("abcd", None, "sequential", k)
    assert len(set(pairs)) == len(pairs) == count


@pytest.mark.parametrize("count", [2, 16, 17, 40])
def test_exhaustive_pairing_has_each_pair_once_and_reads_few_photographs_again(count):
    pairs = pairing.make_exhaustive_pairs(range(count))
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
def test_names_of_photographs_give_each_pair_a_name_of_its_own(files, names):
    paths = [Path("root") / file for file in files.split()]
    assert [photo.name for photo in pairing.name_photos(paths, Path("root"))] == names.split()


def test_two_images_of_one_name_are_refused():
    with pytest.raises(RequestError, match=r"a-b\.png"):
        pairing.name_photos([Path("a/b.png"), Path("a-b.png")], Path("."))


def test_names_of_windows_have_neither_drives_nor_backslashes():
    root = PureWindowsPath("C:/photos")
    paths = [PureWindowsPath(name) for name in ("C:/photos/cats/a.jpg", "D:/b.jpg")]
    assert [photo.name for photo in pairing.name_photos(paths, root)] == ["cats-a", "b"]


names = st.text(st.characters(blacklist_characters="/\0"), min_size=1, max_size=300)


@given(names, names)
def test_the_names_of_a_pair_fit_the_file_system(name0, name1):
    name0, name1 = (os.fsdecode(name.encode("utf-8", "surrogatepass")) for name in (name0, name1))
    stem = results.make_pair_stem(name0, name1)
    assert len(f"{stem}_matches.json".encode("utf-8", "surrogateescape")) <= 255
    plain = f"{name0}_{name1}"
    assert stem == plain or len(plain.encode("utf-8", "surrogateescape")) > 255 - 13


def test_long_names_that_begin_alike_are_different_pairs():
    stems = {results.make_pair_stem("a" * 200 + tail, "b" * 200) for tail in ("1", "2", "")}
    assert len(stems) == 3


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
def test_lists_of_other_programs_are_read(tmp_path, text, encoding):
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


def test_a_photograph_without_keypoints_has_a_descriptor_of_zeros():
    words = np.eye(2, 128, dtype=np.float32)
    assert not pairing.compute_vlad(words[:0], words).any()


def test_a_single_photograph_has_no_nearest():
    descriptors = np.eye(2, 128, dtype=np.float32)
    assert pairing.find_nearest_pairs(["alone"], lambda _name: descriptors, 1) == []
