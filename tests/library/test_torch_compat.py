"""superglue_sift/torch_compat.py: the same bits on every processor."""

import numpy as np
import torch

from superglue_sift.torch_compat import sqrt


def test_square_roots_are_those_of_exact_steps():
    """Two correctly rounded operations of numpy; `Tensor.sqrt` differs in a sixth of the values on
    AMD.
    """
    values = np.random.default_rng(0).uniform(0, 4, 10_007).astype(np.float32)
    values[::7] = 0
    with np.errstate(divide="ignore"):
        exact = np.float32(1) / (np.float32(1) / np.sqrt(values))
    assert np.array_equal(sqrt(torch.from_numpy(values)).numpy(), exact)
    assert np.allclose(exact, np.sqrt(values.astype(np.float64)), rtol=2e-7)
    assert sqrt(torch.tensor([0.0, torch.inf])).tolist() == [0.0, torch.inf]
