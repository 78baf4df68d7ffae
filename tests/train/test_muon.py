"""Muon: orthogonal steps of the size of Adam's, Adam for the rest, and state that can be saved and
taken up.
"""

import numpy as np
import pytest
import torch
from processes import in_group

from pipeline.train.optimizer import Muon, blocks, orthogonalize
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig

pytestmark = pytest.mark.cu111


@pytest.fixture
def model():
    torch.manual_seed(0)
    return SuperGlue(SuperGlueConfig(dim=16, heads=2, layers=1))


def set_gradients(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 8, 24), (2, 24, 8)])
def test_orthogonalized_keeps_the_directions_and_evens_their_lengths(shape):
    torch.manual_seed(1)
    matrices = torch.randn(shape, dtype=torch.float64)
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    found = u.transpose(1, 2) @ orthogonalize(matrices) @ vh.transpose(1, 2)
    diagonal = found.diagonal(dim1=1, dim2=2)
    assert torch.allclose(found, torch.diag_embed(diagonal), atol=1e-8)
    assert (diagonal > 0).all() and (diagonal < 1.3).all() and diagonal.median() > 0.65


def test_matrices_of_the_layers_take_an_orthogonal_step_and_the_rest_that_of_adam(model):
    twin = SuperGlue(model.config)
    twin.load_state_dict(model.state_dict())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for each in (model, twin):
        set_gradients(each)
    Muon(model, lr=1e-3).step()
    torch.optim.Adam(twin.parameters(), lr=1e-3).step()
    adam = dict(twin.named_parameters())
    muon = 0
    for name, p in model.named_parameters():
        if "attention" in name and p.ndim == 2:
            step = blocks((before[name] - p).detach(), 16) / (1e-3 * 0.2 * 16**0.5)
            lengths = torch.linalg.svdvals(step)
            assert lengths.max() < 1.3 and lengths.median() > 0.65, name
            muon += 1
        else:
            assert torch.allclose(p, adam[name], atol=1e-7), name
    assert muon == 8


def stepped(context):
    """All weights after two steps on the same gradients."""
    torch.manual_seed(0)
    model = SuperGlue(SuperGlueConfig(dim=32, heads=2, layers=2))
    optimizer = Muon(model, lr=1e-3)
    for seed in range(2):
        set_gradients(model, seed)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()


def test_ranks_that_share_the_matrices_take_the_step_of_one():
    whole = stepped(None)
    for part in in_group(2, stepped):  # forty matrices
        assert np.array_equal(part, whole)
