"""Which pairs are matched, and what their results are called."""

import functools
import itertools
import unicodedata
from pathlib import Path, PureWindowsPath

import numpy as np
import pytest

from superglue_sift import RequestError
from superglue_sift.apps import pairing


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
