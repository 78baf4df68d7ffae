"""Optimal transport: closed forms, the log domain, hard scores, and images without keypoints."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_pairs import masks, of_pair, rounding

from benchmarks import plain
from superglue_sift.network import sinkhorn
from superglue_sift.network.sinkhorn import log_optimal_transport

pytestmark = pytest.mark.cu111


def transport(scores, dustbin, iterations, **options):
    """`log_optimal_transport` of matrices of different sizes as one batch, whose padding is
    nonsense: without it.
    """
    sides = [[s.shape[axis] for s in scores] for axis in (0, 1)]
    M, N = (max([*side, 1]) for side in sides)
    padded = [
        torch.nn.functional.pad(s, (0, N - s.shape[1], 0, M - s.shape[0]), value=1e3)
        for s in scores
    ]
    found = log_optimal_transport(
        torch.stack(padded), masks(sides[0], M), masks(sides[1], N), dustbin, iterations, **options
    )
    return [of_pair(log_P, *s.shape) for log_P, s in zip(found[0], scores)], found[1]


def in_the_log_domain(scores, dustbin, iterations):
    """The paper's iterations, pair by pair, by autograd."""
    return [plain.sinkhorn(s[None], dustbin, iterations)[0] for s in scores]


def test_equal_scores_have_a_closed_form():
    (log_P,), _ = transport([torch.zeros(2, 3, dtype=torch.float64)], torch.tensor(0.0), 50)
    P = log_P.exp()  # mass spreads by the marginals alone, P = mu nu (m + n)
    assert torch.allclose(P[:2, :3], torch.full((2, 3), 1 / 5).double(), atol=1e-12)
    assert torch.allclose(P[:2, 3], torch.full((2,), 2 / 5).double(), atol=1e-12)
    assert torch.allclose(P[2, :3], torch.full((3,), 3 / 5).double(), atol=1e-12)


@settings(max_examples=30)
@given(
    m=st.integers(1, 12), n=st.integers(1, 12), spread=st.floats(0.1, 8), seed=st.integers(0, 99)
)
def test_marginals(m, n, spread, seed):
    scores = torch.randn(m, n, generator=torch.Generator().manual_seed(seed)).double() * spread
    P = transport([scores, torch.zeros(9, 9).double()], torch.tensor(1.0), 40)[0][0].exp()
    # the last half-iteration makes columns exact
    assert torch.allclose(P.sum(0), torch.tensor([1.0] * n + [float(m)]).double(), atol=1e-9)


@pytest.mark.parametrize("spread", [1.0, 30.0, 300.0])
def test_equals_the_log_domain_with_its_gradient(spread):
    torch.manual_seed(0)
    scores = [
        torch.randn(m, n, dtype=torch.float64) * spread for m, n in ((30, 40), (5, 2), (1, 1))
    ]
    scores.append(scores[0][[0, 0, 0, 0, 1]] - 3 * spread)  # duplicates, all below the dustbin
    leaves = [s.detach().requires_grad_() for s in scores]
    dustbin = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(s.shape[0] + 1, s.shape[1] + 1, dtype=torch.float64) for s in scores]
    ours = transport(leaves, dustbin, 50)[0]
    theirs = in_the_log_domain(leaves, dustbin, 50)
    for a, b in zip(ours, theirs):
        assert torch.allclose(a, b, atol=1e-9, rtol=1e-11)
    totals = [sum((w * P).sum() for w, P in zip(weights, Ps)) for Ps in (ours, theirs)]
    gradients = [torch.autograd.grad(total, [*leaves, dustbin]) for total in totals]
    for a, b in zip(*gradients):
        assert torch.allclose(a, b, atol=1e-9 * max(1.0, float(b.abs().max())))


@pytest.mark.parametrize("lead", [20.0, 60.0, 300.0])
def test_the_float32_gradient_of_hard_scores_is_that_of_float64(lead):
    """Two rows that want one column, duplicates, all below the dustbin: the squares of a leave
    float32 at 45.
    """
    torch.manual_seed(3)
    rivals = torch.zeros(30, 30)
    spread = torch.randn(40, 40) * lead / 4
    rivals[:2, 0] = lead
    spread[1] = spread[0]
    hard = [rivals, spread, -torch.rand(20, 10) * lead]
    largest = max(float(scores.abs().max()) for scores in hard)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        leaves = [s.to(dtype, copy=True).requires_grad_() for s in hard]
        found = transport(leaves, torch.tensor(1.0, dtype=dtype), 100)[0]
        total = sum((P[:-1] * torch.linspace(-1, 1, P.shape[1], dtype=dtype)).sum() for P in found)
        gradients.append(torch.autograd.grad(total, leaves))
    for ours, exact in zip(*gradients):
        assert torch.isfinite(ours).all()
        # in 100 iterations, two products add up 40 terms
        limit = rounding(largest, 100 * 2 * 40) * max(1.0, float(exact.abs().max()))
        assert torch.allclose(ours.double(), exact, atol=limit)


def test_only_the_pair_that_float32_cannot_hold_goes_to_the_log_domain(monkeypatch):
    torch.manual_seed(1)
    # Products of a and b beyond 1e38; log P is finite
    scores = [torch.randn(9, 12), torch.randn(30, 30) * 70]
    solved = []
    log_domain = sinkhorn._log_domain
    monkeypatch.setattr(
        sinkhorn, "_log_domain", lambda Z, *rest: solved.append(len(Z)) or log_domain(Z, *rest)
    )
    leaves = [s.clone().requires_grad_() for s in scores]
    found, finite = transport(leaves, torch.tensor(1.0), 100)
    assert solved == [1] and finite.tolist() == [True, False]
    expected = in_the_log_domain(leaves, torch.tensor(1.0), 100)
    gradients = [
        torch.autograd.grad(sum(P.sin().sum() for P in Ps), leaves) for Ps in (found, expected)
    ]
    for a, b in (*zip(found, expected), *zip(*gradients)):
        limit = rounding(float(scores[1].abs().max()), 100 * 2 * 30)
        assert torch.isfinite(a).all() and torch.allclose(a, b, atol=limit, rtol=1e-4)
    assert not transport(leaves, torch.tensor(1.0), 100, wait=False)[1][1] and solved == [1]
    with torch.no_grad():  # log P alone float32 does hold
        assert transport(leaves, torch.tensor(1.0), 100)[1].all()


def test_images_without_keypoints():
    shapes = [(0, 3), (2, 0), (0, 0), (1, 1)]
    (left, right, none, full), finite = transport(
        [torch.zeros(s) for s in shapes], torch.tensor(1.0), 5
    )
    assert left.tolist() == [[0, 0, 0, -math.inf]]
    assert right.tolist() == [[0], [0], [-math.inf]]
    assert none.tolist() == [[0]]
    assert torch.isfinite(full).all() and finite.all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_reported(bad):
    scores = torch.zeros(2, 4, 3)
    scores[1, 2, 1] = bad
    full = torch.ones(2, 4, dtype=torch.bool), torch.ones(2, 3, dtype=torch.bool)
    found = log_optimal_transport(scores, *full, torch.tensor(1.0), 5, wait=False)[1]
    assert found.tolist() == [True, False]
