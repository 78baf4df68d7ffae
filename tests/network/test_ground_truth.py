"""The ground truth, against values a person can check."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_pairs import batch_pairs, make_features_at, make_pairs

from superglue_sift.network.ground_truth import IGNORED, UNMATCHED, find_true_matches

pytestmark = pytest.mark.cu111
SHIFT = np.array([[1, 0, 60], [0, 1, 0], [0, 0, 1.0]])
DOUBLE = np.diag([2, 2, 1.0])


def find_truth(keypoints0, keypoints1, H, cells=None):
    """The truth of keypoints (M, 2) and (N, 2) of views of 100 x 100 px: (M,) and (N,)."""
    images = batch_pairs(
        [[make_features_at(points, (100, 100)) for points in (keypoints0, keypoints1)]]
    )
    cells = None if cells is None else torch.from_numpy(cells)
    truth = find_true_matches(*images, torch.from_numpy(H[None]), cells)
    counts = len(keypoints0), len(keypoints1)
    return [matches[0, :count].tolist() for matches, count in zip(truth, counts)]


# Points of both views, the homography, perhaps the cells, and the matches of both views
CASES = {
    # up to 3 px match, up to 5 are ignored, more is unmatched; of two the nearer one matches
    "bands": (
        [(10, 10), (30, 10), (50, 10), (70, 10), (90, 10)],
        [(12.9, 10), (33.1, 10), (55.1, 10), (70, 10), (71, 10)],
        np.eye(3),
        [0, IGNORED, UNMATCHED, 3, UNMATCHED],
        [0, IGNORED, UNMATCHED, 3, IGNORED],
    ),
    # Exactly 3 px is no match, and exactly 5 px is unmatched.
    "limits": (
        [(10, 10), (50, 10)],
        [(13, 10), (55, 10)],
        np.eye(3),
        [IGNORED, UNMATCHED],
        [IGNORED, UNMATCHED],
    ),
    # (41, 50) lands 4 px from a keypoint, but outside. That keypoint, seen from its side, is
    # ignored.
    "outside": ([(41, 50), (5, 5)], [(97, 50), (65, 5)], SHIFT, [UNMATCHED, 1], [IGNORED, 1]),
    # A view ends half a pixel beyond its last pixel center, at 99 px: a keypoint that lands
    # at 99.4 px, and 4 px from another one, is in it; at 99.6 px it is not. So it is at the left.
    "edges": (
        [(39.4, 10), (39.6, 30)],
        [(95.4, 10), (95.6, 30)],
        SHIFT,
        [IGNORED, UNMATCHED],
        [IGNORED, IGNORED],
    ),
    "left edge": (
        [(3.6, 10), (3.4, 30)],
        [(59.6, 10), (59.4, 30)],
        SHIFT,
        [IGNORED, IGNORED],
        [IGNORED, UNMATCHED],
    ),
    # The error is the larger one of both directions: 2 px in view 1 match, 4 px there do not.
    "directions": ([(10, 10), (40, 40)], [(22, 20), (84, 80)], DOUBLE, [0, IGNORED], [0, IGNORED]),
    # Image 1 shows the photograph of image 0 in its left half alone.
    "cell": (
        [(10, 50), (52, 50), (70, 50)],
        [(11, 50), (48, 50), (70, 50)],
        np.eye(3),
        np.array([[np.diag([0, 0, 1.0]), np.diag([1 / 50, 1 / 100, 1])]]),
        [0, UNMATCHED, UNMATCHED],
        [0, IGNORED, UNMATCHED],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_true_matches_of_known_points(name):
    *arguments, matches0, matches1 = CASES[name]
    assert find_truth(*arguments) == [matches0, matches1]


@settings(max_examples=25)
@given(seed=st.integers(0, 1000), count=st.integers(1, 40))
def test_true_matches_are_mutual_and_do_not_depend_on_the_order_of_the_images(seed, count):
    rng = np.random.default_rng(seed)
    H = np.eye(3) + rng.normal(0, [[0.1, 0.1, 5], [0.1, 0.1, 5], [1e-4, 1e-4, 0]])
    points0, points1 = rng.uniform(0, 100, (2, count, 2))
    matches0, matches1 = find_truth(points0, points1, H)
    assert all(j < 0 or matches1[j] == i for i, j in enumerate(matches0))
    assert find_truth(points1, points0, np.linalg.inv(H)) == [matches1, matches0]


def test_points_of_the_horizon_match_nothing():
    """They are inf or nan in the other view."""
    pairs = make_pairs((9, 5), (3, 8))
    for features in itertools.chain(*pairs):
        features.keypoints[:3, 0] = 50.0
    horizon = torch.tensor([[1, 0, 0], [0, 1, 0], [-0.02, 0, 1.0]])  # x = 50
    truth = find_true_matches(*batch_pairs(pairs), horizon.expand(2, 3, 3))
    assert (truth.matches0[:, :3] == UNMATCHED).all()
