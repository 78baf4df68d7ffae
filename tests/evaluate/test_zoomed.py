"""Zoomed parts of photographs: the homography by hand, and what a pair shows of real
photographs.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.evaluate import zoomed
from pipeline.evaluate.conditions import conditions_of
from superglue_sift.geometry.two_view import corners, transform

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


@settings(max_examples=50)
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
