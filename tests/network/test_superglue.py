"""The network, by the equations of the paper: attention, norms, and what holds for all of it."""

import copy
import math

import numpy as np
import pytest
import torch
from made_pairs import (
    RAGGED,
    batch_pairs,
    bound_rounding,
    count_roundings,
    crop_padding,
    label_pairs,
    make_features,
    make_masks,
    make_pairs,
    make_scrambled,
)

from benchmarks import plain
from pipeline.train.loss import MatchingObjective, compute_assignment_losses, find_truth
from superglue_sift import torch_compat
from superglue_sift.features.features import TYPICAL_SCORE, Features
from superglue_sift.network import batch as batches
from superglue_sift.network import perceptron, superglue
from superglue_sift.network.batch import Images, group_pairs
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig, find_mutual_matches
from superglue_sift.network.weights import fuse_for_inference

pytestmark = pytest.mark.cu111


def gradient_of(total, leaves):
    """Gradients by `backward`: checkpoints of torch 1.10, as in its attention, know no `grad`."""
    for leaf in leaves:
        leaf.grad = None
    total.backward()
    return [leaf.grad.clone() for leaf in leaves]  # a leaf without a gradient is an error


def test_attention_is_the_formula_with_and_without_a_kernel(monkeypatch):
    """Chunks of queries, as without a kernel (torch 1.10), give the same values and
    gradients.
    """
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, 8, dtype=torch.float64, requires_grad=True) for n in (5, 7, 7))
    visible = make_masks([7, 3], 7)[:, None, None]
    logits = (q @ k.transpose(2, 3) / math.sqrt(8)).masked_fill(~visible, -math.inf)
    values = [logits.softmax(-1) @ v, superglue.compute_attention(q, k, v, visible)]
    monkeypatch.delattr(torch.nn.functional, "scaled_dot_product_attention", raising=False)
    monkeypatch.setattr(torch_compat, "MAX_WEIGHTS", 2 * 4 * 7 * 2)  # two queries at a time
    values.append(superglue.compute_attention(q, k, v, visible))
    expected, *results = ([x, *gradient_of(x.sin().sum(), (q, k, v))] for x in values)
    for result in results:
        assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(expected, result))


def test_rotary_positions_are_relative():
    """Self-attention is the same wherever all keypoints have moved to, and another where one
    has moved.
    """
    torch.manual_seed(0)
    layer = superglue.AttentionalLayer(16, 2, "layer", cross=False).double()
    rotary = superglue.RotaryPositions(8).double()
    images = Images([make_masks([9], 9)], [False])
    x = torch.randn(9, 16, dtype=torch.float64)
    positions = torch.randn(9, 2, dtype=torch.float64)
    one_moved = positions.index_fill(0, torch.tensor([4]), 0.0)
    expected, shifted, changed = (
        layer(x, images, None, rotary(p)) for p in (positions, positions + 0.7, one_moved)
    )
    assert torch.allclose(expected, shifted, atol=1e-12)
    assert (expected - changed).abs().max() > 1e-3


def test_batch_norm_without_padding_is_torchs():
    torch.manual_seed(0)
    ours = perceptron.TokenBatchNorm(5).double()
    theirs = torch.nn.BatchNorm1d(5).double()
    for _ in range(3):
        x = torch.randn(15, 5, dtype=torch.float64) * 3 + 1
        valid = torch.rand(15) < 0.7
        assert torch.allclose(ours(x, valid)[valid], theirs(x[valid]), atol=1e-12)
    # The statistics of all three batches are used in evaluation.
    assert torch.allclose(ours.eval()(x), theirs.eval()(x), atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_a_pair_is_the_same_alone_and_in_any_batch(norm):
    pairs = make_pairs((20, 33), (0, 4), (60, 1), (7, 7), (2, 0))
    model = make_scrambled(SuperGlueConfig(dim=128, layers=2, norm=norm))
    for dtype in (torch.float32, torch.float64):
        model = model.to(dtype)
        # sums are added up in another order for other shapes; scores reach 20
        limit = bound_rounding(20, count_roundings(model.config), dtype)
        for pair, P in zip(pairs, model(*batch_pairs(pairs))):
            counts = [len(features.keypoints) for features in pair]
            alone = crop_padding(model(*batch_pairs([pair]))[0], *counts)
            assert torch.allclose(alone, crop_padding(P, *counts), atol=limit, rtol=0)


def test_matches_are_mutual_and_above_the_threshold():
    P = torch.tensor([[0.9, 0.1, 0.0], [0.8, 0.05, 0.1], [0.0, 0.15, 0.1], [0.1, 0.7, 0.8]])
    matches0, scores0, matches1, _ = find_mutual_matches(P.log()[None], threshold=0.2)
    # row 1 prefers column 0, which prefers row 0; row 2's best is below the threshold
    assert matches0.tolist() == [[0, -1, -1]]
    assert matches1.tolist() == [[0, -1]]
    assert scores0[0, 0] == pytest.approx(0.9)
    # a match exceeds the threshold
    assert find_mutual_matches(P.log()[None], float(scores0[0, 0]))[0].tolist() == [[-1, -1, -1]]


@torch.no_grad()
@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_fused_for_inference_is_the_same_network(norm):
    model = make_scrambled(SuperGlueConfig(dim=32, layers=2, norm=norm, rotary=True))
    images = batch_pairs(make_pairs((20, 33), (0, 4), (60, 1)))
    expected = model(*images)
    limit = bound_rounding(20, count_roundings(model.config))  # values reach 20
    assert torch.allclose(expected, fuse_for_inference(model)(*images), atol=limit, rtol=0)
    assert torch.equal(expected, model(*images))  # the model itself has not changed


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_losses_and_gradients_do_not_depend_on_size_classes_or_padding(monkeypatch, norm):
    """Losses in the order of the pairs, and the gradient, also of BatchNorm in training."""
    batch = label_pairs(make_pairs(*RAGGED))
    options = {"neighbours": True, "rotary": True, "sinkhorn_iterations": 20}
    config = SuperGlueConfig(dim=32, layers=1, norm=norm, **options)
    results = []
    for classes, padding, fixed in ((6, 0.0, None), (1, 1e9, None), (1, 1e9, (8, 320))):
        monkeypatch.setattr(batches, "MAX_PADDING", padding)
        assert len(group_pairs(batch.images0, batch.images1)) == classes
        model = make_scrambled(config).double().train()
        objective = MatchingObjective(model)
        objective.fixed_size = fixed
        total, values = objective(batch, repair_overflow=fixed is None)
        results.append([*values.values(), *gradient_of(total, list(model.parameters()))])
    # the network is in float64, but compares descriptors of neighbors in float32
    limit = bound_rounding(20, count_roundings(config))
    for result in results[1:]:
        for a, b in zip(results[0], result):
            scale = max(1.0, float(a.abs().max()))
            assert torch.allclose(a.double(), b.double(), atol=limit * scale)


def test_known_features_of_neighbors():
    """Descriptors are directions of the plane: 0 and 90 degrees against 10, 60 and 80, and 0
    against 60.
    """
    counts = [2, 3, 1, 1]
    angles = torch.tensor([0, 90, 10, 60, 80, 0, 60], dtype=torch.float64).deg2rad()
    geometry = torch.arange(7.0).double()[:, None].expand(-1, 6)
    images = Images([make_masks([count], count) for count in counts], [False] * 4)
    descriptors = torch.stack([angles.cos(), angles.sin()], 1)
    features = superglue.compute_neighbor_features(descriptors, geometry, images)
    chord10, chord30, chord60 = (2 * math.sin(math.radians(angle) / 2) for angle in (10, 30, 60))
    # distance, ratio to the second, mutual, and the position of the neighbor, here its index
    expected = [
        [chord10, chord10 / chord60, 1.0, 2.0],
        [chord10, chord10 / chord30, 1.0, 4.0],
        [1.0, 1.0, 1.0, 6.0],  # one descriptor alone has no distinctive neighbor
    ]
    expected = torch.tensor(expected, dtype=torch.float64)
    assert torch.allclose(features[[0, 1, 5], :4], expected, atol=1e-12)
    assert features[2:5, 2:4].tolist() == [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]


def test_positions_are_from_the_center_of_the_image_in_halves_of_its_longer_side():
    """Pixel centers are at whole numbers: the center of 320 x 240 px is at (159.5, 119.5)."""
    ones = torch.ones(2)
    positions = torch.tensor([[159.5, 119.5], [319.5, -0.5]])
    size = torch.tensor([[320.0, 240.0]] * 2)
    oris = torch.tensor([[0.0], [90.0]])
    descriptors = ones[:, None, None]
    keypoints = Features(positions, 4 * ones, oris, TYPICAL_SCORE * ones, descriptors, size)
    expected = torch.tensor([[0.0, 0, 0, 0, 1, 0], [1.0, -0.75, 0, 0, 0, 1]])
    geometry = superglue.encode_geometry(keypoints, True)
    assert torch.allclose(geometry, expected, atol=1e-6)
    assert torch.equal(superglue.encode_geometry(keypoints, False), geometry[:, :3])


def test_a_neighbor_is_described_by_its_scale_and_its_turn():
    """From a scale of 2 px and 30 degrees to one of 8 px and 100 degrees, and back."""
    rows = [[math.log(2.0), 30.0], [math.log(8.0), 100.0]]
    scales, angles = torch.tensor(rows, dtype=torch.float64).T
    directions = torch.stack([angles.deg2rad().cos(), angles.deg2rad().sin()], 1)
    geometry = torch.cat([torch.zeros(2, 3).double(), scales[:, None], directions], 1)
    images = Images([make_masks([1], 1)] * 2, [False] * 2)
    features = superglue.compute_neighbor_features(torch.ones(2, 1).double(), geometry, images)
    turn = math.radians(70)
    expected = [
        [math.log(4), math.cos(turn), math.sin(turn)],
        [-math.log(4), math.cos(turn), -math.sin(turn)],
    ]
    assert torch.allclose(features[:, 5:], torch.tensor(expected).double(), atol=1e-6)


def test_padding_is_no_neighbor():
    """The only keypoint of each image is opposite to the other. Padding has the descriptor 0, which
    is nearer.
    """
    descriptors = torch.tensor([[1.0, 0.0], [0.0, 0.0], [-1.0, 0.0], [0.0, 0.0]])
    geometry = torch.arange(4.0)[:, None].expand(-1, 6)
    images = Images([make_masks([1], 2)] * 2, [True] * 2)
    features = superglue.compute_neighbor_features(descriptors, geometry, images)
    # distance, ratio to the second (there is none), mutual, and the index of the neighbor
    assert features[0, :4].tolist() == [2.0, 1.0, 1.0, 2.0]
    assert features[2, :4].tolist() == [2.0, 1.0, 1.0, 0.0]


def test_an_untrained_network_is_a_nearest_neighbor_matcher():
    rng = np.random.default_rng(1)
    features = make_features(rng, 30)
    order = rng.permutation(30)
    images = batch_pairs([(features, features.select(order))])
    matches0 = find_mutual_matches(SuperGlue(SuperGlueConfig(layers=1)).eval()(*images))[0]
    assert np.array_equal(order[matches0[0].numpy()], np.arange(30))


def test_swapping_the_images_transposes_the_assignment():
    """Sinkhorn's iterations reach their limit, because half of one more is not symmetric."""
    (pair,) = make_pairs((15, 12), seed=3)
    model = make_scrambled(SuperGlueConfig(dim=32, layers=2, sinkhorn_iterations=3000)).double()
    with torch.no_grad():
        log_P, swapped = (model(*batch_pairs([images]))[0] for images in (pair, pair[::-1]))
    assert torch.allclose(log_P, swapped.T, atol=1e-6)


def test_every_weight_receives_a_gradient():
    model = make_scrambled(SuperGlueConfig(dim=32, layers=2, rotary=True)).train()
    MatchingObjective(model)(label_pairs(make_pairs((20, 20))))[0].sum().backward()
    assert [name for name, weight in model.named_parameters() if weight.grad is None] == []


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_assignment_loss_and_gradient_equal_those_of_a_plain_network(norm):
    """The plain network is written as in the paper, pair by pair and in the log domain."""
    config = SuperGlueConfig(dim=32, layers=3, heads=4, norm=norm, sinkhorn_iterations=50)
    model = make_scrambled(config).double()
    plain_model = copy.deepcopy(model)
    pairs = make_pairs(*[(40, 40)] * 3)
    for features0, features1 in pairs:  # 30 true matches
        features1.keypoints[:30] = features0.keypoints[29::-1]
    batch = label_pairs(pairs)
    truths = find_truth(batch)
    assert (truths.matches0 >= 0).sum() == 3 * 30
    images = batch.images0, batch.images1
    log_P, plain_log_P = model(*images), plain.assign(plain_model, *images)
    torch.testing.assert_close(plain_log_P, log_P, atol=1e-9, rtol=0)
    loss = compute_assignment_losses(log_P, truths)[0].sum()
    plain_loss = plain.compute_dense_loss(plain_log_P, truths).sum()
    torch.testing.assert_close(plain_loss, loss, atol=1e-9, rtol=0)
    loss.backward()
    plain_loss.backward()
    for weight, plain_weight in zip(model.parameters(), plain_model.parameters()):
        torch.testing.assert_close(plain_weight.grad, weight.grad, atol=1e-9, rtol=1e-7)
