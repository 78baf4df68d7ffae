"""Precision, learning rate, and Muon: orthogonal steps of the size of Adam's, Adam for the rest."""

import numpy as np
import pytest
import torch
from processes import in_group

from pipeline.errors import RequestError
from pipeline.train import optimizer
from pipeline.train.optimizer import Muon, cut_into_blocks, orthogonalize
from superglue_sift import torch_compat
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig

pytestmark = pytest.mark.cu111


@pytest.fixture
def choose(monkeypatch):
    """`choose(precision, *devices)`: the precision of ranks with these devices. A device is the
    capability of a GPU, or whether a CPU has AMX.
    """

    def call(precision, *devices):
        ranks = []
        for kind in devices:
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, kind=kind: kind)
            monkeypatch.setattr(torch_compat, "has_amx", lambda kind=kind: kind)
            device = torch.device("cpu" if isinstance(kind, bool) else "cuda")
            ranks.append(optimizer.detect_abilities(device))
        return optimizer.choose_precision(precision, ranks)

    return call


@pytest.mark.parametrize(
    "device, expected",
    [
        ((9, 0), "bfloat16"),  # H100, H200
        ((8, 0), "bfloat16"),  # A100
        ((7, 5), "float16"),  # T4
        ((7, 0), "float16"),  # V100
        ((6, 1), "float32"),  # GTX 10
        (True, "bfloat16"),
        (False, "float32"),  # where bfloat16 is slower on some
    ],
)
def test_auto_takes_what_is_fast_on_the_device(choose, device, expected):
    precision, reason = choose("auto", device)
    assert precision == expected and reason.startswith("auto")
    if not isinstance(device, bool):
        assert "{}.{}".format(*device) in reason
    assert choose("float32", device)[0] == "float32"


@pytest.mark.parametrize(
    "devices, expected",
    [
        (((8, 0), (7, 0)), "float16"),  # an A100 does what a V100 can, whoever is rank 0
        (((7, 0), (8, 0)), "float16"),
        (((9, 0), (8, 0), (6, 1)), "float32"),
        (((9, 0), (8, 0)), "bfloat16"),
        ((True, False), "float32"),
        ((False, True), "float32"),
    ],
)
def test_auto_takes_the_best_that_is_fast_on_every_rank(choose, devices, expected):
    assert choose("auto", *devices)[0] == expected


def test_a_precision_is_used_where_it_is_slow_and_refused_where_a_device_lacks_it(choose):
    with pytest.raises(RequestError, match=r"bfloat16.*rank 1.*7\.5"):
        choose("bfloat16", (8, 0), (7, 5))
    assert choose("bfloat16", False)[0] == "bfloat16"
    assert choose("float16", False)[0] == "float32"


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
    rotated = u.transpose(1, 2) @ orthogonalize(matrices) @ vh.transpose(1, 2)
    diagonal = rotated.diagonal(dim1=1, dim2=2)
    assert torch.allclose(rotated, torch.diag_embed(diagonal), atol=1e-8)
    assert (diagonal > 0).all() and (diagonal < 1.3).all() and diagonal.median() > 0.65


def test_matrices_of_the_layers_take_an_orthogonal_step_and_the_rest_that_of_adam(model):
    twin = SuperGlue(model.config)
    twin.load_state_dict(model.state_dict())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    set_gradients(model)
    set_gradients(twin)
    Muon(model, lr=1e-3).step()
    torch.optim.Adam(twin.parameters(), lr=1e-3).step()
    adam = dict(twin.named_parameters())
    muon = 0
    for name, p in model.named_parameters():
        if "attention" in name and p.ndim == 2:
            step = cut_into_blocks((before[name] - p).detach(), 16) / (1e-3 * 0.2 * 16**0.5)
            lengths = torch.linalg.svdvals(step)
            assert lengths.max() < 1.3 and lengths.median() > 0.65, name
            muon += 1
        else:
            assert torch.allclose(p, adam[name], atol=1e-7), name
    assert muon == 8


def take_two_steps(context):
    """All weights after two steps on the same gradients."""
    torch.manual_seed(0)
    model = SuperGlue(SuperGlueConfig(dim=32, heads=2, layers=2))
    optimizer = Muon(model, lr=1e-3)
    for seed in range(2):
        set_gradients(model, seed)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()


@pytest.mark.slow
def test_ranks_that_share_the_matrices_take_the_step_of_one():
    # Ranks have one thread each, and sums of several threads round otherwise.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    whole = take_two_steps(None)
    torch.set_num_threads(threads)
    for part in in_group(2, take_two_steps):  # forty matrices
        assert np.array_equal(part, whole)


def test_learning_rates_of_each_schedule_and_scaling(make_params):
    def rates(steps, scaling="none", **keys):
        run = make_params("run", lr_scaling=scaling)
        section = make_params("train", lr=1.0, warmup_steps=2, steps=10, **keys)
        return [optimizer.compute_learning_rate(section, run, s, 4) for s in steps]

    assert rates([0, 1, 2, 6, 10], schedule="cosine") == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0])
    decay = {"schedule": "constant_decay", "decay_start": 4}
    assert rates([1, 3, 4, 6, 8], **decay) == pytest.approx(
        [1.0, 1.0, 1.0, np.exp(-0.2), np.exp(-0.4)]
    )
    wsd = {"schedule": "wsd", "decay_start": 4}
    assert rates([1, 2, 4, 7, 10], **wsd) == pytest.approx([1.0, 1.0, 1.0, 0.5, 0.0])
    assert rates([2], "linear") == [4.0] and rates([2], "sqrt") == [2.0]
