"""Batches of images: padding, sizes, and by which of its two orientations a keypoint is matched."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_pairs import RAGGED, batch_pairs, label_pairs, make_features_at, make_pairs

from pipeline.keypoints.store import View
from pipeline.train.augmentation import rotate_view
from superglue_sift.network import batch as batches
from superglue_sift.network.batch import (
    choose_orientations,
    choose_orientations_of_pair,
    count_keypoints,
    group_similar_sizes,
    make_batch,
    map_tensors,
    pad_images,
    round_up_keypoints,
    select_images,
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


def make_oriented(*entries):
    """A keypoint for each (first, second): which entries of its two descriptors are not 0. Its
    orientations are 10 and 90 degrees.
    """
    descriptors = np.zeros((len(entries), 2, 128), np.uint8)
    for descriptor, (first, second) in zip(descriptors, entries):
        descriptor[0, first] = 200
        descriptor[1, second] = 200
    oris = np.tile(np.float32([10, 90]), (len(entries), 1))
    return make_features_at(np.zeros((len(entries), 2)))._replace(
        oris=oris, descriptors=descriptors
    )


@pytest.mark.parametrize(
    "most_bytes", [batches.MAX_COSINE_BYTES, 1], ids=["together", "one by one"]
)
def test_the_orientation_whose_descriptor_is_nearer_in_the_other_view_is_taken(
    monkeypatch, most_bytes
):
    monkeypatch.setattr(batches, "MAX_COSINE_BYTES", most_bytes)
    features = make_oriented((1, 2))
    pairs = [
        (make_oriented((1, 2), (5, [])), make_oriented((2, 9), (5, 6))),
        # the first stays where neither is nearer, or the other view is empty
        (features, make_oriented((7, []))),
        (features, make_oriented(([1, 2], []))),
        (features, make_oriented()),
    ]
    images0, images1 = choose_orientations(*batch_pairs(pairs))
    assert images0.oris[..., 0].tolist() == [[90, 10], [10, 0], [10, 0], [10, 0]]
    assert images1.oris[..., 0].tolist() == [[10, 10], [10, 0], [10, 0], [0, 0]]
    assert images0.descriptors[:, :, 0].argmax(-1).tolist() == [[2, 5], [1, 0], [1, 0], [1, 0]]
    assert images0.oris.shape == (4, 2, 1) and images0.descriptors.shape == (4, 2, 1, 128)
    assert choose_orientations(images0, images1)[0] is images0
    features0, features1 = choose_orientations_of_pair(*pairs[0])
    assert features0.oris.tolist() == [[90], [10]]
    assert np.array_equal(features0.descriptors, images0.descriptors[0])
    assert np.array_equal(features0.scales, pairs[0][0].scales)
    # keypoints of one orientation stay as they are
    assert choose_orientations_of_pair(features0, features1)[0] is features0


def test_keypoints_of_one_and_of_two_orientations_are_matched_with_each_other():
    images = batch_pairs([(make_oriented((1, 2)), make_oriented((2, [])).select([0]))])
    single = images[1]._replace(
        oris=images[1].oris[..., :1], descriptors=images[1].descriptors[:, :, :1]
    )
    expected, _ = choose_orientations(*images)
    images0, images1 = choose_orientations(images[0], single)
    assert torch.equal(images0.descriptors, expected.descriptors)
    assert torch.equal(images1.descriptors, single.descriptors)


def assert_equal(images, expected):
    for name, value, expected_value in zip(images._fields, images, expected):
        if isinstance(expected_value, torch.Tensor):
            assert torch.equal(value, expected_value), name
        else:
            assert value == expected_value, name


def test_a_batch_has_the_values_of_its_images_and_zeros_as_padding():
    values = {"keypoints": [3.5, 7.25], "scales": 4.0, "oris": [350, 20], "scores": 0.25}
    descriptors = np.zeros((2, 2, 128), np.uint8)
    descriptors[1] = [[9] * 128, [5] * 128]
    features = make_oriented((1, 2), (1, 2))._replace(
        descriptors=descriptors,
        **{name: np.float32([np.zeros_like(value), value]) for name, value in values.items()},
    )
    # SIFT saw the second image enlarged twice, and the third has one orientation
    twice = features.select([1])._replace(image_size=(64, 48), sift_scale=2.0)
    single = features.select([1])._replace(
        oris=features.oris[1:, :1], descriptors=descriptors[1:, :1], image_size=(9, 8)
    )
    batch = make_batch([features, twice, single, features.select(slice(0))])
    zeros = [0.0, 0.0]
    assert batch.keypoints.tolist() == [
        [zeros, [3.5, 7.25]], [[3.5, 7.25], zeros], [[3.5, 7.25], zeros], [zeros] * 2
    ]  # fmt: skip
    assert batch.scales.tolist() == [[0, 4], [8, 0], [4, 0], zeros]
    assert batch.scores.tolist() == [[0, 0.25], [0.25, 0], [0.25, 0], zeros]
    assert batch.oris[:3].amax(1).tolist() == [[350, 20], [350, 20], [350, 0]]
    assert batch.descriptors[:3].amax((1, 3)).tolist() == [[9, 5], [9, 5], [9, 0]]
    assert batch.image_size.tolist() == [[320, 240], [64, 48], [9, 8], [320, 240]]
    assert count_keypoints(batch).tolist() == batch.mask.sum(1).tolist() == [2, 1, 1, 0]
    assert make_batch([features]).mask is None


def test_selected_images_are_the_batch_of_these_images_alone():
    images = [features for features, _ in make_pairs(*RAGGED)]
    batch = make_batch(images)
    for index in ([0], [1, 4], [5, 2], [3, 3, 0]):
        assert_equal(select_images(batch, index), make_batch([images[i] for i in index]))
    empty = select_images(batch, [])
    assert empty.keypoints.shape == (0, 1, 2) and empty.descriptors.dtype == torch.uint8


def test_padding_adds_keypoints_and_images_to_a_batch():
    batch = make_batch([features for features, _ in make_pairs((3, 3), (3, 3))])
    assert batch.mask is None and pad_images(batch, 2, 3).mask is None
    padded = pad_images(batch, 3, 5)
    assert count_keypoints(padded).tolist() == [3, 3, 0]
    assert padded.descriptors.shape == (3, 5, 1, 128) and padded.image_size.shape == (3, 2)
    assert_equal(select_images(padded, [0, 1]), batch)
    assert not padded.keypoints[2].any()


def test_a_batch_of_pairs_is_moved_with_all_its_tensors():
    batch = label_pairs(make_pairs(*RAGGED))
    assert batch.to("cpu") is batch
    moved = batch.to("meta")
    tensors = [*moved.images0[:7], *moved.images1[:7], moved.H_0to1, moved.cells]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert_equal(map_tensors(torch.clone, batch.images0), batch.images0)


def test_a_turned_view_turns_both_orientations():
    view = View(make_oriented((1, 2)), np.eye(3))
    turned = rotate_view(view, 100.0)
    H = turned.H_image_to_view
    assert np.isclose(np.degrees(np.arctan2(H[1, 0], H[0, 0])), 100)
    assert np.allclose(turned.features.oris[0], [110, 190])
