"""superglue_sift/features/sift.py: records, positions, and the choice of keypoints."""

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from superglue_sift.features.extractors import record_dtype
from superglue_sift.features.sift import (
    CONTRAST,
    GEOMETRY,
    ORIENTED,
    extract,
    rank_keypoints,
    to_root_sift,
)


@pytest.mark.parametrize("limit", [1, 7, 200, 100_000])
def test_those_of_highest_rank_are_kept_in_order_and_positions_are_distinct(photo, limit):
    records = extract(photo, limit)
    everything = extract(photo, 100_000)
    assert records.dtype == ORIENTED and len(records) == min(limit, len(everything))
    assert np.array_equal(records, everything[:limit])
    assert (np.diff(rank_keypoints(records)) <= 0).all()
    assert len({(record["x"], record["y"]) for record in records}) == len(records)


def by_opencv(gray):
    """(keypoint, descriptor) of OpenCV's SIFT, one for each orientation."""
    detector = cv2.SIFT_create(contrastThreshold=CONTRAST, enable_precise_upscale=True)
    return list(zip(*detector.detectAndCompute(gray, None)))


def blob_at(cx, cy, sigma):
    """A picture of 128x128 of a bright spot."""
    x, y = np.meshgrid(np.arange(128), np.arange(128))
    spot = np.exp(-((x - cx) ** 2 + (y - cy) ** 2) / (2 * sigma**2))
    return (30 + 180 * spot).astype(np.uint8)


def test_keypoints_lie_on_the_structure_without_a_bias():
    """OpenCV's default upscaling puts them 0.25 px too far right and down."""
    rng = np.random.default_rng(0)
    errors = []
    for cx, cy, sigma in zip(
        rng.uniform(60, 68, 25), rng.uniform(60, 68, 25), rng.uniform(2, 6, 25)
    ):
        found = extract(blob_at(cx, cy, sigma), 1)
        errors += [(best["x"] - cx, best["y"] - cy) for best in found]
    assert len(errors) > 15 and np.abs(np.mean(errors, axis=0)).max() < 0.03


def test_a_place_with_several_orientations_keeps_the_two_of_smallest_angle(photo):
    at_place = {}
    for point, descriptor in by_opencv(photo):
        at_place.setdefault(point.pt, []).append((np.float32(point.angle), descriptor))
    several = 0
    for record in extract(photo, 100_000):
        found = sorted(at_place[(record["x"], record["y"])], key=lambda each: each[0])
        assert record["angle"] == found[0][0]
        assert np.array_equal(record["descriptor"].astype(np.float32), found[0][1])
        if len(found) > 1:
            several += 1
            assert record["second_angle"] == found[1][0]
            assert np.array_equal(record["second_descriptor"].astype(np.float32), found[1][1])
        else:
            assert not record["second_descriptor"].any()
    assert several > 20


def test_rank_is_response_times_scale_for_sift_and_else_the_score():
    for kind, ranks in ((ORIENTED, [0.2, 0.4]), (record_dtype("float", 64), [0.1, 0.05])):
        records = np.zeros(2, kind)
        records["score"] = [0.1, 0.05]
        records["scale"] = [2.0, 8.0]
        assert rank_keypoints(records) == pytest.approx(ranks)


def test_small_pictures_are_described_in_the_doubled_image_too():
    """A large blob alone has no keypoint for which OpenCV would double the picture by itself."""
    blob = blob_at(64, 64, 12.0)
    by_place = {
        (point.pt, np.float32(point.angle)): descriptor for point, descriptor in by_opencv(blob)
    }
    for record in extract(blob, 1):
        described = by_place[((record["x"], record["y"]), record["angle"])]
        assert np.array_equal(record["descriptor"].astype(np.float32), described)


@settings(max_examples=30)
@given(arrays(np.uint8, st.tuples(st.integers(1, 80), st.integers(1, 80))), st.integers(1, 40))
def test_any_picture_gives_valid_records(gray, limit):
    records = extract(gray, limit)
    assert len(records) <= limit and (records["scale"] > 0).all()
    assert all(np.isfinite(records[name]).all() for name in GEOMETRY)


def test_root_sift_of_known_descriptors():
    descriptors = np.zeros((2, 128), np.uint8)
    descriptors[0, [0, 127]] = 4, 12
    expected = np.zeros((2, 128), np.float32)
    expected[0, [0, 127]] = np.sqrt([0.25, 0.75])  # zeros stay zeros
    np.testing.assert_allclose(to_root_sift(descriptors), expected, rtol=2**-23)
