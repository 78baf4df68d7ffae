"""superglue_sift/features/sift.py: positions, orientations, and the choice of keypoints."""

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from superglue_sift.features.descriptors import to_root_sift
from superglue_sift.features.features import Features
from superglue_sift.features.sift import CONTRAST, extract, rank_keypoints


@pytest.mark.parametrize("limit", [1, 7, 200, 100_000])
def test_keypoints_of_highest_rank_come_first_at_distinct_positions(photo, limit):
    features = extract(photo, limit)
    everything = extract(photo, 100_000)
    count = min(limit, len(everything.keypoints))
    assert features.keypoints.shape == (count, 2) and features.descriptors.shape == (count, 2, 128)
    for array, expected in zip(features[:5], everything[:5]):
        assert np.array_equal(array, expected[:limit])
    assert (np.diff(rank_keypoints(features)) <= 0).all()
    assert len(np.unique(features.keypoints, axis=0)) == count


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
        errors += [*(extract(blob_at(cx, cy, sigma), 1).keypoints - [cx, cy])]
    assert len(errors) > 15 and np.abs(np.mean(errors, axis=0)).max() < 0.03


def test_a_place_with_several_orientations_keeps_the_two_of_smallest_angle(photo):
    at_place = {}
    for point, descriptor in by_opencv(photo):
        at_place.setdefault(point.pt, []).append((np.float32(point.angle), descriptor))
    several = 0
    features = extract(photo, 100_000)
    for position, oris, descriptors in zip(
        features.keypoints, features.oris, features.descriptors.astype(np.float32)
    ):
        expected = sorted(at_place[tuple(position)], key=lambda oriented: oriented[0])[:2]
        several += len(expected) > 1
        for index, (angle, descriptor) in enumerate(expected):
            assert oris[index] == angle
            assert np.array_equal(descriptors[index], descriptor)
        assert not descriptors[len(expected) :].any()
    assert several > 20


def test_rank_is_response_times_scale_for_sift_and_else_the_score():
    scales, scores = np.array([[2.0, 8.0], [0.1, 0.05]])
    for dtype, ranks in ((np.uint8, [0.2, 0.4]), (np.float32, [0.1, 0.05])):
        descriptors = np.zeros((2, 1, 128), dtype)
        features = Features(np.zeros((2, 2)), scales, np.zeros((2, 1)), scores, descriptors, (9, 9))
        assert rank_keypoints(features) == pytest.approx(ranks)


def test_small_pictures_are_described_in_the_doubled_image_too():
    """A large blob alone has no keypoint for which OpenCV would double the picture by itself."""
    blob = blob_at(64, 64, 12.0)
    by_place = {
        (point.pt, np.float32(point.angle)): descriptor for point, descriptor in by_opencv(blob)
    }
    features = extract(blob, 1)
    for position, oris, descriptors in zip(
        features.keypoints, features.oris, features.descriptors.astype(np.float32)
    ):
        assert np.array_equal(descriptors[0], by_place[tuple(position), oris[0]])


@settings(max_examples=30)
@given(arrays(np.uint8, st.tuples(st.integers(1, 80), st.integers(1, 80))), st.integers(1, 40))
def test_any_picture_gives_valid_keypoints(gray, limit):
    features = extract(gray, limit)
    assert len(features.keypoints) <= limit and (features.scales > 0).all()
    assert all(np.isfinite(array).all() for array in features[:5])


def test_root_sift_of_known_descriptors():
    descriptors = np.zeros((2, 128), np.uint8)
    descriptors[0, [0, 127]] = 4, 12
    expected = np.zeros((2, 128), np.float32)
    expected[0, [0, 127]] = np.sqrt([0.25, 0.75])  # zeros stay zeros
    np.testing.assert_allclose(to_root_sift(descriptors), expected, rtol=2**-23)
