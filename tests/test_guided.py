"""Guided matching: which mutual nearest neighbors are added."""

import numpy as np
import pytest
from made_matches import match_range

from superglue_sift.guided import add_guided_matches
from superglue_sift.matches import Matches

AFFINE = np.array([[0.8, -0.6], [0.6, 0.8]])


@pytest.mark.parametrize("factors", [(1.0, 1.0), (3.0, 0.5)])
def test_other_keypoints_are_matched_where_the_matches_around_them_predict_them(factors):
    """In files of other sizes, too, if limits are multiplied."""
    keypoints0 = np.random.default_rng(0).uniform(50, 450, (120, 2))
    keypoints1 = keypoints0 @ AFFINE.T + [300, 20]
    keypoints1[100:110, 0] += 40  # wrong
    keypoints = factors[0] * keypoints0, factors[1] * keypoints1
    # The network is unsure of the match of 70 with 95.
    indices = np.append(match_range(0, 60, 0.9).indices, [[70, 95]], axis=0)
    network_matches = Matches(indices, np.float32([0.9] * 60 + [0.1]))
    selected = np.arange(80), np.arange(80)  # the network got 60 to 79, and did not match them
    mutual_matches = match_range(0, 120, 0.01)
    mutual_matches.indices[119] = 119, 3  # image 1's keypoint is matched
    extended = add_guided_matches(
        network_matches, mutual_matches, selected, keypoints, factors, threshold=0.3
    )
    index = np.arange(120)
    is_matched = (index < 60) | ((index >= 80) & (index < 100)) | ((index >= 110) & (index < 119))
    assert extended.indices.tolist() == [[i, i] for i in index[is_matched]]
    np.testing.assert_allclose(extended.scores, 0.9, rtol=1e-6)


def test_seven_matches_are_too_few_to_guide():
    keypoints = (np.random.default_rng(0).uniform(0, 100, (20, 2)),) * 2
    seven = match_range(0, 7, 0.9)
    selected = np.arange(7), np.arange(7)
    extended = add_guided_matches(
        seven, match_range(0, 20, 0.5), selected, keypoints, (1, 1), threshold=0.3
    )
    np.testing.assert_array_equal(extended.indices, seven.indices)
