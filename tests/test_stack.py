"""What differs between the stacks gives the same figures on both."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline import stack

pytestmark = pytest.mark.cu111


def test_bytes_are_read_as_floats_on_both_stacks():
    values = np.random.default_rng(0).normal(size=(3, 5, 37)).astype("<f4")
    values[0, 0, :4] = [-0.0, np.inf, -np.inf, 3.4e38]
    data = torch.from_numpy(values.view(np.uint8).copy())
    first = stack.floats_of_bytes(data[..., :20])
    second = stack.join_bytes(data[..., :20])
    assert first.shape == second.shape == (3, 5, 5)
    assert np.array_equal(first.numpy().view(np.int32), values[..., :5].copy().view(np.int32))
    assert np.array_equal(second.numpy().view(np.int32), first.numpy().view(np.int32))
