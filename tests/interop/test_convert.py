"""Matches and features to OpenCV and LightGlue, and back."""

import cv2
import numpy as np

from superglue_sift.features.features import TYPICAL_SCORE
from superglue_sift.interop import convert


def assert_equal(result, expected):
    for values, expected_values in zip(result.to_dense(), expected.to_dense()):
        np.testing.assert_allclose(values, expected_values, atol=1e-6)
    np.testing.assert_array_equal(result.keypoints0, expected.keypoints0)


def test_matches_become_those_of_opencv_and_back(result, pair, photo):
    matches = convert.to_dmatches(result)
    assert [(m.queryIdx, m.trainIdx) for m in matches] == [tuple(row) for row in result.matches]
    assert np.allclose([m.distance for m in matches], 1 - result.scores)
    assert_equal(convert.from_dmatches(matches, *pair), result)
    keypoints0, keypoints1 = map(convert.to_keypoints, pair)
    assert np.allclose(cv2.KeyPoint.convert(keypoints0), result.keypoints0)
    images = photo[:, :420], photo[:, 100:]
    picture = cv2.drawMatches(images[0], keypoints0, images[1], keypoints1, matches, None)
    assert picture.shape == (400, 420 + 500, 3)


def test_matches_become_those_of_lightglue_and_back(result, pair):
    matches = convert.to_lightglue_matches(result)
    assert_equal(convert.from_lightglue_matches(matches, *pair), result)


def test_features_become_those_of_lightglue_and_back(result, pair, matcher):
    converted = [convert.from_lightglue(convert.to_lightglue(features)) for features in pair]
    for features, expected in zip(converted, pair):
        values, expected = convert.to_lightglue(features), convert.to_lightglue(expected)
        for name in ("keypoints", "scales", "keypoint_scores", "image_size"):
            np.testing.assert_array_equal(values[name], expected[name])
        np.testing.assert_allclose(values["oris"], expected["oris"], atol=2e-5)
        # SIFT is rounded to whole numbers of 512.
        np.testing.assert_allclose(values["descriptors"], expected["descriptors"], atol=0.05)
    is_same = matcher.match(*converted).to_dense()[0] == result.to_dense()[0]
    assert is_same.mean() > 0.95  # second orientations are lost


def test_scores_that_are_missing_or_zero_become_the_typical_one(pair):
    data = convert.to_lightglue(pair[0])
    zero = {**data, "keypoint_scores": 0 * data["scales"]}
    del data["keypoint_scores"]
    for values in (zero, data):
        scores = convert.to_lightglue(convert.from_lightglue(values))["keypoint_scores"]
        assert (scores == np.float32(TYPICAL_SCORE)).all()
