"""Optimal transport between two sets of keypoints with a dustbin each (SuperGlue, section 3.2).

The paper runs T Sinkhorn iterations in the log domain,

    u <- log mu - logsumexp_j(Z + v),    v <- log nu - logsumexp_i(Z + u),    log P = Z + u + v.

Here the same iterates are computed in the scaled-kernel form: with r_i = max_j Z_ij, K = exp(Z - r),
a = exp(u + r) and b = exp(v), one iteration is a <- mu / (K b), b <- nu / (K^T a): two matrix-vector
products instead of two passes of exp and log. The dustbin row is flat, so every column of K holds an entry 1
and every row a maximum 1: no row or column can underflow whole. Only a_t and b_t are kept for the backward
pass, which is the exact gradient of the unrolled loop: walking back gives rank-one terms, summed by one
matrix product at the end. Memory does not grow with T beyond these vectors.

A pair whose iterates, or the products of a and b that the gradient needs, leave the range of the numbers falls back to
the log domain alone (`_log_domain`, plain autograd): in float32 where rival scores lead by more than some 65.

On a CPU the pairs of a batch go one by one, so that a kernel stays in the cache; on a GPU together, in chunks whose
kernels fit its cache, and the 2T small products of a chunk are recorded as a CUDA graph.
"""

from __future__ import annotations

import math
from typing import List, Tuple

import torch
from torch import Tensor

from pipeline.matching import scaling
from pipeline.stack import no_autocast

# Kernels of the pairs that a GPU works on at a time, so that they fit the L2 cache of an A100 or newer.
CHUNK_BYTES = 32 << 20

# Room for what the gradient multiplies an a and a b by; also keeps apart from where exp(Z - r) is no normal number.
GRADIENT = 1e12


class _Sinkhorn(torch.autograd.Function):
    """log P (..., M, N) and () bool, from Z (..., M, N) and marginals mu (..., M), nu (..., N).

    Where a marginal is 0 there is no keypoint. The bool: are log P and its gradient finite, whatever gradient comes in?
    """

    @staticmethod
    def forward(ctx, Z: Tensor, mu: Tensor, nu: Tensor, iterations: int):
        a, b, r = scaling.iterate(Z, mu, nu, iterations)
        ctx.save_for_backward(Z, mu, nu, a, b)
        u, v = a[-1].log() - r, b[-1].log()
        reach = scaling.largest(a) * scaling.largest(b) * GRADIENT
        finite = _finite(u, v, mu, nu) & torch.isfinite(reach).all()
        ctx.mark_non_differentiable(finite)
        return (Z + u.unsqueeze(-1)).add_(v.unsqueeze(-2)), finite

    @staticmethod
    def backward(ctx, grad: Tensor, *_):
        return scaling.gradient(*ctx.saved_tensors, grad), None, None, None


def _log_domain(Z: Tensor, mu: Tensor, nu: Tensor, iterations: int) -> Tensor:
    """The paper's iterations as they stand, differentiated by autograd: slower, never overflows."""
    log_mu, log_nu = mu.log(), nu.log()
    v = torch.zeros_like(nu)
    for _ in range(iterations):
        u = log_mu - torch.logsumexp(Z + v.unsqueeze(-2), dim=-1)
        v = log_nu - torch.logsumexp(Z + u.unsqueeze(-1), dim=-2)
    return Z + u.unsqueeze(-1) + v.unsqueeze(-2)


def _finite(u: Tensor, v: Tensor, mu: Tensor, nu: Tensor) -> Tensor:
    """() bool: are all potentials that matter finite? A score that is not finite makes its row's potential so."""
    rows, columns = torch.isfinite(u) | (mu == 0), torch.isfinite(v) | (nu == 0)
    return rows.all() & columns.all()


def _augment(scores: Tensor, dustbin: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """Z (m + 1, n + 1) with the dustbins last, and marginals of total mass 1 (equation 8, divided by m + n)."""
    m, n = scores.shape
    Z = torch.cat([torch.cat([scores, dustbin.expand(m, 1)], dim=1), dustbin.expand(1, n + 1)], dim=0)
    mu = torch.cat([Z.new_ones(m), Z.new_full((1,), n)]) / (m + n)
    nu = torch.cat([Z.new_ones(n), Z.new_full((1,), m)]) / (m + n)
    return Z, mu, nu


def _without_mass(scores: Tensor, dustbin: Tensor) -> Tensor:
    """A pair with an empty side: each keypoint of the other is unmatched with certainty, log P = 0."""
    m, n = scores.shape
    log_P = scores.new_zeros((m + 1, n + 1)) + dustbin * 0
    corner = torch.zeros_like(log_P, dtype=torch.bool)
    corner[m, n] = True
    return log_P.masked_fill(corner, -math.inf)


def _alone(scores: Tensor, dustbin: Tensor, iterations: int) -> Tensor:
    """Log assignment of one pair."""
    if min(scores.shape) == 0:
        return _without_mass(scores, dustbin)
    Z, mu, nu = _augment(scores, dustbin)
    log_P, finite = _Sinkhorn.apply(Z, mu, nu, iterations)
    if not bool(finite):
        log_P = _log_domain(Z, mu, nu, iterations)
    return log_P + math.log(sum(scores.shape))


def log_optimal_transport(scores: List[Tensor], dustbin: Tensor, iterations: int) -> List[Tensor]:
    """Log of the partial assignment of each pair, dustbins last (SuperGlue, equations 8 and 9), pair by pair.

    Computed in float32 or wider, also under autocast, which would otherwise round each product of each
    iteration.

    Args:
        scores: B matrices (m_i, n_i), the similarity of each two keypoints.
        dustbin: scalar, the score of leaving a keypoint unmatched.
        iterations: T >= 1.

    Returns:
        B matrices (m_i + 1, n_i + 1). P = exp() has mass m_i + n_i; its rows and columns but the last sum to
        1 at convergence, so P is the probability of a match. Where a side is empty, the other's keypoints are
        unmatched with log P = 0 and the corner, which has no mass, is -inf.
    """
    with no_autocast(dustbin.device.type):
        return [_alone(pair, dustbin.to(pair.dtype), iterations) for pair in map(wide, scores)]


def padded_optimal_transport(
    scores: Tensor, counts0: Tensor, counts1: Tensor, dustbin: Tensor, iterations: int
) -> Tuple[Tensor, Tensor]:
    """`log_optimal_transport` of a padded batch: few launches on a GPU, and nothing there makes the host wait.

    Args:
        scores: (B, M, N), pair i in its first counts0[i] rows and counts1[i] columns; the rest does not matter.
        counts0, counts1: (B,) int64 on the same device.

    Returns:
        log P (B, M', N'), pair i in its first counts0[i] + 1 rows and counts1[i] + 1 columns; and () bool,
        whether it and its gradient are finite. If not, only `log_optimal_transport` gives the answer. The corner of a
        pair without any keypoint is 0.
    """
    with no_autocast(dustbin.device.type):
        Z, mu, nu = _augment_padded(wide(scores), counts0, counts1, dustbin)
        pairs = max(1, CHUNK_BYTES // (Z[0].numel() * Z.element_size())) if len(Z) else 1
        parts = [_Sinkhorn.apply(*chunk, iterations) for chunk in zip(*(t.split(pairs) for t in (Z, mu, nu)))]
        log_P = torch.cat([part for part, _ in parts]) if len(parts) > 1 else parts[0][0]
        finite = torch.stack([finite for _, finite in parts]).all()
        mass = (counts0 + counts1).clamp(min=1).to(log_P.dtype).log()
        return log_P + mass[:, None, None], finite


def wide(t: Tensor) -> Tensor:
    """In float32, or float64 as it is."""
    return t if t.dtype == torch.float64 else t.float()


def _augment_padded(
    scores: Tensor, counts0: Tensor, counts1: Tensor, dustbin: Tensor
) -> Tuple[Tensor, Tensor, Tensor]:
    """`_augment` of a batch, with room up to multiples of 16: few shapes, for few recordings.

    Beyond a pair's dustbins lie more of their score, without mass: a row or column of them has a product above 0, so
    that its quotient is 0 and not 0/0. For the same reason a pair without any keypoint has mass in its corner.
    """
    _, M, N = scores.shape
    rows, columns = (-(-(size + 1) // 16) * 16 for size in (M, N))
    m, n = counts0[:, None], counts1[:, None]
    i, j = (torch.arange(size, device=scores.device) for size in (rows, columns))
    core = (i < m).unsqueeze(2) & (j < n).unsqueeze(1)
    Z = torch.where(
        core, torch.nn.functional.pad(scores, (0, columns - N, 0, rows - M)), dustbin.to(scores.dtype)
    )
    marginals = []
    for place, own, other in ((i, m, n), (j, n, m)):
        lone = torch.where(m + n > 0, other, torch.ones_like(other))
        mass = (place < own).to(Z.dtype) + (place == own) * lone
        marginals.append((mass / (m + n).clamp(min=1)).to(Z.dtype))
    return (Z, *marginals)
