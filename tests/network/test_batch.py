"""Batches of pairs: their sizes, and by which of its two orientations a keypoint is matched."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_pairs import SIZE

from pipeline.keypoints.store import View
from pipeline.train.augmentation import Augmentation
from superglue_sift.features.sift import KEYPOINT, ORIENTED
from superglue_sift.network import batch as batches
from superglue_sift.network.batch import (
    Pair,
    choose_orientations,
    choose_pair,
    from_pairs,
    similar_sizes,
    size_class,
)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 900), st.integers(0, 900)), max_size=20), st.floats(0, 1))
def test_size_classes_hold_each_pair_once_with_little_padding(counts, padding):
    classes = similar_sizes(counts, padding)
    assert sorted(itertools.chain(*classes)) == list(range(len(counts)))
    for pairs in classes:
        sides = list(zip(*(counts[i] for i in pairs)))
        keypoints = sum(map(sum, sides))
        assert len(pairs) * sum(map(max, sides)) <= (1 + padding) * keypoints + 1e-6


def test_sizes_are_two_in_an_octave():
    assert [size_class(n) for n in (0, 128, 129, 193, 257, 400, 513, 1024)] == [
        128, 128, 192, 256, 384, 512, 768, 1024
    ]  # fmt: skip


def keypoints(*places):
    """A keypoint for each (first, second): which entries of its two descriptors are not 0. Its
    angles are 10 and 90 degrees.
    """
    records = np.zeros(len(places), ORIENTED)
    records["scale"] = 4.0
    records["angle"] = 10.0
    records["second_angle"] = 90.0
    for record, (first, second) in zip(records, places):
        record["descriptor"][first] = 200
        record["second_descriptor"][second] = 200
    return records


@pytest.mark.parametrize("most_bytes", [batches.MAX_BYTES, 1], ids=["together", "one by one"])
def test_the_orientation_whose_descriptor_is_nearer_in_the_other_view_is_taken(
    monkeypatch, most_bytes
):
    monkeypatch.setattr(batches, "MAX_BYTES", most_bytes)
    here = keypoints((1, 2))
    pairs = [
        (keypoints((1, 2), (5, [])), keypoints((2, 9), (5, 6))),
        # the first stays where neither is nearer, or the other view is empty
        (here, keypoints((7, []))),
        (here, keypoints(([1, 2], []))),
        (here, keypoints()),
    ]
    pairs = [Pair(*records, SIZE, SIZE) for records in pairs]
    records0, records1 = (
        records.numpy().view(KEYPOINT)[..., 0]
        for records in choose_orientations(from_pairs(pairs)).records
    )
    assert records0["angle"].tolist() == [[90, 10], [10, 0], [10, 0], [10, 0]]
    assert records1["angle"].tolist() == [[10, 10], [10, 0], [10, 0], [0, 0]]
    assert records0["descriptor"].argmax(-1).tolist() == [[2, 5], [1, 0], [1, 0], [1, 0]]
    alone = choose_pair(pairs[0])
    assert np.array_equal(alone.records0, records0[0])
    assert choose_pair(alone) is alone  # keypoints of one orientation stay as they are


def test_a_turned_view_turns_both_angles():
    view = View(keypoints((1, 2)), np.eye(3), SIZE)
    turned = Augmentation(rotation_deg=180.0).apply(view, 3, 0, others=None, min_scale=0.0, limit=2)
    (record,), H, *_ = turned
    turn = np.degrees(np.arctan2(H[1, 0], H[0, 0]))
    for name, before in (("angle", 10.0), ("second_angle", 90.0)):
        assert np.isclose((record[name] - before - turn + 180) % 360, 180, atol=1e-3)
