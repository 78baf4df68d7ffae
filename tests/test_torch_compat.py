"""superglue_sift/torch_compat.py: the same bits on every processor, the same numbers on both
stacks.
"""

import numpy as np
import pytest
import torch

from superglue_sift import torch_compat


def test_square_roots_are_those_of_exact_steps():
    """Two correctly rounded operations of numpy; `Tensor.sqrt` differs in a sixth of the values on
    AMD.
    """
    values = np.random.default_rng(0).uniform(0, 4, 10_007).astype(np.float32)
    values[::7] = 0
    with np.errstate(divide="ignore"):
        exact = np.float32(1) / (np.float32(1) / np.sqrt(values))
    assert np.array_equal(torch_compat.sqrt(torch.from_numpy(values)).numpy(), exact)
    assert np.allclose(exact, np.sqrt(values.astype(np.float64)), rtol=2e-7)
    assert torch_compat.sqrt(torch.tensor([0.0, torch.inf])).tolist() == [0.0, torch.inf]


@pytest.mark.cu111
def test_layer_norm_accepts_bfloat16_and_float64():
    torch.manual_seed(0)
    norm = torch_compat.LayerNorm(8)
    x = torch.randn(3, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = norm(x.bfloat16())
    # Bfloat16 resolves 0.8 % of 2
    assert torch.allclose(narrow.float(), norm(x.bfloat16().float()), atol=0.02)
    assert norm.double()(x.double()).dtype == torch.float64
