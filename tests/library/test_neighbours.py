"""Nearest neighbours by descriptor as the network sees them: known values."""

import math

import pytest
import torch

from superglue_sift.network.batch import Images
from superglue_sift.network.superglue import neighbour_features

pytestmark = pytest.mark.cu111


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
