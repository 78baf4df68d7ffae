"""Held-out pairs against their homographies, negative pairs, and zoomed parts of photographs."""

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_scenes import write_image_set

from pipeline.evaluate import pairs
from pipeline.fetch import dataset
from superglue_sift.geometry.two_view import corners, transform

SIZE = (320, 240)


@settings(max_examples=50)
@given(seed=st.integers(0, 99), zoom=st.floats(1.0, 8.0))
def test_a_part_lies_inside_and_is_magnified_as_said(seed, zoom):
    H = pairs.zoom_in(np.random.default_rng(seed), SIZE, zoom)
    inside = transform(corners(SIZE), np.linalg.inv(H))
    assert (inside >= -1e-6).all() and (inside <= np.array(SIZE) - 1 + 1e-6).all()
    assert np.ptp(inside, axis=0) == pytest.approx((np.array(SIZE) - 1) / zoom)


def held_out(folder, images, section):
    write_image_set(folder, images, "test")
    manifest = dataset.open_manifest(folder)
    return pairs.HeldOutPairs(manifest, manifest.entries("test"), section)


def test_a_pair_is_what_its_homography_says_and_pictures_have_colours(
    tmp_path, make_params, color_photo
):
    bgr = np.ascontiguousarray(color_photo[..., ::-1])
    quiet = dict.fromkeys(("brightness", "contrast", "gamma", "blur", "noise", "jpeg"), 0.0)
    section = {"width": 160, "height": 120, "pairs_per_image": 2, "views": {"photometric": quiet}}
    source = held_out(tmp_path, {"cat.png": bgr}, make_params("evaluate", **section))
    images, views = source.load(0)
    for _, first, second, H in views:
        warped = cv2.warpPerspective(images[first], H, (160, 120))
        shown = cv2.warpPerspective(np.full((120, 160), 255, np.uint8), H, (160, 120)) == 255
        assert shown.mean() > 0.2
        assert np.median(np.abs(warped.astype(float) - images[second])[shown]) < 6
    color = source.in_color(0, 1, images[1])
    difference = np.abs(cv2.cvtColor(color, cv2.COLOR_BGR2GRAY).astype(int) - images[1])
    assert np.ptp(color.astype(int), axis=2).mean() > 20 and np.median(difference) <= 1


def test_two_copies_of_a_photograph_have_something_in_common(tmp_path, make_params, photo):
    files = {"a.png": photo, "copy.png": photo, "turned.png": np.ascontiguousarray(photo[::-1])}
    source = held_out(tmp_path, files, make_params("evaluate"))
    names = {name for name, _ in pairs.NegativePairs(source).scenes}
    assert "a.png and turned.png" in names and "turned.png and copy.png" in names
    assert not names & {"a.png and copy.png", "copy.png and a.png"}
