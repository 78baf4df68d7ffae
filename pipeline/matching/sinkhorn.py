"""Optimal transport between two sets of keypoints with a dustbin each (SuperGlue, section 3.2).

The paper runs T Sinkhorn iterations in the log domain,

    u <- log mu - logsumexp_j(Z + v),    v <- log nu - logsumexp_i(Z + u),    log P = Z + u + v.

Here the same iterates are computed in the scaled-kernel form: with r_i = max_j Z_ij, K = exp(Z - r),
a = exp(u + r) and b = exp(v), one iteration is a <- mu / (K b), b <- nu / (K^T a): two matrix-vector
products instead of two passes of exp and log. The dustbin row is flat, so every column of K holds an entry 1
and every row a maximum 1: no row or column can underflow whole. Only a_t and b_t are kept for the backward
pass, which is the exact gradient of the unrolled loop: walking back gives rank-one terms, summed by one
matrix product at the end. Memory does not grow with T beyond these vectors.

A pair whose iterates are not finite falls back to the log domain alone (`_log_domain`, plain autograd).
"""

from __future__ import annotations

import math
from typing import List, Tuple

import torch
from torch import Tensor

from pipeline.stack import no_autocast

# Of a kernel larger than a core's cache each block of rows is used twice while it is there: K a gives the rows' a, and
# these the block's part of K^T a.
BLOCK_BYTES = 5 << 18


def _mv(matrix: Tensor, vector: Tensor, out: Tensor, add: bool = False) -> Tensor:
    """Matrix-vector product into `out`, one (2-D matrix; with `add` added to it) or batched (3-D)."""
    if matrix.dim() == 2:
        return torch.addmv(out, matrix, vector, beta=float(add), out=out)
    return torch.bmm(matrix, vector.unsqueeze(-1), out=out.unsqueeze(-1)).squeeze(-1)


def _kernel(Z: Tensor) -> Tuple[Tensor, Tensor]:
    """exp(Z - r) and r, the row maxima; rows of -inf alone (padding) give r = 0 and a kernel of 0.

    Its rows begin at multiples of 64 bytes: products with K^T take half the time of those with rows of n + 1 numbers.
    """
    r = Z.amax(dim=-1, keepdim=True)
    r = torch.where(torch.isfinite(r), r, torch.zeros_like(r))
    width = Z.shape[-1]
    K = Z.new_empty((*Z.shape[:-1], -(-width // 16) * 16))[..., :width]
    return torch.sub(Z, r, out=K).exp_(), r.squeeze(-1)


def _block_rows(K: Tensor) -> int:
    """Rows of a block: all of them but for one large kernel."""
    if K.dim() > 2:
        return K.shape[-2]
    return max(1, BLOCK_BYTES // (K.stride(0) * K.element_size()))


def _iterate(
    Z: Tensor, mu: Tensor, nu: Tensor, iterations: int, padded: bool
) -> Tuple[Tensor, Tensor, Tensor]:
    """All iterates a (T, ..., M), b (T + 1, ..., N) and the row maxima r (..., M)."""
    K, r = _kernel(Z)
    a = Z.new_empty((iterations, *mu.shape))
    b = Z.new_empty((iterations + 1, *nu.shape))
    b[0] = (nu > 0).to(Z.dtype)
    row, column = torch.empty_like(mu), torch.empty_like(nu)
    # where a marginal is 0 (padding) the quotient must be 0 and never 0/0
    no_row, no_column = (mu == 0).to(Z.dtype), (nu == 0).to(Z.dtype)
    rows = _block_rows(K)
    blocks = [K.split(rows, -2), *(t.split(rows, -1) for t in (mu, row, no_row, a))]
    parts = [(K_i, K_i.transpose(-1, -2), *others) for K_i, *others in zip(*blocks)]
    before = b[0]
    for t, b_t in enumerate(b[1:].unbind(0)):
        for number, (K_i, Kt_i, mu_i, row_i, no_row_i, a_i) in enumerate(parts):
            _mv(K_i, before, row_i)
            a_t = torch.div(mu_i, row_i.add_(no_row_i) if padded else row_i, out=a_i[t])
            _mv(Kt_i, a_t, column, add=number > 0)
        before = torch.div(nu, column.add_(no_column) if padded else column, out=b_t)
    return a, b, r


def _backward(Z: Tensor, mu: Tensor, nu: Tensor, a: Tensor, b: Tensor, grad: Tensor) -> Tensor:
    """Gradient with respect to Z of <grad, log P>, exact for the unrolled iterations.

    With w_v = (gradient of v_t) b_t / nu and w_u = (gradient of u_t) a_t / mu, each found from the one after it,
    the gradient is grad - K o sum_t (a_t w_v^T + w_u b_{t-1}^T).
    """
    K, _ = _kernel(Z)
    inverse_mu = torch.where(mu > 0, 1 / mu, torch.zeros_like(mu))
    inverse_nu = torch.where(nu > 0, 1 / nu, torch.zeros_like(nu))
    down, back = a.square() * -inverse_mu, b.square() * -inverse_nu
    from_u, from_v = torch.empty_like(a), torch.empty_like(b[1:])
    row, column = torch.empty_like(mu), torch.empty_like(nu)
    last = a.shape[0] - 1
    from_v[last] = grad.sum(-2) * b[last + 1] * inverse_nu
    direct = grad.sum(-1) * a[last] * inverse_mu
    rows = _block_rows(K)
    blocks = [K.split(rows, -2), *(t.split(rows, -1) for t in (row, direct, down, from_u))]
    parts = [(K_i, K_i.transpose(-1, -2), *others) for K_i, *others in zip(*blocks)]
    for t in range(last, -1, -1):
        for number, (K_i, Kt_i, row_i, direct_i, down_i, from_u_i) in enumerate(parts):
            w_u = torch.mul(_mv(K_i, from_v[t], row_i), down_i[t], out=from_u_i[t])
            if t == last:
                w_u += direct_i
            if t > 0:
                _mv(Kt_i, w_u, column, add=number > 0)
        if t > 0:
            torch.mul(column, back[t], out=from_v[t - 1])
    # (..., M, 2T) times (..., 2T, N)
    left, right = torch.cat([a, from_u]).movedim(0, -1), torch.cat([from_v, b[:-1]]).movedim(0, -2)
    return grad - K * (left @ right)


class _Sinkhorn(torch.autograd.Function):
    """log P (..., M, N), u (..., M), v (..., N) from Z (..., M, N), marginals mu (..., M), nu (..., N).

    padded: -inf in Z is no connection, 0 in a marginal no keypoint. Only log P carries a gradient.
    """

    @staticmethod
    def forward(ctx, Z: Tensor, mu: Tensor, nu: Tensor, iterations: int, padded: bool):
        a, b, r = _iterate(Z, mu, nu, iterations, padded)
        ctx.save_for_backward(Z, mu, nu, a, b)
        ctx.padded = padded
        u, v = a[-1].log() - r, b[-1].log()
        ctx.mark_non_differentiable(u, v)
        return (Z + u.unsqueeze(-1)).add_(v.unsqueeze(-2)), u, v

    @staticmethod
    def backward(ctx, grad: Tensor, *_):
        Z, mu, nu, a, b = ctx.saved_tensors
        if ctx.padded:
            allowed = torch.isfinite(Z) & (mu > 0).unsqueeze(-1) & (nu > 0).unsqueeze(-2)
            grad = torch.where(allowed, grad, torch.zeros_like(grad))
        return _backward(Z, mu, nu, a, b, grad), None, None, None, None


def _log_domain(Z: Tensor, mu: Tensor, nu: Tensor, iterations: int) -> Tensor:
    """The paper's iterations as they stand, differentiated by autograd: slower, never overflows."""
    log_mu, log_nu = mu.log(), nu.log()
    v = torch.zeros_like(nu)
    for _ in range(iterations):
        u = log_mu - torch.logsumexp(Z + v.unsqueeze(-2), dim=-1)
        v = log_nu - torch.logsumexp(Z + u.unsqueeze(-1), dim=-2)
    return Z + u.unsqueeze(-1) + v.unsqueeze(-2)


def _finite(u: Tensor, v: Tensor, mu: Tensor, nu: Tensor) -> bool:
    """Are all potentials that matter finite? A score that is not finite makes its row's potential so."""
    rows, columns = torch.isfinite(u) | (mu == 0), torch.isfinite(v) | (nu == 0)
    return bool(rows.all() & columns.all())


def _augment(scores: Tensor, dustbin: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """Z (m + 1, n + 1) with the dustbins last, and marginals of total mass 1 (equation 8, divided by m + n)."""
    m, n = scores.shape
    Z = torch.cat([torch.cat([scores, dustbin.expand(m, 1)], dim=1), dustbin.expand(1, n + 1)], dim=0)
    mu = torch.cat([Z.new_ones(m), Z.new_full((1,), n)]) / (m + n)
    nu = torch.cat([Z.new_ones(n), Z.new_full((1,), m)]) / (m + n)
    return Z, mu, nu


def _one_by_one(scores: List[Tensor], dustbin: Tensor, iterations: int) -> List[Tensor]:
    """Each pair alone: on a CPU its kernel then stays in the cache, three times faster than a batch."""
    log_assignments = []
    for pair in scores:
        Z, mu, nu = _augment(pair, dustbin)
        log_P, u, v = _Sinkhorn.apply(Z, mu, nu, iterations, False)
        if not _finite(u, v, mu, nu):
            log_P = _log_domain(Z, mu, nu, iterations)
        log_assignments.append(log_P + math.log(sum(pair.shape)))
    return log_assignments


def _batched(scores: List[Tensor], dustbin: Tensor, iterations: int) -> List[Tensor]:
    """All pairs in one padded batch (padding has neither kernel entries nor mass): few launches on a GPU."""
    M, N = (max(pair.shape[axis] for pair in scores) + 1 for axis in (0, 1))
    parts = [_augment(pair, dustbin) for pair in scores]
    sides = [(N - Z.shape[1], M - Z.shape[0]) for Z, _, _ in parts]
    pad = torch.nn.functional.pad
    Z = torch.stack(
        [pad(part[0], (0, right, 0, down), value=-math.inf) for part, (right, down) in zip(parts, sides)]
    )
    mu = torch.stack([pad(part[1], (0, down)) for part, (_, down) in zip(parts, sides)])
    nu = torch.stack([pad(part[2], (0, right)) for part, (right, _) in zip(parts, sides)])
    log_P, u, v = _Sinkhorn.apply(Z, mu, nu, iterations, True)
    if not _finite(u, v, mu, nu):
        return _one_by_one(scores, dustbin, iterations)
    return [
        P[: m + 1, : n + 1] + math.log(m + n) for P, (m, n) in zip(log_P, (pair.shape for pair in scores))
    ]


def _without_mass(scores: Tensor, dustbin: Tensor) -> Tensor:
    """A pair with an empty side: each keypoint of the other is unmatched with certainty, log P = 0."""
    m, n = scores.shape
    log_P = scores.new_zeros((m + 1, n + 1)) + dustbin * 0
    corner = torch.zeros_like(log_P, dtype=torch.bool)
    corner[m, n] = True
    return log_P.masked_fill(corner, -math.inf)


def log_optimal_transport(scores: List[Tensor], dustbin: Tensor, iterations: int) -> List[Tensor]:
    """Log of the partial assignment of each pair, dustbins last (SuperGlue, equations 8 and 9).

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
        wide = [s.float() if s.dtype in (torch.float16, torch.bfloat16) else s for s in scores]
        dtype = wide[0].dtype if wide else torch.float32
        dustbin = dustbin.to(dtype)
        full = [i for i, s in enumerate(wide) if min(s.shape) > 0]
        results = [_without_mass(s, dustbin) for s in wide]
        if full:
            solve = _one_by_one if dustbin.device.type == "cpu" else _batched
            for i, log_P in zip(full, solve([wide[i] for i in full], dustbin, iterations)):
                results[i] = log_P
        return results
