"""The ratio test by its definition, second orientations, one match of a keypoint, and the selection
of keypoints for the network.
"""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from superglue_sift.features import nearest
from superglue_sift.features.descriptors import to_root_sift
from superglue_sift.features.features import Features
from superglue_sift.features.nearest import match_by_ratio, select_keypoints


def make_features(*descriptors, scores=0.0):
    """Keypoints with these descriptors (n, 128) of one or two orientations."""
    descriptors = np.stack(descriptors, 1).astype(np.uint8)
    count, orientations, _ = descriptors.shape
    scales = np.full(count, 2.0, np.float32)
    scores = np.broadcast_to(np.float32(scores), count)
    oris = np.zeros((count, orientations), np.float32)
    return Features(np.zeros((count, 2), np.float32), scales, oris, scores, descriptors, (9, 9))


def plain_matches(rows0, rows1, limit):
    """Mutual nearest neighbors that pass both tests both ways, in the plainest way."""
    distances = np.sqrt(np.maximum(2 - 2 * rows0 @ rows1.T, 0))
    matches = set()
    for i, row in enumerate(distances):
        j = int(row.argmin())
        column = distances[:, j]
        passes = all(first < limit * second for first, second, *_ in map(np.sort, (row, column)))
        if column.argmin() == i and passes and row[j] < limit:
            matches.add((i, j))
    return matches


@given(st.integers(0, 2**32 - 1), st.integers(2, 600), st.integers(2, 40))
def test_matches_of_the_ratio_test_are_those_of_its_definition(seed, count0, count1):
    rng = np.random.default_rng(seed)
    descriptors0 = rng.gamma(0.6, 40, (count0, 128)).clip(0, 255).astype(np.uint8)
    copies = descriptors0[rng.integers(0, count0, count1)].astype(float)
    noise = rng.normal(0, rng.uniform(0, 40), copies.shape)
    descriptors1 = (copies + noise).clip(0, 255).astype(np.uint8)
    matches = nearest.match_by_ratio(make_features(descriptors0), make_features(descriptors1))
    indices, scores = matches.indices, matches.scores
    rows = [to_root_sift(descriptors).astype(float) for descriptors in (descriptors0, descriptors1)]
    # a ratio within rounding of the limit may fall on either side
    least, most = (plain_matches(*rows, limit) for limit in (0.8 - 1e-4, 0.8 + 1e-4))
    assert least <= set(map(tuple, indices.tolist())) <= most
    assert ((scores > 0.2 - 1e-3) & (scores <= 1)).all()
    assert len(np.unique(indices[:, 0])) == len(np.unique(indices[:, 1])) == len(matches)


def test_the_second_orientation_matches_too():
    rng = np.random.default_rng(0)
    descriptors0, first = rng.gamma(0.6, 40, (2, 50, 128)).clip(0, 255).astype(np.uint8)
    second = np.zeros_like(first)
    second[7] = descriptors0[3]
    sides = make_features(descriptors0), make_features(first, second)
    assert nearest.match_by_ratio(*sides).indices.tolist() == [[3, 7]]
    single = make_features(descriptors0[:1])
    assert len(nearest.match_by_ratio(single, single)) == 0  # no ratio


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), unique=True, max_size=30))
def test_matches_that_share_an_end_are_dropped_in_either_order_of_the_images(matches):
    matches = np.array(matches, int).reshape(-1, 2)
    scores = np.random.default_rng(len(matches)).permutation(len(matches)) / 30
    remaining = set(nearest.find_one_to_one(*matches.T, scores))
    assert remaining == set(nearest.find_one_to_one(*matches[:, ::-1].T, scores))
    for i in range(len(matches)):
        rivals = (matches == matches[i]).any(axis=1)
        assert (i in remaining) == (scores[i] == scores[rivals].max())


# Selection of keypoints


def make_orthogonal(entries, ranks):
    """Keypoints with these nonzero entries of their descriptors: equal ones, or at right angles."""
    return make_features(255 * np.eye(128, dtype=np.uint8)[entries], scores=ranks)


def select(sides, most):
    return select_keypoints(*sides, most, match_by_ratio(*sides, ratio=1.0))


def test_matched_keypoints_come_first_and_others_by_rank():
    sides = (
        make_orthogonal([0, 1, 2, 3, 4, 5], [0.1, 0.9, 0.2, 0.8, 0.7, 0.3]),
        make_orthogonal([5, 9, 10, 0], [0.1, 0.3, 0.2, 0.4]),
    )
    selected0, selected1 = select(sides, 3)
    # 0 and 5 are also in the other image; 1 has the best rank
    assert selected0.tolist() == [0, 1, 5]
    assert selected1.tolist() == [0, 1, 3]
    selected0, selected1 = select(sides, 6)  # no choice
    assert selected0.tolist() == list(range(6)) and selected1.tolist() == list(range(4))


@settings(max_examples=50)
@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 40))
def test_as_many_as_allowed_are_selected_in_either_order_of_the_images(count0, count1, most):
    rng = np.random.default_rng(count0)
    sides = [make_orthogonal(np.zeros(n, int), rng.random(n)) for n in (count0, count1)]
    for side in sides:
        side.descriptors[:] = rng.integers(0, 256, side.descriptors.shape)
    selected = select(sides, most)
    for side, index in zip(sides, selected):
        count = len(side.keypoints)
        limit = most if max(count0, count1) > most else count
        assert len(set(index)) == len(index) == min(count, limit)
    for index, swapped in zip(selected, select(sides[::-1], most)[::-1]):
        assert index.tolist() == swapped.tolist()
