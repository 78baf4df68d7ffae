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

On a CPU the pairs of a batch go one by one, so that a kernel stays in the cache; on a GPU together, in chunks whose
kernels fit its cache, and the 2T small products of a chunk are recorded as a CUDA graph.
"""

from __future__ import annotations

import collections
import math
from typing import Callable, List, NamedTuple, OrderedDict, Tuple

import torch
from torch import Tensor

from pipeline.stack import can_record, no_autocast, recorded

# Of a kernel larger than a core's cache each block of rows is used twice while it is there: K a gives the rows' a, and
# these the block's part of K^T a. Each of torch's threads has a cache of its own.
BLOCK_BYTES = 5 << 18

CHUNK_BYTES = (
    32 << 20
)  # kernels of the pairs that a GPU works on at a time: they fit the L2 cache of an A100 or newer
GRAPHS = 16  # recorded at a time: those of the last batches' shapes


def _mv(matrix: Tensor, vector: Tensor, out: Tensor, add: bool = False) -> Tensor:
    """Matrix-vector product into `out`, one (2-D matrix; with `add` added to it) or batched (3-D)."""
    if matrix.dim() == 2:
        return torch.addmv(out, matrix, vector, beta=float(add), out=out)
    return torch.bmm(matrix, vector.unsqueeze(-1), out=out.unsqueeze(-1)).squeeze(-1)


def _room(like: Tensor) -> Tensor:
    """Memory of the shape of `like` whose rows begin at multiples of 64 bytes.

    Products with K^T take half the time of those with rows of n + 1 numbers.
    """
    width = like.shape[-1]
    return like.new_empty((*like.shape[:-1], -(-width // 16) * 16))[..., :width]


def _kernel(Z: Tensor) -> Tuple[Tensor, Tensor]:
    """exp(Z - r) and r, the row maxima."""
    r = Z.amax(dim=-1, keepdim=True)
    return torch.sub(Z, r, out=_room(Z)).exp_(), r.squeeze(-1)


def _block_rows(K: Tensor) -> int:
    """Rows of a block: all of them but for one large kernel."""
    if K.dim() > 2:
        return K.shape[-2]
    return max(1, BLOCK_BYTES * torch.get_num_threads() // (K.stride(0) * K.element_size()))


def _blocks(K: Tensor, *others: Tensor) -> List[Tuple]:
    """For each block of rows: its part of K, that transposed, and its part of `others` (..., M).

    Of those with an axis more, (T, ..., M), a list over T.
    """
    rows = _block_rows(K)
    parts = [[part if t.dim() < K.dim() else part.unbind(0) for part in t.split(rows, -1)] for t in others]
    return [(K_i, K_i.transpose(-1, -2), *rest) for K_i, *rest in zip(K.split(rows, -2), *parts)]


def _forward_loop(K: Tensor, mu: Tensor, nu: Tensor, a: Tensor, b: Tensor) -> None:
    """Writes all iterates a (T, ..., M) and b (T + 1, ..., N)."""
    row, column = torch.empty_like(mu), torch.empty_like(nu)
    blocks = _blocks(K, mu, row, a)
    before, *rest = b.unbind(0)
    before.copy_(nu > 0)
    for t, b_t in enumerate(rest):
        for number, (K_i, Kt_i, mu_i, row_i, a_i) in enumerate(blocks):
            a_t = torch.div(mu_i, _mv(K_i, before, row_i), out=a_i[t])
            _mv(Kt_i, a_t, column, add=number > 0)
        before = torch.div(nu, column, out=b_t)


def _backward_loop(
    K: Tensor, down: Tensor, back: Tensor, start: Tensor, direct: Tensor, from_u: Tensor, from_v: Tensor
) -> None:
    """Writes w_u (T, ..., M) and w_v (T, ..., N) of `_gradient`, from the last w_v and what log P gives u directly."""
    row, column = torch.empty_like(direct), torch.empty_like(start)
    blocks = _blocks(K, row, direct, down, from_u)
    backs, from_vs = back.unbind(0), from_v.unbind(0)
    from_vs[-1].copy_(start)
    for t in range(len(from_vs) - 1, -1, -1):
        for number, (K_i, Kt_i, row_i, direct_i, down_i, from_u_i) in enumerate(blocks):
            w_u = torch.mul(_mv(K_i, from_vs[t], row_i), down_i[t], out=from_u_i[t])
            if t == len(from_vs) - 1:
                w_u += direct_i
            if t > 0:
                _mv(Kt_i, w_u, column, add=number > 0)
        if t > 0:
            torch.mul(column, backs[t], out=from_vs[t - 1])


class _Recording(NamedTuple):
    inputs: List[Tensor]
    outputs: List[Tensor]
    again: Callable[[], None]


_recordings: OrderedDict[tuple, _Recording] = collections.OrderedDict()


def _run(loop: Callable[..., None], inputs: List[Tensor], outputs: List[Tensor]) -> None:
    """`loop(*inputs, *outputs)`, which writes the outputs; on a GPU recorded once for these shapes and done again."""
    device = inputs[0].device
    if not can_record(device):
        loop(*inputs, *outputs)
        return
    tensors = [*inputs, *outputs]
    key = (loop.__name__, device, *((t.shape, t.dtype) for t in tensors))
    if key in _recordings:
        found = _recordings[key]
        _copy(inputs, found.inputs)
        found.again()
    else:
        while len(_recordings) >= GRAPHS:
            _recordings.popitem(last=False)
        fixed = [_room(t) for t in tensors]
        _copy(inputs, fixed)
        found = _Recording(fixed[: len(inputs)], fixed[len(inputs) :], recorded(lambda: loop(*fixed), device))
        _recordings[key] = found
    _recordings.move_to_end(key)
    _copy(found.outputs, outputs)


def _copy(sources: List[Tensor], targets: List[Tensor]) -> None:
    for source, target in zip(sources, targets):
        target.copy_(source)


def _iterate(Z: Tensor, mu: Tensor, nu: Tensor, iterations: int) -> Tuple[Tensor, Tensor, Tensor]:
    """All iterates a (T, ..., M), b (T + 1, ..., N) and the row maxima r (..., M)."""
    K, r = _kernel(Z)
    a = Z.new_empty((iterations, *mu.shape))
    b = Z.new_empty((iterations + 1, *nu.shape))
    _run(_forward_loop, [K, mu, nu], [a, b])
    return a, b, r


def _gradient(Z: Tensor, mu: Tensor, nu: Tensor, a: Tensor, b: Tensor, grad: Tensor) -> Tensor:
    """Gradient with respect to Z of <grad, log P>, exact for the unrolled iterations.

    With w_v = (gradient of v_t) b_t / nu and w_u = (gradient of u_t) a_t / mu, each found from the one after it,
    the gradient is grad - K o sum_t (a_t w_v^T + w_u b_{t-1}^T).
    """
    K, _ = _kernel(Z)
    inverse_mu = torch.where(mu > 0, 1 / mu, torch.zeros_like(mu))
    inverse_nu = torch.where(nu > 0, 1 / nu, torch.zeros_like(nu))
    down, back = a.square() * -inverse_mu, b.square() * -inverse_nu
    from_u, from_v = torch.empty_like(a), torch.empty_like(b[1:])
    start = grad.sum(-2) * b[-1] * inverse_nu
    direct = grad.sum(-1) * a[-1] * inverse_mu
    _run(_backward_loop, [K, down, back, start, direct], [from_u, from_v])
    # (..., M, 2T) times (..., 2T, N)
    left, right = torch.cat([a, from_u]).movedim(0, -1), torch.cat([from_v, b[:-1]]).movedim(0, -2)
    return grad - K * (left @ right)


class _Sinkhorn(torch.autograd.Function):
    """log P (..., M, N), u (..., M), v (..., N) from Z (..., M, N), marginals mu (..., M), nu (..., N).

    Where a marginal is 0 there is no keypoint. Only log P carries a gradient.
    """

    @staticmethod
    def forward(ctx, Z: Tensor, mu: Tensor, nu: Tensor, iterations: int):
        a, b, r = _iterate(Z, mu, nu, iterations)
        ctx.save_for_backward(Z, mu, nu, a, b)
        u, v = a[-1].log() - r, b[-1].log()
        ctx.mark_non_differentiable(u, v)
        return (Z + u.unsqueeze(-1)).add_(v.unsqueeze(-2)), u, v

    @staticmethod
    def backward(ctx, grad: Tensor, *_):
        return _gradient(*ctx.saved_tensors, grad), None, None, None


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
    log_P, u, v = _Sinkhorn.apply(Z, mu, nu, iterations)
    if not bool(_finite(u, v, mu, nu)):
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
        wide = [_wide(pair) for pair in scores]
        return [_alone(pair, dustbin.to(pair.dtype), iterations) for pair in wide]


def padded_optimal_transport(
    scores: Tensor, counts0: Tensor, counts1: Tensor, dustbin: Tensor, iterations: int
) -> Tuple[Tensor, Tensor]:
    """`log_optimal_transport` of a padded batch: few launches on a GPU, and nothing there makes the host wait.

    Args:
        scores: (B, M, N), pair i in its first counts0[i] rows and counts1[i] columns; the rest does not matter.
        counts0, counts1: (B,) int64 on the same device.

    Returns:
        log P (B, M + 1, N + 1), pair i in its first counts0[i] + 1 rows and counts1[i] + 1 columns; and () bool,
        whether all potentials are finite. If not, only `log_optimal_transport` gives the answer. The corner of a pair
        without any keypoint is 0.
    """
    with no_autocast(dustbin.device.type):
        Z, mu, nu = _augment_padded(_wide(scores), counts0, counts1, dustbin)
        pairs = max(1, CHUNK_BYTES // (Z[0].numel() * Z.element_size())) if len(Z) else 1
        parts = [_Sinkhorn.apply(*chunk, iterations) for chunk in zip(*(t.split(pairs) for t in (Z, mu, nu)))]
        log_P, u, v = (torch.cat(part) if len(part) > 1 else part[0] for part in zip(*parts))
        mass = (counts0 + counts1).clamp(min=1).to(log_P.dtype).log()
        return log_P + mass[:, None, None], _finite(u, v, mu, nu)


def _wide(scores: Tensor) -> Tensor:
    return scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores


def _augment_padded(
    scores: Tensor, counts0: Tensor, counts1: Tensor, dustbin: Tensor
) -> Tuple[Tensor, Tensor, Tensor]:
    """`_augment` of a batch.

    Beyond a pair's dustbins lie more of their score, without mass: a row or column of them has a product above 0, so
    that its quotient is 0 and not 0/0. For the same reason a pair without any keypoint has mass in its corner.
    """
    _, M, N = scores.shape
    m, n = counts0[:, None], counts1[:, None]
    i, j = (torch.arange(size + 1, device=scores.device) for size in (M, N))
    core = (i < m).unsqueeze(2) & (j < n).unsqueeze(1)
    Z = torch.where(core, torch.nn.functional.pad(scores, (0, 1, 0, 1)), dustbin.to(scores.dtype))
    marginals = []
    for place, own, other in ((i, m, n), (j, n, m)):
        lone = torch.where(m + n > 0, other, torch.ones_like(other))
        mass = (place < own).to(Z.dtype) + (place == own) * lone
        marginals.append((mass / (m + n).clamp(min=1)).to(Z.dtype))
    return (Z, *marginals)
