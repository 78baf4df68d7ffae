"""Batches of pairs: their sizes, and by which of its two orientations a keypoint is matched."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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

SIZE = (320, 240)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 900), st.integers(0, 900)), max_size=20), st.floats(0, 1))
def test_size_classes_hold_each_pair_once_with_little_padding(counts, padding):
    classes = similar_sizes(counts, padding)
    assert sorted(i for pairs in classes for i in pairs) == list(range(len(counts)))
    for pairs in classes:
        widths = [max(counts[i][side] for i in pairs) for side in (0, 1)]
        keypoints = sum(sum(counts[i]) for i in pairs)
        assert len(pairs) * sum(widths) <= (1 + padding) * keypoints + 1e-6


def test_sizes_are_two_in_an_octave():
    assert [size_class(n) for n in (0, 128, 129, 193, 257, 400, 513, 1024)] == [
        128, 128, 192, 256, 384, 512, 768, 1024
    ]  # fmt: skip


def one_hot(*places):
    made = np.zeros(128, np.uint8)
    made[list(places)] = 200
    return made


def keypoints(*descriptors):
    """A keypoint for each (first, second) descriptor; its angles are 10 and 90 degrees."""
    records = np.zeros(len(descriptors), ORIENTED)
    records["x"] = np.arange(len(descriptors))
    records["scale"] = 4.0
    records["score"] = 0.1
    records["angle"] = 10.0
    records["second_angle"] = 90.0
    for record, (first, second) in zip(records, descriptors):
        record["descriptor"] = first
        if second is not None:
            record["second_descriptor"] = second
    return records


def test_the_orientation_whose_descriptor_is_nearer_in_the_other_view_is_taken():
    here = keypoints((one_hot(1), one_hot(2)), (one_hot(5), None))
    there = keypoints((one_hot(2), one_hot(9)), (one_hot(5), one_hot(6)))
    chosen = choose_pair(Pair(here, there, SIZE, SIZE))
    assert chosen.records0.dtype == chosen.records1.dtype == KEYPOINT
    assert chosen.records0["angle"].tolist() == [90.0, 10.0]
    assert chosen.records1["angle"].tolist() == [10.0, 10.0]
    assert np.array_equal(chosen.records0["descriptor"], [one_hot(2), one_hot(5)])
    assert np.array_equal(chosen.records0["x"], here["x"])


def test_the_first_stays_where_neither_is_nearer_or_the_other_view_is_empty():
    here = keypoints((one_hot(1), one_hot(2)))
    nothing = keypoints()
    for there in (nothing, keypoints((one_hot(7), None)), keypoints((one_hot(1, 2), None))):
        chosen = choose_pair(Pair(here, there, SIZE, SIZE))
        assert chosen.records0["angle"].tolist() == [10.0] and len(chosen.records1) == len(there)


def test_keypoints_of_one_orientation_and_of_other_features_stay_as_they_are():
    plain = Pair(np.zeros(3, KEYPOINT), np.zeros(2, KEYPOINT), SIZE, SIZE)
    assert choose_pair(plain) is plain


def test_pairs_that_are_computed_one_by_one_choose_as_together(monkeypatch):
    rng = np.random.default_rng(0)

    def view(count):
        records = keypoints(*[(rng.integers(0, 9, 128), None) for _ in range(count)])
        has = rng.random(count) < 0.5
        records["second_descriptor"][has] = rng.integers(0, 9, (int(has.sum()), 128))
        return records

    batch = from_pairs([Pair(view(m), view(n), SIZE, SIZE) for m, n in ((9, 5), (0, 3), (12, 12))])
    together = choose_orientations(batch)
    monkeypatch.setattr(batches, "MAX_BYTES", 1)
    alone = choose_orientations(batch)
    for view in (0, 1):
        assert torch.equal(together.records[view], alone.records[view])


def test_a_turned_view_turns_both_angles():
    view = View(keypoints((one_hot(1), one_hot(2))), np.eye(3), SIZE)
    turned = Augmentation(rotation_deg=180.0).apply(view, 3, 0, others=None, min_scale=0.0, limit=2)
    records, H, *_ = turned
    turn = np.degrees(np.arctan2(H[1, 0], H[0, 0]))
    assert np.isclose((records["angle"][0] - 10.0 - turn + 180) % 360, 180, atol=1e-3)
    assert np.isclose((records["second_angle"][0] - 90.0 - turn + 180) % 360, 180, atol=1e-3)
