"""Keypoints that are selected for the network, and matches of the others."""

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superglue_sift import Matcher, RequestError
from superglue_sift.features import sift
from superglue_sift.features.nearest import ratio_matches, select_keypoints
from superglue_sift.features.sift import KEYPOINT
from superglue_sift.geometry import two_view
from superglue_sift.geometry.guided_matching import add_guided_matches
from superglue_sift.matches import Matches
from superglue_sift.network.batch import Pair
from superglue_sift.network.superglue import match_pairs


def records_of(entries, ranks):
    """Keypoints whose descriptors have one entry each, so that others are at a right angle."""
    records = np.zeros(len(entries), KEYPOINT)
    records["x"] = np.arange(len(entries))
    records["scale"] = 2.0
    records["score"] = ranks
    records["descriptor"][np.arange(len(entries)), entries] = 255
    return records


def select(sides, most):
    return select_keypoints(*sides, most, ratio_matches(*sides, ratio=1.0))


def test_matched_keypoints_come_first_and_others_by_rank():
    one = records_of([0, 1, 2, 3, 4, 5], [0.1, 0.9, 0.2, 0.8, 0.7, 0.3])
    other = records_of([5, 9, 10, 0], [0.1, 0.3, 0.2, 0.4])
    selected0, selected1 = select((one, other), 3)
    # 0 and 5 are also in the other image; 1 has the best rank
    assert selected0.tolist() == [0, 1, 5]
    assert selected1.tolist() == [0, 1, 3]
    selected0, selected1 = select((one, other), 6)  # no choice
    assert selected0.tolist() == list(range(6)) and selected1.tolist() == list(range(4))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 40), st.integers(0, 9))
def test_any_numbers_of_keypoints(count0, count1, most, seed):
    rng = np.random.default_rng(seed)
    sides = []
    for count in (count0, count1):
        records = records_of(np.zeros(count, int), rng.random(count))
        records["descriptor"] = rng.integers(0, 256, (count, 128))
        sides.append(records)
    selected = select(sides, most)
    for side, index in zip(sides, selected):
        limit = most if max(count0, count1) > most else len(side)
        assert len(index) == min(len(side), limit) and (np.diff(index) > 0).all()
        assert set(index) <= set(range(len(side)))
    for index, swapped in zip(selected, select(sides[::-1], most)[::-1]):
        assert index.tolist() == swapped.tolist()  # the order of the images does not matter


def test_the_network_matches_the_selected_keypoints(photo, untrained):
    sides = [untrained.extract(image) for image in (photo, cv2.rotate(photo, cv2.ROTATE_180))]
    records = [side.records for side in sides]
    sizes = [side.size for side in sides]
    assert min(map(len, records)) > 300
    pair = Pair(*records, *sizes)
    selected = select(records, 300)
    found = match_pairs(untrained.model, [pair], "cpu", [selected])[0]
    few = Pair(*(each[index] for each, index in zip(records, selected)), *sizes)
    every = np.arange(len(selected[0])), np.arange(len(selected[1]))
    alone = match_pairs(untrained.model, [few], "cpu", [every])[0]
    assert len(alone) > 100
    for side in (0, 1):
        expected = selected[side][alone.indices[:, side]]
        np.testing.assert_array_equal(found.indices[:, side], expected)
    np.testing.assert_array_equal(found.scores, alone.scores)


def test_of_a_magnified_part_more_right_matches_are_found(photo, untrained):
    """Keypoints of highest rank are large: in the whole view and in its part not the same ones."""
    H = np.array([[3.0, 0, -600], [0, 3, -400], [0, 0, 1]])
    part = cv2.warpPerspective(photo, H, (600, 400), flags=cv2.INTER_CUBIC)
    right = {}
    for name, most in (("by rank", 200), ("selected", 4096)):
        matcher = Matcher(untrained.model, max_keypoints=most, network_keypoints=200, refine=False)
        found = matcher.match(photo, part)
        away = np.linalg.norm(two_view.transform(found.points0, H) - found.points1, axis=1)
        right[name] = int((away < 3).sum())
    assert right["selected"] > 1.5 * right["by rank"]


def test_the_number_must_be_one_or_more(untrained):
    with pytest.raises(
        RequestError, match="network_keypoints 0: must be a whole number, 1 or more"
    ):
        Matcher(untrained.model, network_keypoints=0)


def test_unseen_keypoints_are_matched_where_the_matches_around_them_say():
    rng = np.random.default_rng(0)
    points = rng.uniform(50, 450, (120, 2))
    A = np.array([[0.8, -0.6], [0.6, 0.8]])
    one, other = (records_of(np.zeros(120, int), np.ones(120)) for _ in range(2))
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
