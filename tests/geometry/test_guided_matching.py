"""Matches of keypoints that the network did not get, where the matches around them lead."""

import numpy as np
from made_pairs import records_at

from superglue_sift.features import sift
from superglue_sift.geometry.verification import add_guided_matches
from superglue_sift.matches import Matches


def test_other_keypoints_are_matched_where_the_matches_around_them_say():
    rng = np.random.default_rng(0)
    points = rng.uniform(50, 450, (120, 2))
    A = np.array([[0.8, -0.6], [0.6, 0.8]])
    one, other = (records_at(np.zeros((120, 2))) for _ in range(2))
    for records, places in ((one, points), (other, points @ A.T + [300, 20])):
        records["x"], records["y"] = places.T
    other["x"][100:110] += 40  # wrong
    index = np.arange(120)
    indices = np.stack([index[:60]] * 2, axis=1)
    # the network does not believe the match of 70 with 95
    found = Matches(np.append(indices, [[70, 95]], axis=0), np.float32([0.9] * 60 + [0.1]))
    selected = np.arange(80), np.arange(80)  # the network got 60 to 79, and did not match them
    pairs = np.stack([index, index], axis=1)
    pairs[119] = 119, 3  # image 1's keypoint is matched
    mutual = Matches(pairs, np.full(120, 0.01, np.float32))
    positions = sift.positions(one), sift.positions(other)
    extended = add_guided_matches(found, mutual, selected, positions, 0.3)
    right = (index < 60) | ((index >= 80) & (index < 100)) | ((index >= 110) & (index < 119))
    assert extended.indices.tolist() == [[i, i] for i in index[right]]
    np.testing.assert_allclose(extended.scores, 0.9, rtol=1e-6)
    few = add_guided_matches(found.only(slice(7)), mutual, selected, positions, 0.3)
    assert len(few) == 7  # eight matches are needed
