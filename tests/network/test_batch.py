"""Batches of pairs: their sizes, and by which of its two orientations a keypoint is matched."""

import dataclasses
import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_pairs import RAGGED, SIZE, pairs_of

from pipeline.keypoints.store import View
from pipeline.train.augmentation import Augmentation
from superglue_sift.features.sift import KEYPOINT, ORIENTED
from superglue_sift.network import batch as batches
from superglue_sift.network.batch import (
    Pair,
    PairBatch,
    choose_orientations,
    choose_pair_orientations,
    from_pairs,
    group_similar_sizes,
    round_up_keypoints,
)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 900), st.integers(0, 900)), max_size=20), st.floats(0, 1))
def test_size_classes_hold_each_pair_once_with_little_padding(counts, padding):
    classes = group_similar_sizes(counts, padding)
    assert sorted(itertools.chain(*classes)) == list(range(len(counts)))
    for pairs in classes:
        sides = list(zip(*(counts[i] for i in pairs)))
        keypoints = sum(map(sum, sides))
        assert len(pairs) * sum(map(max, sides)) <= (1 + padding) * keypoints + 1e-6


def test_sizes_are_two_in_an_octave():
    assert [round_up_keypoints(n) for n in (0, 128, 129, 193, 257, 400, 513, 1024)] == [
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


@pytest.mark.parametrize(
    "most_bytes", [batches.MAX_COSINE_BYTES, 1], ids=["together", "one by one"]
)
def test_the_orientation_whose_descriptor_is_nearer_in_the_other_view_is_taken(
    monkeypatch, most_bytes
):
    monkeypatch.setattr(batches, "MAX_COSINE_BYTES", most_bytes)
    here = keypoints((1, 2))
    pairs = [
        (keypoints((1, 2), (5, [])), keypoints((2, 9), (5, 6))),
        # the first stays where neither is nearer, or the other view is empty
        (here, keypoints((7, []))),
        (here, keypoints(([1, 2], []))),
        (here, keypoints()),
    ]
    pairs = [Pair(*records, SIZE, SIZE) for records in pairs]
    batch = choose_orientations(from_pairs(pairs))
    assert batch.oris0.tolist() == [[90, 10], [10, 0], [10, 0], [10, 0]]
    assert batch.oris1.tolist() == [[10, 10], [10, 0], [10, 0], [0, 0]]
    assert batch.descriptors0.argmax(-1).tolist() == [[2, 5], [1, 0], [1, 0], [1, 0]]
    assert batch.second_oris0 is None and choose_orientations(batch) is batch
    alone = choose_pair_orientations(pairs[0])
    assert alone.records0.dtype == KEYPOINT
    assert np.array_equal(alone.records0["angle"], [90, 10])
    assert np.array_equal(alone.records0["descriptor"], batch.descriptors0[0])
    assert np.array_equal(alone.records0["scale"], pairs[0].records0["scale"])
    assert choose_pair_orientations(alone) is alone  # keypoints of one orientation stay as they are


def tensors_of(batch):
    """The tensors of a batch by name, without those that are None."""
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return {name: value for name, value in values.items() if value is not None}


def test_each_field_of_the_records_has_its_tensor():
    """Known values at a known place, and zeros where there is padding."""
    records = np.zeros(2, ORIENTED)
    values = {"x": 3.5, "y": 7.25, "scale": 4.0, "angle": 350.0, "score": 0.03}
    values.update(descriptor=9, second_angle=20.0, second_descriptor=5)
    for name, value in values.items():
        records[name][1] = value
    one = Pair(records, records[:1], (320, 240), (100, 50))
    other = Pair(records[:0], records[1:], (64, 48), (32, 16))
    batch = from_pairs([one, other], np.stack([np.eye(3), np.diag([2.0, 2.0, 1.0])]))
    assert batch.keypoints0.tolist() == [[[0, 0], [3.5, 7.25]], [[0, 0], [0, 0]]]
    assert batch.keypoints1.tolist() == [[[0, 0]], [[3.5, 7.25]]]
    for name, value in (
        ("scales0", 4.0),
        ("oris0", 350.0),
        ("scores0", np.float32(0.03)),
        ("second_oris0", 20.0),
        ("descriptors0", 9),
        ("second_descriptors0", 5),
    ):
        tensor = getattr(batch, name)
        assert (tensor[0, 1] == value).all() and tensor.count_nonzero() == tensor[0, 1].numel()
    assert batch.image_size0.tolist() == [[320, 240], [64, 48]]
    assert batch.image_size1.tolist() == [[100, 50], [32, 16]]
    assert batch.mask0.tolist() == [[True, True], [False, False]] and batch.mask1 is None
    assert batch.counts.tolist() == [[2, 1], [0, 1]] and len(batch) == 2
    assert batch.H_0to1[1].diag().tolist() == [2, 2, 1] and batch.cells is None


@pytest.mark.parametrize("flat", [True, False], ids=["of from_pairs", "of tensors"])
def test_a_batch_is_moved_as_one_tensor_for_each_dtype(flat):
    H = np.stack([np.eye(3)] * len(RAGGED))
    batch = from_pairs(pairs_of(*RAGGED), H)
    if not flat:
        batch = PairBatch(**tensors_of(batch))
    moved = []
    again = batch._map_tensors(lambda tensor: moved.append(tensor.dtype) or tensor.clone())
    assert len(moved) == 4 and {*moved} == {torch.bool, torch.float32, torch.float64, torch.uint8}
    for other in (again, pickle.loads(pickle.dumps(batch))):  # noqa: S301, these are our bytes
        assert tensors_of(other).keys() == tensors_of(batch).keys()
        for name, tensor in tensors_of(batch).items():
            assert torch.equal(tensor, getattr(other, name)), name
            assert tensor.data_ptr() != getattr(other, name).data_ptr()
    assert batch.to("cpu") is batch


def test_selected_pairs_are_the_batch_of_these_pairs_alone():
    pairs = pairs_of(*RAGGED)
    H = np.arange(9.0 * len(RAGGED)).reshape(-1, 3, 3)
    batch = from_pairs(pairs, H)
    for index in ([0], [1, 4], [5, 2], [3, 3, 0]):
        selected = tensors_of(batch.select(index))
        alone = tensors_of(from_pairs([pairs[i] for i in index], H[index]))
        assert selected.keys() == alone.keys()
        for name, tensor in alone.items():
            assert torch.equal(tensor, selected[name]), (index, name)


def test_padding_adds_keypoints_and_pairs_to_a_batch():
    batch = from_pairs(pairs_of((3, 3), (3, 3)))
    assert batch.mask0 is None and batch.pad(2, 3).mask0 is None
    padded = batch.pad(3, 5)
    assert padded.counts.tolist() == [[3, 3], [3, 3], [0, 0]]
    assert padded.descriptors1.shape == (3, 5, 128) and padded.image_size0.shape == (3, 2)
    assert torch.equal(padded.keypoints1[:2, :3], batch.keypoints1)
    assert padded.mask0.sum() == 6 and not padded.keypoints0[2].any()


def test_a_turned_view_turns_both_angles():
    view = View(keypoints((1, 2)), np.eye(3), SIZE)
    turned = Augmentation(rotation_deg=180.0).apply(
        view, 3, 0, draw_other_view=None, min_scale=0.0, limit=2
    )
    (record,), H, *_ = turned
    turn = np.degrees(np.arctan2(H[1, 0], H[0, 0]))
    for name, before in (("angle", 10.0), ("second_angle", 90.0)):
        assert np.isclose((record[name] - before - turn + 180) % 360, 180, atol=1e-3)
