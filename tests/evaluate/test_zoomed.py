"""Zoomed parts of photographs: the homography by hand, and what a pair shows of real
photographs.
"""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.evaluate import zoomed
from pipeline.evaluate.conditions import conditions_of
from pipeline.evaluate.heldout import HeldOutPairs
from pipeline.fetch.containers import open_container
from pipeline.image_sets.sources import ImageSet
from pipeline.parameters import params
from pipeline.parameters.schema import Photometric
from pipeline.presets import FOLDER
from superglue_sift.geometry import corners, transform
from superglue_sift.images import BadImage

SIZE = (320, 240)


def rng(seed=0):
    return np.random.default_rng(seed)


def test_the_whole_view_has_only_one_part():
    assert np.allclose(zoomed.zoom_in(rng(), SIZE, 1.0, 0.0), np.eye(3))
    assert np.allclose(
        zoomed.zoom_in(rng(), SIZE, 1.0, 180.0), [[-1, 0, 319], [0, -1, 239], [0, 0, 1]]
    )


def test_a_part_that_is_larger_than_the_view_is_none():
    with pytest.raises(ValueError, match="rotated by 90"):
        zoomed.zoom_in(rng(), SIZE, 1.0, 90.0)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 99),
    factor=st.floats(2.0, 8.0),
    turn=st.sampled_from([0.0, 45.0, 90.0, 180.0]),
)
def test_a_part_lies_inside_is_magnified_and_turned_as_said(seed, factor, turn):
    H = zoomed.zoom_in(rng(seed), SIZE, factor, turn)
    inside = transform(corners(SIZE), np.linalg.inv(H))
    assert (inside >= -1e-6).all() and (inside <= np.array(SIZE) - 1 + 1e-6).all()
    found = conditions_of(H, SIZE, SIZE)
    assert found["scale"] == pytest.approx(factor) and found["rotation_deg"] == pytest.approx(
        turn, abs=1e-6
    )
    # clockwise on the screen: what points right in the whole view points down in a part turned by
    # 90 degrees
    right = transform(np.array([[0.0, 0.0], [1.0, 0.0]]), H)
    angle = np.radians(turn)
    assert np.allclose(
        right[1] - right[0], factor * np.array([np.cos(angle), np.sin(angle)]), atol=1e-9
    )


@pytest.fixture(scope="module")
def buildings(shared_data):
    folder = shared_data / "poses" / "strecha"
    if not folder.is_dir():
        pytest.skip(f"{folder}: not here")
    held = open_container(folder)
    entries = held.entries(held.names[:2], "test", "val")
    section = params.load("evaluate", FOLDER / "sample.yaml")
    dark = Photometric(**dict.fromkeys(Photometric.model_fields, 0.0))
    section = section.model_copy(
        update={"views": section.views.model_copy(update={"photometric": dark})}
    )
    return HeldOutPairs(ImageSet(entries, {"val": str(folder)}), entries, section)


def test_pairs_of_real_photographs(buildings):
    """The part shows what the homography says: brought back to the whole view it has nearly its
    gray values.
    """
    for factor, turn in ((2.0, 0.0), (4.0, 90.0)):
        scene = zoomed.ZoomedPairs(buildings, 2, factor, turn).load(0)
        whole, part = scene.images
        assert whole.shape == part.shape == (240, 320)
        back = cv2.warpPerspective(
            part, np.linalg.inv(scene.pairs[0].truth), SIZE, flags=cv2.INTER_AREA
        )
        shown = (
            cv2.warpPerspective(np.full_like(part, 255), np.linalg.inv(scene.pairs[0].truth), SIZE)
            == 255
        )
        smooth = [cv2.blur(view, (3, 3))[shown].astype(float) for view in (whole, back)]
        assert shown.sum() > 1000 and np.corrcoef(*smooth)[0, 1] > 0.9


def test_a_photograph_too_small_for_a_level_is_left_out(buildings):
    with pytest.raises(BadImage, match="magnified 16 times has no pixels"):
        zoomed.ZoomedPairs(buildings, 1, 16.0).load(0)
