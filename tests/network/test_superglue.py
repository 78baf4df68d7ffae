"""The network, by the equations of the paper: attention, norms, and what holds for all of it."""

import math

import numpy as np
import pytest
import torch
from made_pairs import (
    RAGGED,
    SIZE,
    masks,
    of_pair,
    pairs_of,
    records,
    related,
    rounding,
    roundings_of,
    scrambled,
)

from pipeline.train.loss import MatchingObjective, assignment_loss
from superglue_sift import torch_compat
from superglue_sift.network import batch as batches
from superglue_sift.network import superglue
from superglue_sift.network.batch import Images, Pair, from_pairs
from superglue_sift.network.ground_truth import ground_truth
from superglue_sift.network.superglue import (
    RotaryPositions,
    SuperGlue,
    SuperGlueConfig,
    mutual_matches,
    neighbour_features,
)
from superglue_sift.network.weights import fuse_for_inference

pytestmark = pytest.mark.cu111


def gradient_of(total, model):
    """Gradients of all parameters, by `backward`: checkpoints of torch 1.10, as in its attention,
    know no `grad`.
    """
    model.zero_grad(set_to_none=True)
    total.backward()
    return [p.grad.clone() for p in model.parameters()]


def test_is_the_formula_with_and_without_a_kernel(monkeypatch):
    """Chunks of queries, as without a kernel (torch 1.10), give the same values and
    gradients.
    """
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, 8, dtype=torch.float64, requires_grad=True) for n in (5, 7, 7))
    visible = masks([7, 3], 7)[:, None, None]
    logits = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(8)
    weights = logits.masked_fill(~visible, -math.inf).softmax(-1)
    expected = torch.einsum("bhij,bhjd->bhid", weights, v)
    found = [superglue.attention(q, k, v, visible)]
    monkeypatch.delattr(torch.nn.functional, "scaled_dot_product_attention", raising=False)
    monkeypatch.setattr(torch_compat, "MAX_WEIGHTS", 2 * 4 * 7 * 2)  # two queries at a time
    found.append(superglue.attention(q, k, v, visible))
    gradients = torch.autograd.grad(expected.sin().sum(), (q, k, v))
    for each in found:
        assert torch.allclose(each, expected, atol=1e-12)
        for leaf in (q, k, v):
            leaf.grad = None
        each.sin().sum().backward()  # checkpoints of torch 1.10 know no `grad`
        for leaf, gradient in zip((q, k, v), gradients):
            assert torch.allclose(leaf.grad, gradient, atol=1e-12)


def test_rotary_positions_are_relative():
    """Self-attention is the same wherever all keypoints have moved to, and another where one
    has moved.
    """
    torch.manual_seed(0)
    layer = superglue.AttentionalLayer(16, 2, "layer", cross=False).double()
    rotary = RotaryPositions(8).double()
    images = Images([masks([9], 9)], [False])
    x = torch.randn(9, 16, dtype=torch.float64)
    positions = torch.randn(9, 2, dtype=torch.float64)
    one_moved = positions.index_fill(0, torch.tensor([4]), 0.0)
    found = [layer.attend(x, images, rotary(p)) for p in (positions, positions + 0.7, one_moved)]
    assert torch.allclose(found[0], found[1], atol=1e-12)
    assert (found[0] - found[2]).abs().max() > 1e-3


def test_batch_norm_is_torchs_whatever_is_padded():
    torch.manual_seed(0)
    ours = superglue.TokenBatchNorm(5).double()
    theirs = torch.nn.BatchNorm1d(5).double()
    for _ in range(3):
        x = torch.randn(15, 5, dtype=torch.float64) * 3 + 1
        valid = torch.rand(15) < 0.7
        assert torch.allclose(ours(x, valid)[valid], theirs(x[valid]), atol=1e-12)
        assert torch.allclose(ours(x), theirs(x), atol=1e-12)
    assert torch.allclose(ours.running_var, theirs.running_var, atol=1e-12)
    ours.eval(), theirs.eval()
    assert torch.allclose(ours(x), theirs(x), atol=1e-12)


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_a_pair_is_the_same_alone_and_in_any_batch(norm):
    pairs = pairs_of((20, 33), (0, 4), (60, 1), (7, 7), (2, 0))
    model = scrambled(SuperGlueConfig(dim=128, layers=2, norm=norm))
    for dtype in (torch.float32, torch.float64):
        model = model.to(dtype)
        # sums are added up in another order for other shapes; scores reach 20
        limit = rounding(20, roundings_of(model.config), dtype)
        with torch.no_grad():
            for one, P in zip(pairs, model(from_pairs(pairs))):
                sizes = len(one.records0), len(one.records1)
                alone = of_pair(model(from_pairs([one]))[0], *sizes)
                assert torch.allclose(alone, of_pair(P, *sizes), atol=limit, rtol=0)


def test_untrained_it_is_a_nearest_neighbour_matcher():
    rng = np.random.default_rng(1)
    one = records(rng, 30)
    order = rng.permutation(30)
    batch = from_pairs([Pair(one, one[order], SIZE, SIZE)])
    matches0, *_ = mutual_matches(SuperGlue(SuperGlueConfig(layers=1)).eval()(batch))
    assert np.array_equal(order[matches0[0].numpy()], np.arange(30))


def test_swapping_images_transposes():
    (one,) = pairs_of((15, 12), seed=3)
    swapped = Pair(one.records1, one.records0, SIZE, SIZE)
    # as many iterations as reach the fixed point: a half-iteration more for one side is not
    # symmetric
    model = scrambled(SuperGlueConfig(dim=32, layers=2, sinkhorn_iterations=300)).double()
    with torch.no_grad():
        assert torch.allclose(
            model(from_pairs([one]))[0], model(from_pairs([swapped]))[0].T, atol=1e-3
        )


def test_every_weight_receives_a_gradient():
    model = scrambled(SuperGlueConfig(dim=32, layers=2, rotary=True)).train()
    batch = related(pairs_of((20, 20)))
    assignment_loss(model(batch), ground_truth(batch))[0].sum().backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None]


def test_scale_and_angle_can_be_left_out():
    (one,) = pairs_of((9, 9))
    turned = one.records0.copy()
    turned["angle"] += 90
    turned["scale"] *= 2
    for used in (True, False):
        model = scrambled(SuperGlueConfig(dim=32, layers=1, scale_angle=used))
        with torch.no_grad():
            before, after = (
                model(from_pairs([one._replace(records0=r)]))[0] for r in (one.records0, turned)
            )
        assert torch.allclose(before, after) is not used


def test_mutual_matches():
    P = torch.tensor([[0.9, 0.1, 0.0], [0.8, 0.05, 0.1], [0.0, 0.15, 0.1], [0.1, 0.7, 0.8]])
    matches0, scores0, matches1, _ = mutual_matches(P.log()[None], threshold=0.2)
    # row 1 prefers column 0, which prefers row 0; row 2's best is below the threshold
    assert matches0.tolist() == [[0, -1, -1]]
    assert matches1.tolist() == [[0, -1]]
    assert scores0[0, 0] == pytest.approx(0.9)


@pytest.mark.parametrize("norm, rotary", [("layer", False), ("batch", False), ("layer", True)])
def test_fused_for_inference_is_the_same_network(norm, rotary):
    model = scrambled(SuperGlueConfig(dim=32, layers=2, norm=norm, rotary=rotary))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, superglue.TokenBatchNorm):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch = from_pairs(pairs_of((20, 33), (0, 4), (60, 1)))
    with torch.no_grad():
        expected = model(batch)
        found = fuse_for_inference(model)(batch)
    for a, b in zip(expected, found):
        limit = rounding(20, roundings_of(model.config))  # values reach 20
        assert torch.allclose(a, b, atol=limit, rtol=0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_size_classes_and_padding_do_not_matter(monkeypatch, norm):
    """Losses in the order of the pairs, and the gradient, also of BatchNorm in training."""
    batch = related(pairs_of(*RAGGED))
    options = {"neighbours": True, "rotary": True, "sinkhorn_iterations": 20}
    config = SuperGlueConfig(dim=32, layers=1, norm=norm, **options)
    answers = []
    for classes, padding, fixed in ((6, 0.0, None), (1, 1e9, None), (1, 1e9, (8, 320))):
        monkeypatch.setattr(batches, "MAX_PADDING", padding)
        assert len(batch.size_classes()[1]) == classes
        model = scrambled(config).double().train()
        ours = MatchingObjective(model)
        ours.fixed_size = fixed
        total, values = ours(batch, wait=fixed is None)
        assert values["loss"].shape == (len(RAGGED),)
        answers.append((values, gradient_of(total, model)))
    # the network is in float64, but compares descriptors of neighbours in float32
    limit = rounding(20, roundings_of(config))
    for values, gradient in answers[1:]:
        for name, value in answers[0][0].items():
            assert torch.allclose(values[name].double(), value.double(), atol=limit), name
        for a, b in zip(answers[0][1], gradient):
            assert torch.allclose(a, b, atol=limit * max(1.0, float(a.abs().max())))


def neighbours_of(degrees0, degrees1):
    """Features of the keypoints of both images, whose descriptors are directions of the plane."""
    sides = [torch.tensor(side, dtype=torch.float64).deg2rad() for side in (degrees0, degrees1)]
    descriptors = torch.cat([torch.stack([side.cos(), side.sin()], 1) for side in sides])
    geometry = torch.zeros(len(descriptors), 6, dtype=torch.float64)
    geometry[:, 0] = torch.cat([torch.arange(len(side)) for side in sides])
    masks = [torch.ones(1, len(side), dtype=torch.bool) for side in sides]
    found = neighbour_features(descriptors, geometry, Images(masks, [False] * 2))
    return found.split([len(side) for side in sides])


def test_known_values_of_two_and_three_descriptors():
    # angles 0 and 90 degrees against 10, 60 and 80: nearest 10 and 80 degrees away
    found0, found1 = neighbours_of([0.0, 90.0], [10.0, 60.0, 80.0])
    chord = [2 * math.sin(math.radians(degrees) / 2) for degrees in (10, 30, 60)]
    # the position of the neighbour, here its index
    assert found0[:, 3].tolist() == [0, 2] and found1[:, 3].tolist() == [0, 1, 1]
    expected = [[chord[0], chord[0] / chord[2], 1.0], [chord[0], chord[0] / chord[1], 1.0]]
    assert torch.allclose(found0[:, :3], torch.tensor(expected, dtype=torch.float64), atol=1e-12)
    assert found1[:, 2].tolist() == [1.0, 0.0, 1.0]


def test_one_descriptor_alone_has_no_distinctive_neighbour():
    found = torch.cat(neighbours_of([0.0], [60.0]))[:, :3]
    assert torch.allclose(found, torch.ones_like(found))
