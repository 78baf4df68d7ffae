"""Views of held-out photographs against their homographies, negative pairs, zoomed parts, and pairs
that are read from files.
"""

import unicodedata

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_scenes import CAMERA, IDENTITY, SHIFT, TURN, format_pair, write_image_set, write_sequence

from pipeline.errors import RequestError
from pipeline.evaluate import pair_files, pairs
from pipeline.evaluate.pair_files import HPatchesPairs
from pipeline.fetch import dataset
from superglue_sift.geometry.two_view import get_corners, transform

SIZE = (320, 240)


@settings(max_examples=50)
@given(seed=st.integers(0, 99), zoom=st.floats(1.0, 8.0))
def test_zoomed_part_lies_inside_and_has_its_magnification(seed, zoom):
    H = pairs.draw_zoom(np.random.default_rng(seed), SIZE, zoom)
    inside = transform(get_corners(SIZE), np.linalg.inv(H))
    assert (inside >= -1e-6).all() and (inside <= np.array(SIZE) - 1 + 1e-6).all()
    assert np.ptp(inside, axis=0) == pytest.approx((np.array(SIZE) - 1) / zoom)


def make_held_out(folder, images, section, robustness=0):
    write_image_set(folder, images, "test")
    manifest = dataset.open_manifest(folder)
    return pairs.HeldOutPairs(manifest, manifest.select_entries("test"), section, robustness)


QUIET = dict.fromkeys(("brightness", "contrast", "gamma", "blur", "noise", "jpeg"), 0.0)


def test_homography_maps_view_0_onto_view_1_and_pictures_have_colors(
    tmp_path, make_params, color_photo
):
    bgr = np.ascontiguousarray(color_photo[..., ::-1])
    section = {"width": 160, "height": 120, "pairs_per_image": 2, "views": {"photometric": QUIET}}
    source = make_held_out(tmp_path, {"cat.png": bgr}, make_params("evaluate", **section))
    images, image_pairs = source.load_scene(0)
    for pair in image_pairs:
        warped = cv2.warpPerspective(images[pair.first], pair.truth, (160, 120))
        white = np.full((120, 160), 255, np.uint8)
        is_shown = cv2.warpPerspective(white, pair.truth, (160, 120)) == 255
        assert is_shown.mean() > 0.2
        assert np.median(np.abs(warped.astype(float) - images[pair.second])[is_shown]) < 6
    color = source.load_color_image(0, 1)
    difference = np.abs(cv2.cvtColor(color, cv2.COLOR_BGR2GRAY).astype(int) - images[1])
    assert np.ptp(color.astype(int), axis=2).mean() > 20 and np.median(difference) <= 1


def test_disturbed_pairs_share_the_first_view_and_are_decoded_once(
    tmp_path, make_params, photo, monkeypatch
):
    decoded = []
    decode = pairs.decode_gray
    monkeypatch.setattr(pairs, "decode_gray", lambda *args: decoded.append(args) or decode(*args))
    section = {"width": 160, "height": 120, "views": {"photometric": QUIET}}
    source = make_held_out(tmp_path, {"a.png": photo}, make_params("evaluate", **section), 1)
    images, image_pairs = source.load_scene(0)
    by_condition = {pair.condition: pair for pair in image_pairs}
    # Level 0 of blur, level 0 of noise and factor 1 of light leave the second view as it is.
    undisturbed = [by_condition[key] for key in (("blur (px)", 0.0), ("noise (gray levels)", 0.0))]
    undisturbed.append(by_condition["illumination (factor)", 1.0])
    view = images[undisturbed[0].second]
    for pair in undisturbed:
        np.testing.assert_array_equal(images[pair.second], view)
        assert pair.first == undisturbed[0].first and (pair.truth == undisturbed[0].truth).all()
    dark = images[by_condition["illumination (factor)", 0.5].second]
    assert abs(dark.mean() / view.mean() - 0.5) < 0.01
    source.load_color_image(0, 1)
    assert len(decoded) == 1


def test_two_copies_of_a_photograph_are_no_negative_pair(tmp_path, make_params, photo):
    files = {"a.png": photo, "copy.png": photo, "turned.png": np.ascontiguousarray(photo[::-1])}
    source = make_held_out(tmp_path, files, make_params("evaluate"))
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
    images, image_pairs = source.load_scene(0)
    assert [pair.name for pair in image_pairs] == ["a/1-2", "a/1-10"]
    np.testing.assert_allclose(image_pairs[1].truth, TURN / TURN[2, 2], rtol=1e-6)
    assert images[image_pairs[1].second].shape == small.shape
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
    np.testing.assert_array_equal(pair_files.read_homography(tmp_path / "H_1_2"), SHIFT)


def test_linked_sequences_are_entered_once_and_hidden_files_are_left_out(tmp_path, small):
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
    file.write_bytes(f"# two views\n{format_pair(name, name)}\n".encode("utf-16"))
    images, image_pairs = pair_files.PosePairs(file, tmp_path, short_side=0).load_scene(0)
    assert images[0].shape == small.shape and len(image_pairs) == 1


def test_resizing_takes_the_homography_along(tmp_path, photo):
    write_sequence(tmp_path / "a", photo, {2: TURN})
    source = HPatchesPairs(tmp_path, short_side=200)
    images, (pair,) = source.load_scene(0)
    assert images[0].shape == source.load_color_image(0, 1).shape[:2] == (200, 300)
    points = np.array([[10.0, 20.0], [500.0, 300.0], [0.0, 0.0]])

    def halve(positions):  # outer edges stay together when an image is resized
        return (positions + 0.5) * 0.5 - 0.5

    mapped = transform(halve(points), pair.truth)
    np.testing.assert_allclose(mapped, halve(transform(points, TURN)), 1e-6)


@pytest.mark.parametrize(
    "text",
    [
        "1 0 0\n0 1 0\n",
        "1 0 0\n2 0 0\n0 0 1\n",  # singular
        "1 0 nan\n0 1 0\n0 0 1\n",
    ],
)
def test_a_wrong_homography_is_named(tmp_path, small, text):
    (write_sequence(tmp_path / "a", small, {2: SHIFT}) / "H_1_2").write_text(text)
    with pytest.raises(RequestError, match="H_1_2: "):
        HPatchesPairs(tmp_path)


def test_two_files_of_one_number_are_named(tmp_path, small):
    folder = write_sequence(tmp_path / "a", small, {2: SHIFT})
    for second in ("H_1_2.txt", "H_1_02", "02.jpg"):
        (folder / second).write_text("1 0 0\n0 1 0\n0 0 1\n")
        with pytest.raises(RequestError, match=r"(H_1_2|2\.png)"):
            HPatchesPairs(tmp_path)
        (folder / second).unlink()
    assert len(HPatchesPairs(tmp_path)) == 1


def test_missing_files_of_a_sequence_are_named(tmp_path, small):
    folder = write_sequence(tmp_path / "a", small, {2: SHIFT, 3: TURN})
    (folder / "H_1_3").rename(folder / "H_1_4")
    with pytest.raises(RequestError, match="H_1_3"):
        HPatchesPairs(tmp_path)
    (folder / "3.png").unlink()
    with pytest.raises(RequestError, match="H_1_4"):
        HPatchesPairs(tmp_path)
    (folder / "1.png").unlink()
    with pytest.raises(RequestError, match="image 1"):
        HPatchesPairs(tmp_path)


def set_entry(matrix, index, value):
    """A copy of a matrix with another entry."""
    copy = matrix.copy()
    copy[index] = value
    return copy


@pytest.mark.parametrize(
    "text",
    [
        "a.png b.png 0 0 1 2 3",
        format_pair("a.png", "b.png").replace(" 0 0 ", " 0 1 ", 1),  # a rotated photograph
        format_pair("a.png", "b.png", pose=np.diag([1.0, 1, 2, 1])),  # no rotation
        format_pair("a.png", "b.png", pose=set_entry(np.eye(4), (0, 3), np.nan)),
        format_pair("a.png", "b.png", K0=2.0 * CAMERA),
    ],
)
def test_a_wrong_line_of_cameras_is_named(tmp_path, text):
    (tmp_path / "pairs.txt").write_text(f"{format_pair('a.png', 'b.png')}\n{text}\n")
    with pytest.raises(RequestError, match=r"pairs\.txt.* 2"):
        pair_files.read_pairs(tmp_path / "pairs.txt")


def test_pairs_that_share_photographs_are_one_scene():
    names = [("b", "c"), ("e", "f"), ("a", "b"), ("g", "f"), ("h", "i")]
    assert pair_files.name_scenes(names) == ["b", "e", "b", "e", "h"]
    assert pair_files.name_scenes([*names, ("c", "g")]) == ["b", "b", "b", "b", "h", "b"]
    # A pair across two folders makes them one scene
    joined = [("x/a", "y/b"), ("y/c", "y/d"), ("z/a", "z/b")]
    assert pair_files.name_scenes(joined) == ["x", "x", "z"]
