"""Held-out pairs against their homographies, negative pairs, zoomed parts of photographs, and
pairs in folders: what is accepted, what is refused and in which words.
"""

import unicodedata

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_scenes import IDENTITY, SHIFT, TURN, line, write_image_set, write_sequence

from pipeline.errors import RequestError
from pipeline.evaluate import pairs
from pipeline.evaluate.pairs import HPatchesPairs
from pipeline.fetch import dataset
from superglue_sift.geometry.two_view import corners, transform

SIZE = (320, 240)


@settings(max_examples=50)
@given(seed=st.integers(0, 99), zoom=st.floats(1.0, 8.0))
def test_a_part_lies_inside_and_is_magnified_as_said(seed, zoom):
    H = pairs.draw_zoom(np.random.default_rng(seed), SIZE, zoom)
    inside = transform(corners(SIZE), np.linalg.inv(H))
    assert (inside >= -1e-6).all() and (inside <= np.array(SIZE) - 1 + 1e-6).all()
    assert np.ptp(inside, axis=0) == pytest.approx((np.array(SIZE) - 1) / zoom)


def held_out(folder, images, section):
    write_image_set(folder, images, "test")
    manifest = dataset.open_manifest(folder)
    return pairs.HeldOutPairs(manifest, manifest.select_entries("test"), section)


def test_a_pair_is_what_its_homography_says_and_pictures_have_colours(
    tmp_path, make_params, color_photo
):
    bgr = np.ascontiguousarray(color_photo[..., ::-1])
    quiet = dict.fromkeys(("brightness", "contrast", "gamma", "blur", "noise", "jpeg"), 0.0)
    section = {"width": 160, "height": 120, "pairs_per_image": 2, "views": {"photometric": quiet}}
    source = held_out(tmp_path, {"cat.png": bgr}, make_params("evaluate", **section))
    images, views = source.load_scene(0)
    for _, first, second, H in views:
        warped = cv2.warpPerspective(images[first], H, (160, 120))
        shown = cv2.warpPerspective(np.full((120, 160), 255, np.uint8), H, (160, 120)) == 255
        assert shown.mean() > 0.2
        assert np.median(np.abs(warped.astype(float) - images[second])[shown]) < 6
    color = source.render_in_color(0, 1, images[1])
    difference = np.abs(cv2.cvtColor(color, cv2.COLOR_BGR2GRAY).astype(int) - images[1])
    assert np.ptp(color.astype(int), axis=2).mean() > 20 and np.median(difference) <= 1


def test_two_copies_of_a_photograph_have_something_in_common(tmp_path, make_params, photo):
    files = {"a.png": photo, "copy.png": photo, "turned.png": np.ascontiguousarray(photo[::-1])}
    source = held_out(tmp_path, files, make_params("evaluate"))
    names = {name for name, _ in pairs.NegativePairs(source).scenes}
    assert "a.png and turned.png" in names and "turned.png and copy.png" in names
    assert not names & {"a.png and copy.png", "copy.png and a.png"}


# Folders in HPatches layout, and lists of pairs with their poses


@pytest.fixture
def small(photo):
    return np.ascontiguousarray(photo[:240, :320])


def test_pairs_of_every_sequence_sorted_by_name(tmp_path, small):
    folder = write_sequence(tmp_path / "b", small, {2: SHIFT})
    (folder / "H_1_2").rename(folder / "H_1_2.txt")
    write_sequence(tmp_path / "a", small, {2: IDENTITY, 10: TURN})
    source = HPatchesPairs(tmp_path, short_side=0)
    assert source.scenes == [("a", 2), ("b", 1)]
    images, views = source.load_scene(0)
    assert [name for name, *_ in views] == ["a/1-2", "a/1-10"]
    _, _, second, H = views[1]
    np.testing.assert_allclose(H, TURN / TURN[2, 2], rtol=1e-6)
    assert images[second].shape == small.shape
    assert HPatchesPairs(folder).scenes == [("b", 1)]  # a sequence itself


@pytest.mark.parametrize(
    "text, encoding",
    [
        ("1 0 12\n0 1 -8\n0 0 1\n", "utf-16"),  # PowerShell's `>`
        ("[[1, 0, 12],\n [0, 1, -8],\n [0, 0, 1]]\n", "utf-8"),
        ("# by hand\n1;0;12;0;1;-8;0;0;1\n", "utf-8"),
    ],
)
def test_homographies_of_other_programs_are_read(tmp_path, text, encoding):
    (tmp_path / "H_1_2").write_bytes(text.encode(encoding))
    np.testing.assert_array_equal(pairs.read_homography(tmp_path / "H_1_2"), SHIFT)


def test_linked_sequences_are_entered_once_and_hidden_files_are_none(tmp_path, small):
    elsewhere = write_sequence(tmp_path / "elsewhere", small, {2: SHIFT})
    write_sequence(tmp_path / "pairs/own", small, {2: SHIFT})
    (tmp_path / "pairs/linked").symlink_to(elsewhere)
    (tmp_path / "pairs/loop").symlink_to(tmp_path / "pairs")
    (tmp_path / "pairs/own/._1.png").write_bytes(b"of a Mac")
    (tmp_path / "pairs/own/._H_1_2").write_bytes(b"of a Mac")
    write_sequence(tmp_path / "pairs/.Trash-1000/old", small, {2: SHIFT})
    assert HPatchesPairs(tmp_path / "pairs").scenes == [("linked", 1), ("own", 1)]


def test_lists_of_pairs_are_read_as_other_systems_write_them(tmp_path, small):
    """UTF-16 of PowerShell, a name as a Mac spells it, a comment."""
    cv2.imwrite(str(tmp_path / unicodedata.normalize("NFC", "caf\u00e9.png")), small)
    name = unicodedata.normalize("NFD", "caf\u00e9.png")
    file = tmp_path / "pairs.txt"
    file.write_bytes(f"# two views\n{line(name, name)}\n".encode("utf-16"))
    images, given = pairs.PosePairs(file, tmp_path, short_side=0).load_scene(0)
    assert images[0].shape == small.shape and len(given) == 1


def test_resizing_takes_the_homography_along(tmp_path, photo):
    write_sequence(tmp_path / "a", photo, {2: TURN})
    images, [(*_, H)] = HPatchesPairs(tmp_path, short_side=200).load_scene(0)
    assert images[0].shape == (200, 300)
    points = np.array([[10.0, 20.0], [500.0, 300.0], [0.0, 0.0]])

    def halve(places):  # outer edges stay together when an image is resized
        return (places + 0.5) * 0.5 - 0.5

    np.testing.assert_allclose(transform(halve(points), H), halve(transform(points, TURN)), 1e-6)


@pytest.mark.parametrize(
    "text, words",
    [
        ("1 0 0\n0 1 0\n", "expected 3 rows of 3 numbers"),
        ("1 0 zero\n0 1 0\n0 0 1\n", "could not convert"),
        ("1 0 0\n2 0 0\n0 0 1\n", "cannot be inverted"),
        ("1 0 nan\n0 1 0\n0 0 1\n", "cannot be inverted"),
    ],
)
def test_wrong_homographies_are_named(tmp_path, small, text, words):
    (write_sequence(tmp_path / "a", small, {2: SHIFT}) / "H_1_2").write_text(text)
    with pytest.raises(RequestError, match=f"H_1_2: not a homography: .*{words}"):
        HPatchesPairs(tmp_path)


def test_missing_parts_are_named(tmp_path, small):
    def refused(words):
        with pytest.raises(RequestError, match=words):
            HPatchesPairs(tmp_path)

    refused("no sequence found")
    folder = write_sequence(tmp_path / "a", small, {2: SHIFT, 3: TURN})
    (folder / "2.jpg").touch()
    refused(r"2\.png: image 2 exists twice, also as 2\.jpg")
    (folder / "2.jpg").unlink()
    (folder / "H_1_3").rename(folder / "H_1_4")
    refused(r"3\.png: no homography H_1_3")
    (folder / "3.png").unlink()
    refused(r"H_1_4: no image 4\.png")
    (folder / "1.png").unlink()
    refused("no image 1")
    with pytest.raises(RequestError, match="no such folder"):
        HPatchesPairs(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "contains no pair"),
        ("a.png b.png 0 0 1 2 3", "line 1: 7 words"),
        (line("a.png", "b.png").replace("500.0", "wide", 1), "line 1: could not convert"),
        (line("a.png", "b.png").replace(" 0 0 ", " 0 1 ", 1), "EXIF rotation"),
        (line("a.png", "b.png", pose=np.diag([1.0, 1, 2, 1])), "must contain a rotation"),
        (line("a.png", "b.png", K0=np.diag([0.0, 1, 1])), "focal lengths must be positive"),
    ],
)
def test_wrong_files_are_named(tmp_path, text, words):
    (tmp_path / "pairs.txt").write_text(text)
    with pytest.raises(RequestError, match=words):
        pairs.read_pairs(tmp_path / "pairs.txt")


def test_without_folders_pairs_that_share_photographs_are_one_scene():
    given = [("b", "c"), ("e", "f"), ("a", "b"), ("g", "f"), ("h", "i")]
    assert pairs.name_scenes(given) == ["b", "e", "b", "e", "h"]
    assert pairs.name_scenes([*given, ("c", "g")]) == ["b", "b", "b", "b", "h", "b"]
    # A pair across two folders makes them one scene
    joined = [("x/a", "y/b"), ("y/c", "y/d"), ("z/a", "z/b")]
    assert pairs.name_scenes(joined) == ["x", "x", "z"]
