"""superglue_sift/sift.py: records, positions, and the choice of keypoints."""

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from superglue_sift.sift import ORIENTED, extract


@pytest.mark.parametrize("limit", [1, 7, 200, 100_000])
def test_the_strongest_are_kept_in_order_and_positions_are_distinct(photo, limit):
    records = extract(photo, limit)
    everything = extract(photo, 100_000)
    assert records.dtype == ORIENTED and len(records) == min(limit, len(everything))
    assert np.array_equal(records, everything[:limit])
    assert (np.diff(records["score"]) <= 0).all()
    assert len({(record["x"], record["y"]) for record in records}) == len(records)


def test_keypoints_lie_on_the_structure_without_a_bias():
    """OpenCV's default upscaling puts them 0.25 px too far right and down."""
    rng = np.random.default_rng(0)
    x, y = np.meshgrid(np.arange(128), np.arange(128))
    errors = []
    for cx, cy, sigma in zip(
        rng.uniform(60, 68, 25), rng.uniform(60, 68, 25), rng.uniform(2, 6, 25)
    ):
        blob = 30 + 180 * np.exp(-((x - cx) ** 2 + (y - cy) ** 2) / (2 * sigma**2))
        errors += [(best["x"] - cx, best["y"] - cy) for best in extract(blob.astype(np.uint8), 1)]
    assert len(errors) > 15 and np.abs(np.mean(errors, axis=0)).max() < 0.03


def test_a_place_with_several_orientations_keeps_the_two_of_smallest_angle(photo):
    points, descriptors = cv2.SIFT_create(enable_precise_upscale=True).detectAndCompute(photo, None)
    at_place = {}
    for point, descriptor in zip(points, descriptors):
        at_place.setdefault(point.pt, []).append((np.float32(point.angle), descriptor))
    several = 0
    for record in extract(photo, 100_000):
        found = sorted(at_place[(record["x"], record["y"])], key=lambda each: each[0])
        assert record["angle"] == found[0][0]
        if len(found) > 1:
            several += 1
            assert record["second_angle"] == found[1][0]
            assert np.array_equal(record["second_descriptor"].astype(np.float32), found[1][1])
        else:
            assert not record["second_descriptor"].any()
    assert several > 20


@settings(max_examples=30, deadline=None)
@given(arrays(np.uint8, st.tuples(st.integers(1, 80), st.integers(1, 80))), st.integers(1, 40))
def test_any_picture_gives_valid_records(gray, limit):
    records = extract(gray, limit)
    assert len(records) <= limit
    for name in ("x", "y", "scale", "angle", "score"):
        assert np.isfinite(records[name]).all()
    assert ((records["angle"] >= 0) & (records["angle"] <= 360)).all() and (
        records["scale"] > 0
    ).all()
