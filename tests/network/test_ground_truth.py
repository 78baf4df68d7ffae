"""The ground truth, against values a person can check."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_pairs import pairs_of, records_at, related

from superglue_sift.network.batch import Pair, from_pairs
from superglue_sift.network.ground_truth import IGNORED, UNMATCHED, Truth, ground_truth

pytestmark = pytest.mark.cu111
IDENTITY = np.eye(3)


def points(*xy):
    return np.array(xy, float).reshape(-1, 2)


def truth_of(keypoints0, keypoints1, H=IDENTITY, cells=None):
    """Of keypoints (M, 2) and (N, 2) of views of 100 x 100 px: (M,) and (N,)."""
    sides = records_at(keypoints0), records_at(keypoints1)
    one = Pair(*sides, (100, 100), (100, 100))
    batch = from_pairs([one], np.array(H, float)[None], cells=cells)
    found = ground_truth(batch)
    return Truth(*(matches[0, : len(side)] for matches, side in zip(found, sides)))


def test_bands():
    zero = points((10, 10), (30, 10), (50, 10), (70, 10), (90, 10))
    one = points((12.9, 10), (33.1, 10), (55.1, 10), (70, 10), (71, 10))
    truth = truth_of(zero, one)
    # up to 3 px match, up to 5 are ignored, more is unmatched; of two the nearer one matches
    assert truth.matches0.tolist() == [0, IGNORED, UNMATCHED, 3, UNMATCHED]
    assert truth.matches1.tolist() == [0, IGNORED, UNMATCHED, 3, IGNORED]


def test_outside_the_other_view_is_unmatched():
    shift = [[1, 0, 60], [0, 1, 0], [0, 0, 1]]
    truth = truth_of(points((41, 50), (5, 5)), points((97, 50), (65, 5)), shift)
    # (41, 50) lands 4 px from a keypoint, but outside; that keypoint, seen from its side, is
    # ignored
    assert truth.matches0.tolist() == [UNMATCHED, 1]
    assert truth.matches1.tolist() == [IGNORED, 1]
    back = truth_of(points((97, 50), (58, 5)), points((41, 50), (2, 5)), np.linalg.inv(shift))
    assert back.matches0.tolist() == [IGNORED, UNMATCHED]  # (58, 5) lands at -2


def test_outside_a_cell_is_unmatched():
    """Image 1 shows the photograph of image 0 in its left half alone."""
    everywhere = np.diag([0, 0, 1.0])
    left = np.diag([1 / 50, 1 / 100, 1])
    zero = points((10, 50), (52, 50), (70, 50))
    truth = truth_of(
        zero, points((11, 50), (48, 50), (70, 50)), cells=np.array([[everywhere, left]])
    )
    assert truth.matches0.tolist() == [0, UNMATCHED, UNMATCHED]
    assert truth.matches1.tolist() == [0, IGNORED, UNMATCHED]


def test_error_is_the_larger_of_both_directions():
    double = [[2, 0, 0], [0, 2, 0], [0, 0, 1]]
    # 2 px in view 1 (right by half of that in view 0): a match; 4 px there would be 2 px here,
    # and is none
    assert truth_of(points((10, 10)), points((22, 20)), double).matches0.tolist() == [0]
    assert truth_of(points((10, 10)), points((24, 20)), double).matches0.tolist() == [IGNORED]


@settings(max_examples=25)
@given(seed=st.integers(0, 1000), count=st.integers(1, 40))
def test_is_consistent_and_symmetric(seed, count):
    rng = np.random.default_rng(seed)
    H = np.eye(3) + rng.normal(0, [[0.1, 0.1, 5], [0.1, 0.1, 5], [1e-4, 1e-4, 0]])
    zero, one = rng.uniform(0, 100, (2, count, 2))
    truth = truth_of(zero, one, H)
    back = truth_of(one, zero, np.linalg.inv(H))
    for i, j in enumerate(truth.matches0.tolist()):
        assert j < 0 or truth.matches1[j] == i
    assert torch.equal(truth.matches0, back.matches1) and torch.equal(truth.matches1, back.matches0)


def test_points_of_the_horizon():
    """They are inf or nan in the other view, and match nothing, not even padding."""
    pairs = pairs_of((9, 5), (3, 8))
    for one in pairs:
        one.records0["x"][:3] = one.records1["x"][:3] = 50.0
    horizon = np.array([[1, 0, 0], [0, 1, 0], [-0.02, 0, 1.0]])  # x = 50
    assert (ground_truth(related(pairs, horizon)).matches0[:, :3] == UNMATCHED).all()
