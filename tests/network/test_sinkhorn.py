"""Optimal transport: closed forms, the log domain, hard scores, and images without keypoints."""

import math

import pytest
import torch
from made_pairs import bound_rounding, crop_padding, make_masks
from torch.nn.functional import pad

from benchmarks import plain
from superglue_sift.network import sinkhorn
from superglue_sift.network.sinkhorn import log_optimal_transport

pytestmark = pytest.mark.cu111
DUSTBIN = torch.tensor(1.0)


def transport(scores, dustbin, iterations, **options):
    """`log_optimal_transport` of matrices of different sizes as one batch, whose padding is
    nonsense: without it.
    """
    counts0, counts1 = zip(*(s.shape for s in scores))
    M = max(*counts0, 1)
    N = max(*counts1, 1)
    padded = [pad(s, (0, N - s.shape[1], 0, M - s.shape[0]), value=1e3) for s in scores]
    log_P, finite = log_optimal_transport(
        torch.stack(padded),
        make_masks(counts0, M),
        make_masks(counts1, N),
        dustbin,
        iterations,
        **options,
    )
    return [crop_padding(P, *s.shape) for P, s in zip(log_P, scores)], finite


def in_the_log_domain(scores, dustbin, iterations):
    """The paper's iterations, pair by pair, by autograd."""
    return [plain.compute_sinkhorn(s[None], dustbin, iterations)[0] for s in scores], None


def test_equal_scores_have_a_closed_form():
    scores = [torch.zeros(m, n, dtype=torch.float64) for m, n in ((2, 3), (4, 4))]
    (log_P, _), _ = transport(scores, torch.tensor(0.0), 50)
    # mass spreads by the marginals alone, P = mu nu (m + n)
    mu = torch.tensor([1.0, 1, 3], dtype=torch.float64)[:, None]
    nu = torch.tensor([1.0, 1, 1, 2], dtype=torch.float64)
    assert torch.allclose(log_P.exp(), mu * nu / 5, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spread", [5.0, 20.0, 60.0, 300.0])
def test_the_scaled_form_equals_the_log_domain_with_its_gradient(dtype, spread):
    """Also where two rows want one column, rows are equal, or all are below the dustbin: the
    squares of a leave float32 at 45.
    """
    torch.manual_seed(3)
    rivals = torch.zeros(30, 30)
    rivals[:2, 0] = spread
    random = torch.randn(40, 30) * spread / 4
    random[1] = random[0]
    scores = [random, rivals, -torch.rand(20, 10) * spread, torch.randn(1, 1)]
    largest = max(float(matrix.abs().max()) for matrix in scores)
    results = []
    for solve, kind in ((transport, dtype), (in_the_log_domain, torch.float64)):
        leaves = [leaf.to(kind, copy=True).requires_grad_() for leaf in (*scores, DUSTBIN)]
        log_P, _ = solve(leaves[:-1], leaves[-1], 100)
        weights = [torch.linspace(-1, 1, P.shape[1], dtype=kind) for P in log_P]
        total = sum((P[:-1] * weight).sum() for P, weight in zip(log_P, weights))
        gradients = torch.autograd.grad(total, leaves)
        results.append([tensor.detach() for tensor in (*log_P, *gradients)])
    for ours, exact in zip(*results):
        # in 100 iterations, two products add up 40 terms
        limit = bound_rounding(largest, 100 * 2 * 40, dtype) * max(1.0, float(exact.abs().max()))
        assert torch.allclose(ours.double(), exact, atol=limit, rtol=0)


def test_only_the_pair_that_float32_cannot_hold_goes_to_the_log_domain(monkeypatch):
    torch.manual_seed(1)
    # Products of a and b beyond 1e38; log P is finite
    scores = [torch.randn(9, 12).requires_grad_(), (torch.randn(30, 30) * 70).requires_grad_()]
    solved = []
    log_domain = sinkhorn._solve_in_log_domain
    monkeypatch.setattr(
        sinkhorn,
        "_solve_in_log_domain",
        lambda Z, *arguments: solved.append(len(Z)) or log_domain(Z, *arguments),
    )
    for repair_overflow in (True, False):
        assert transport(scores, DUSTBIN, 100, repair_overflow=repair_overflow)[1].tolist() == [
            True,
            False,
        ]
        assert solved == [1]  # without `repair_overflow`, it is only reported
    with torch.no_grad():  # log P alone float32 does hold
        assert transport(scores, DUSTBIN, 100)[1].all()


def test_without_keypoints_all_mass_is_in_the_dustbins():
    shapes = [(0, 3), (2, 0), (0, 0), (1, 1)]
    log_P, finite = transport([torch.zeros(s) for s in shapes], DUSTBIN, 5)
    zero = -math.inf  # the logarithm of 0
    assert [P.tolist() for P in log_P[:3]] == [[[0, 0, 0, zero]], [[0], [0], [zero]], [[0]]]
    assert torch.isfinite(log_P[3]).all() and finite.all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_not_finite_are_reported(bad):
    scores = torch.zeros(2, 4, 3)
    scores[1, 2, 1] = bad
    assert transport(list(scores), DUSTBIN, 5, repair_overflow=False)[1].tolist() == [True, False]
