"""Nearest neighbours by descriptor as the network sees them: known values, and the padded form
equal to the ragged.
"""

import math

import pytest
import torch
from made_views import SIZE, made_store

from pipeline.features.store import Store
from superglue_sift.batch import Images, Keypoints, Pair, from_pairs
from superglue_sift.network_inputs import (
    choose_orientations,
    geometry_of,
    neighbour_features,
    root_sift,
)

pytestmark = pytest.mark.cu111


def pairs_of(store):
    """Pairs of 40 to 68 keypoints, and three with none, one and two in one of the views."""
    views = [store.view(image, view).records for image in (0, 2, 4) for view in (0, 1)]
    some = [Pair(a, b, SIZE, SIZE) for a, b in zip(views[::2], views[1::2])]
    return some + [Pair(views[0][:n], views[1], SIZE, SIZE) for n in (0, 1, 2)]


@pytest.fixture
def batch(tmp_path):
    return from_pairs(pairs_of(Store(made_store(tmp_path))))


def found_of(degrees0, degrees1):
    """Features of the keypoints of both images, whose descriptors are directions of the plane."""
    sides = [torch.tensor(side, dtype=torch.float64).deg2rad() for side in (degrees0, degrees1)]
    descriptors = torch.cat([torch.stack([side.cos(), side.sin()], 1) for side in sides])
    geometry = torch.zeros(len(descriptors), 6, dtype=torch.float64)
    geometry[:, 0] = torch.cat([torch.arange(len(side)) for side in sides])
    masks = [torch.ones(1, len(side), dtype=torch.bool) for side in sides]
    found = neighbour_features(descriptors, geometry, Images(masks, [False] * 2, [False] * 2))
    return found.split([len(side) for side in sides])


def test_known_values_of_two_and_three_descriptors():
    # angles 0 and 90 degrees against 10, 60 and 80: nearest 10 and 80 degrees away
    found0, found1 = found_of([0.0, 90.0], [10.0, 60.0, 80.0])
    chord = [2 * math.sin(math.radians(degrees) / 2) for degrees in (10, 30, 60)]
    # the position of the neighbour, here its index
    assert found0[:, 3].tolist() == [0, 2] and found1[:, 3].tolist() == [0, 1, 1]
    expected = [[chord[0], chord[0] / chord[2], 1.0], [chord[0], chord[0] / chord[1], 1.0]]
    assert torch.allclose(found0[:, :3], torch.tensor(expected, dtype=torch.float64), atol=1e-6)
    assert found1[:, 2].tolist() == [1.0, 0.0, 1.0]


def test_one_descriptor_alone_has_no_distinctive_neighbour():
    found = torch.cat(found_of([0.0], [60.0]))[:, :3]
    assert torch.allclose(found, torch.ones_like(found))


def inputs_of(batch):
    """Unit descriptors, geometry and images of a batch."""
    keypoints = Keypoints.of([choose_orientations(batch)])
    return root_sift(keypoints.descriptors), geometry_of(keypoints, True), keypoints.images


def test_a_turn_of_both_images_leaves_what_relates_the_neighbours(batch):
    descriptors, geometry, images = inputs_of(batch)
    c = math.cos(1.0)
    s = math.sin(1.0)
    turn = torch.tensor([[c, s], [-s, c]])
    turned = torch.cat([geometry[:, :2] @ turn, geometry[:, 2:4], geometry[:, 4:6] @ turn], 1)
    before, after = (neighbour_features(descriptors, g, images) for g in (geometry, turned))
    kept = [0, 1, 2, 5, 6, 7]
    assert torch.allclose(before[:, kept], after[:, kept], atol=1e-5)
    assert torch.allclose(before[:, 3:5] @ turn, after[:, 3:5], atol=1e-5)
