"""Match two sets of keypoints by optimal transport with dustbins (SuperGlue, section 3.2).

The paper runs T Sinkhorn iterations in the log domain,

    u <- log mu - logsumexp_j(Z + v),    v <- log nu - logsumexp_i(Z + u),    log P = Z + u + v.

Here the same iterates are computed as products with a kernel K. With r_i = max_j Z_ij,
K = exp(Z - r), a = exp(u + r) and b = exp(v), one iteration is

    a <- mu / (K b),    b <- nu / (K^T a).

These are two matrix-vector products instead of two passes of exp and log. All scores in the row of
the dustbin are equal, so every column of K contains 1. The maximum of every row is 1, too. So no
row or column can underflow entirely.

The gradient is that of the unrolled loop, exactly, and needs only the vectors a_t and b_t. It is a
sum of products of two vectors, which one matrix product adds up at the end.

If the iterates of a pair, or the products of a and b in its gradient, leave the range of the dtype,
the pair is computed in the log domain. In float32 this happens if a wrong score is larger than the
right one by more than about 65.
"""

from __future__ import annotations

import math
from typing import Any, List, Tuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from superglue_sift.torch_compat import is_traced, sqrt

# a * b must stay below the dtype's maximum by this factor, since the backward pass multiplies them
# further. The factor also excludes the range where exp(Z - r) is subnormal.
GRADIENT_HEADROOM = 1e12
Iterates = Tuple[List[Tensor], List[Tensor], Tensor]  # all a, all b, and the row maxima r


def log_optimal_transport(
    scores: Tensor,
    mask0: Tensor,
    mask1: Tensor,
    dustbin: Tensor,
    iterations: int,
    repair_overflow: bool = True,
) -> Tuple[Tensor, Tensor]:
    """Compute the log of the partial assignment of each pair (SuperGlue, equations 8 and 9).

    Args:
        scores: (B, M, N) similarities, float32 or float64. Padding may have any finite score.
        mask0, mask1: (B, M) and (B, N) bool, True for keypoints.
        dustbin: scalar, the score of leaving a keypoint unmatched.
        iterations: T, the number of iterations, 1 or more.
        repair_overflow: whether pairs that overflow are computed again in the log domain. For this
            the host waits for the GPU.

    Returns:
        log P (B, M + 1, N + 1), dustbins last, -inf for padding. P has mass m + n. All its rows and
        columns except the last sum to 1 at convergence, so P is the probability of a match. If an
        image has no keypoints, the keypoints of the other image are unmatched with log P = 0.

        Also (B,) bool, False for a pair that overflowed, or in training its gradient. Without
        `repair_overflow`, log P of such a pair is wrong and has no gradient.

    Example:
        The first two keypoints of each image are alike. The third one of image 0 has no match.

        >>> scores = torch.tensor([[[9.0, 0.0], [0.0, 9.0], [0.0, 0.0]]])
        >>> mask0 = torch.ones(1, 3, dtype=torch.bool)
        >>> log_P, _ = log_optimal_transport(scores, mask0, mask0[:, :2], torch.tensor(3.0), 100)
        >>> [[round(p, 1) for p in row] for row in log_P[0].exp().tolist()]
        [[0.9, 0.0, 0.1], [0.0, 0.9, 0.1], [0.0, 0.0, 1.0], [0.1, 0.1, 1.9]]
    """
    problem = _make_problem(scores, mask0, mask1, dustbin)
    if torch.is_grad_enabled() and problem[0].requires_grad:
        log_P, finite = _Sinkhorn.apply(*problem, iterations)
    else:
        log_P, finite, _ = _solve_by_products(*problem, iterations)
    # Pairs that left the range of the dtype are computed once more, in the log domain.
    if repair_overflow and not bool(finite.all()):
        overflowed = torch.nonzero(~finite)[:, 0]
        Z, mu, nu, log_mass = (tensor[overflowed] for tensor in problem)
        exact = _solve_in_log_domain(Z, mu, nu, log_mass, iterations)
        log_P = log_P.index_copy(0, overflowed, exact)
    return log_P, finite


def _make_problem(
    scores: Tensor, mask0: Tensor, mask1: Tensor, dustbin: Tensor
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Add the dustbins to scores (B, M, N), in the last row and column, and compute the marginals.

    Padding has the dustbin's score and no mass. With this score, K b and K^T a are above 0 for
    padding, so that its quotients are 0 and not 0/0. For the same reason both dustbins of a pair
    without keypoints have mass.

    Returns:
        Z (B, M + 1, N + 1), the scores.
        mu (B, M + 1, 1) and nu (B, N + 1, 1), the marginals of total mass 1 (equation 8, divided by
        m + n). They are 0 for padding.
        log(m + n), (B, 1, 1).
    """
    dtype = scores.dtype
    ones0 = mask0.to(dtype)
    ones1 = mask1.to(dtype)
    m = ones0.sum(1, keepdim=True)
    n = ones1.sum(1, keepdim=True)
    is_empty = (m + n == 0).to(dtype)
    mass = m + n + is_empty
    # The mass of a keypoint is 1, and that of the dustbin of image 0 is n.
    mu = torch.cat([ones0, n + is_empty], 1) / mass
    nu = torch.cat([ones1, m + is_empty], 1) / mass
    # True for two keypoints, False for dustbins and padding
    core = pad(mask0.unsqueeze(2) & mask1.unsqueeze(1), (0, 1, 0, 1))
    Z = torch.where(core, pad(scores, (0, 1, 0, 1)), dustbin.to(dtype))
    return Z, mu.unsqueeze(2), nu.unsqueeze(2), mass.log().unsqueeze(2)


class _Sinkhorn(torch.autograd.Function):
    """Add to `_solve_by_products` the gradient of its log P with respect to Z."""

    @staticmethod
    def forward(ctx: Any, Z: Tensor, mu: Tensor, nu: Tensor, log_mass: Tensor, iterations: int):
        """Compute log P, and keep all iterates for the gradient."""
        log_P, finite, parts = _solve_by_products(Z, mu, nu, log_mass, iterations)
        # (T, B, M + 1, 1) and (T + 1, B, N + 1, 1)
        a = torch.cat([torch.stack(part[0]) for part in parts], 1)
        b = torch.cat([torch.stack(part[1]) for part in parts], 1)
        # The gradient multiplies a and b, which may overflow although both are finite.
        reach = a.amax((0, 2)) * b.amax((0, 2)) * GRADIENT_HEADROOM  # (B, 1)
        finite = finite & (reach < math.inf).squeeze(1)
        # A pair that is not finite gets a gradient of zero.
        for iterates in (a, b):
            iterates.masked_fill_(~finite[:, None, None], 1.0)
        ctx.save_for_backward(Z, mu, nu, a, b)
        ctx.mark_non_differentiable(finite)
        return log_P, finite

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any):
        """Return the gradient with respect to Z. The other arguments have none."""
        Z, mu, nu, a, b = ctx.saved_tensors
        gradients = [
            _compute_gradient(Z[pairs], mu[pairs], nu[pairs], a[:, pairs], b[:, pairs], grad[pairs])
            for pairs in _split_pairs(Z)
        ]
        return torch.cat(gradients), None, None, None, None


def _split_pairs(Z: Tensor) -> List[slice]:
    """Split the pairs into chunks that are iterated together.

    On a GPU all pairs are one chunk. On a CPU each pair is a chunk, since the kernel of one pair
    stays in the cache.
    """
    if Z.device.type != "cpu" or len(Z) == 0:
        return [slice(None)]
    return [slice(pair, pair + 1) for pair in range(len(Z))]


def _solve_by_products(
    Z: Tensor, mu: Tensor, nu: Tensor, log_mass: Tensor, iterations: int
) -> Tuple[Tensor, Tensor, List[Iterates]]:
    """Compute log P by products with the kernel (see the module).

    Returns:
        log P, whether the potentials of each pair are finite (B,), and the iterates of each chunk
        of pairs.
    """
    parts = [_iterate(Z[pairs], mu[pairs], nu[pairs], iterations) for pairs in _split_pairs(Z)]
    # Return to the potentials of the log domain.
    u = torch.cat([a[-1].log() - r for a, _, r in parts])
    v = torch.cat([b[-1].log() for _, b, _ in parts])
    # Potentials without mass do not count. If any other is nan, so is the maximum, and the pair is
    # not finite.
    largest = [
        potential.masked_fill(mass == 0, 0.0).abs().amax((1, 2))
        for potential, mass in ((u, mu), (v, nu))
    ]
    finite = (largest[0] < math.inf) & (largest[1] < math.inf)
    log_P = (Z + (u + log_mass)).add_(v.transpose(1, 2))
    return log_P, finite, parts


def _make_kernel(Z: Tensor) -> Tuple[Tensor, Tensor]:
    """Compute K = exp(Z - r) (B, M + 1, N + 1) and the row maxima r (B, M + 1, 1).

    Rows start at multiples of 64 bytes, which halves the time of products with K^T on a CPU.
    """
    r = Z.amax(2, keepdim=True)
    if is_traced():
        return (Z - r).exp(), r
    width = Z.shape[2]
    # Allocate rows of a multiple of 16 numbers, and use the first N + 1 of each.
    K = Z.new_empty((*Z.shape[:2], -(-width // 16) * 16))[..., :width]
    return torch.sub(Z, r, out=K).exp_(), r


def _iterate(Z: Tensor, mu: Tensor, nu: Tensor, iterations: int) -> Iterates:
    """Iterate a and b from b = 1.

    Returns:
        T iterates a (B, M + 1, 1), T + 1 iterates b (B, N + 1, 1), and the row maxima r
        (B, M + 1, 1).
    """
    K, r = _make_kernel(Z)
    K_t = K.transpose(1, 2)
    a: List[Tensor] = []
    # The iterations begin with v = 0, so b = 1. Padding has 0, and no part in K b.
    b: List[Tensor] = [(nu > 0).to(nu.dtype)]
    # a <- mu / (K b), b <- nu / (K^T a)
    for _ in range(iterations):
        a.append(mu / torch.bmm(K, b[-1]))
        if is_traced():
            # ONNX Runtime up to 1.22 cannot multiply a transposed matrix in float64.
            row = a[-1].reshape(a[-1].shape[0], 1, -1)
            product = torch.bmm(row, K).reshape(row.shape[0], -1, 1)
        else:
            product = torch.bmm(K_t, a[-1])
        b.append(nu / product)
    return a, b, r


def _compute_gradient(
    Z: Tensor, mu: Tensor, nu: Tensor, a: Tensor, b: Tensor, grad: Tensor
) -> Tensor:
    """Compute the gradient of <grad, log P> with respect to Z, for the unrolled iterations.

    With w_v = (gradient of v_t) b_t / nu and w_u = (gradient of u_t) a_t / mu, each computed from
    the next one, the gradient is grad - K o sum_t (a_t w_v^T + w_u b_{t-1}^T), where o multiplies
    element by element.

    Any factor s gives the same gradient from s a and b / s. Here s makes the maxima of a and b
    equal, so that their squares stay in the range of float32. Otherwise the square of a would leave
    this range where a wrong score is larger than the right one by 45.
    """
    K, _ = _make_kernel(Z)
    K_t = K.transpose(1, 2)
    # Give a and b equal maxima.
    s = sqrt(b.amax((0, 2)) / a.amax((0, 2))).unsqueeze(2)
    a = a * s
    b = b / s
    # Padding has no mass, and gets no gradient.
    per_mu = (1 / mu).masked_fill_(mu == 0, 0.0)
    per_nu = (1 / nu).masked_fill_(nu == 0, 0.0)
    from_v_to_u = (a.square() * -per_mu).unbind()
    from_u_to_v = (b.square() * -per_nu).unbind()
    # From the last iteration to the first
    w_u: List[Tensor] = []
    w_v = [grad.sum(1).unsqueeze(2) * b[-1] * per_nu]
    direct = grad.sum(2, keepdim=True) * a[-1] * per_mu
    for t in range(len(from_v_to_u) - 1, -1, -1):
        step = torch.bmm(K, w_v[-1]) * from_v_to_u[t]
        w_u.append(step + direct if not w_u else step)
        if t > 0:
            w_v.append(torch.bmm(K_t, w_u[-1]) * from_u_to_v[t])
    # One matrix product adds up the products of two vectors of all iterations.
    left = torch.cat([a, torch.stack(w_u[::-1])]).squeeze(3).permute(1, 2, 0)  # (B, M + 1, 2 T)
    # (B, 2 T, N + 1)
    right = torch.cat([torch.stack(w_v[::-1]), b[:-1]]).squeeze(3).permute(1, 0, 2)
    product = torch.bmm(left, right).mul_(K)
    return torch.sub(grad, product, out=product)


def _solve_in_log_domain(
    Z: Tensor, mu: Tensor, nu: Tensor, log_mass: Tensor, iterations: int
) -> Tensor:
    """Compute log P by the paper's iterations, which are slower but do not overflow.

    Autograd differentiates them.
    """
    log_mu = mu.log()
    log_nu = nu.log().transpose(1, 2)
    # Padding has v = -inf, and no part in the sums.
    v = torch.zeros_like(log_nu).masked_fill(log_nu == -math.inf, -math.inf)
    u = log_mu
    for _ in range(iterations):
        u = log_mu - torch.logsumexp(Z + v, 2, keepdim=True)
        v = log_nu - torch.logsumexp(Z + u, 1, keepdim=True)
    return Z + (u + log_mass) + v
