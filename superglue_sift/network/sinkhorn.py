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

On a CPU each of torch's threads takes a pair at a time, whose kernel stays in its cache (all take one together where
there are few or they are small). A GPU that trains takes chunks of pairs whose kernels fit its own, and the 2T small
products of a chunk are captured as a CUDA graph, for few shapes; where nothing is captured, it takes all pairs at once.
"""

from __future__ import annotations

import functools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from superglue_sift.network import sinkhorn_kernel
from superglue_sift.network.marginals import Marginals, OnDevice
from superglue_sift.network.packing import size_class
from superglue_sift.torch_compat import no_autocast

# Kernels of the pairs that a captured loop works on at a time, so that they fit the L2 cache of an A100 or newer.
CHUNK_BYTES = 32 << 20
MAX_VARYING = 32  # pairs of a chunk where their number varies, however small they are

# Minimum entries of a pair for a CPU's threads to take a pair each: for smaller ones Python, which one thread runs at a
# time, takes too large a part of the time.
MIN_ENTRIES_PER_THREAD = 1 << 17

# a * b must stay this factor below float32's maximum, or the backward pass, which multiplies them further, overflows.
# It also keeps apart from where exp(Z - r) is no normal number.
GRADIENT_HEADROOM = 1e12


class _Sinkhorn(torch.autograd.Function):
    """log P (..., M, N) of each problem, then for each (...) bool: are it and its gradient, if needed, finite?

    A problem is three arguments: Z (..., M, N) and marginals mu (..., M), nu (..., N), 0 where there is no keypoint.
    pairs: how many pairs of a problem are iterated together; 0: all.
    """

    @staticmethod
    def forward(ctx, iterations: int, pairs: int, *problems: Tensor):
        learning = any(ctx.needs_input_grad)

        def solve(Z: Tensor, mu: Tensor, nu: Tensor):
            a, b, r = sinkhorn_kernel.iterate(Z, mu, nu, iterations, learning, pairs)
            u, v = a[-1].log() - r, b[-1].log()
            finite = _finite(u, v, mu, nu)
            if learning:
                reach = sinkhorn_kernel.largest(a) * sinkhorn_kernel.largest(b) * GRADIENT_HEADROOM
                finite = finite & (reach < math.inf)
                # non-finite pairs get zero gradient
                beyond = ~finite.unsqueeze(-1)
                for iterates in (a, b):
                    iterates.masked_fill_(beyond, 1.0)
            return (Z + u.unsqueeze(-1)).add_(v.unsqueeze(-2)), finite, a, b

        apart = list(zip(problems[::3], problems[1::3], problems[2::3]))
        log_P, finite, a, b = zip(*_each(solve, apart))
        ctx.save_for_backward(*problems, *a, *b)
        ctx.pairs = pairs
        ctx.mark_non_differentiable(*finite)
        ctx.set_materialize_grads(False)  # one that was not used may hold anything
        return (*log_P, *finite)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Optional[Tensor]):
        count = len(grads) // 2
        saved = ctx.saved_tensors
        parts = zip(*(saved[start : 3 * count : 3] for start in range(3)), saved[3 * count : 4 * count],
                    saved[4 * count :], grads)  # fmt: skip
        used = [part for part in parts if part[-1] is not None]
        found = iter(_each(functools.partial(sinkhorn_kernel.gradient, pairs=ctx.pairs), used))
        each_Z = [None if grad is None else next(found) for grad in grads[:count]]
        return (None, None, *(value for grad in each_Z for value in (grad, None, None)))


def _each(work: Callable, problems: Sequence[Tuple[Tensor, ...]]) -> List:
    """`work(*problem)` of each; of many large ones on a CPU several at a time."""
    entries = sum(problem[0].numel() for problem in problems)
    many = len(problems) >= 2 * torch.get_num_threads() and entries >= MIN_ENTRIES_PER_THREAD * len(problems)
    if many and problems[0][0].device.type == "cpu":
        return map_over_threads(work, problems)
    return [work(*problem) for problem in problems]


def map_over_threads(function: Callable[..., Any], items: Sequence[Any]) -> List[Any]:
    """`function(*item)` of each, without gradients, by as many threads as torch has.

    Meanwhile torch's number of threads is 1 for the whole process: one of your own threads that calls torch for the
    first time just then keeps it.
    """
    threads = torch.get_num_threads()
    if threads == 1 or len(items) < 2:
        return [function(*item) for item in items]

    def alone(item: Any) -> Any:
        # OpenMP counts for each of Python's threads, MKL for all: the caller only waits
        torch.set_num_threads(1)
        with torch.no_grad():
            return function(*item)

    try:
        with ThreadPoolExecutor(min(threads, len(items))) as pool:
            return list(pool.map(alone, items))
    finally:
        torch.set_num_threads(threads)


def _log_domain(Z: Tensor, mu: Tensor, nu: Tensor, iterations: int) -> Tensor:
    """The paper's iterations as they stand, differentiated by autograd: slower, never overflows."""
    log_mu, log_nu = mu.log(), nu.log()
    v = torch.zeros_like(nu)
    for _ in range(iterations):
        u = log_mu - torch.logsumexp(Z + v.unsqueeze(-2), dim=-1)
        v = log_nu - torch.logsumexp(Z + u.unsqueeze(-1), dim=-2)
    return Z + u.unsqueeze(-1) + v.unsqueeze(-2)


def _finite(u: Tensor, v: Tensor, mu: Tensor, nu: Tensor) -> Tensor:
    """(...) bool: are all potentials that matter finite? A score that is not finite makes its row's potential so."""
    without = torch.cat([mu, nu], -1) == 0
    largest = torch.cat([u, v], -1).masked_fill_(without, 0.0).abs_().amax(-1)  # nan where there is one
    return largest < math.inf


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
        wider = [to_float32(pair) for pair in scores]
        full = [_augment(pair, dustbin.to(pair.dtype)) for pair in wider if pair.numel()]
        solved = _Sinkhorn.apply(iterations, 0, *(t for problem in full for t in problem)) if full else ()
        found = iter(zip(full, solved, solved[len(full) :]))
        return [
            _checked(*next(found), iterations) + math.log(sum(pair.shape))
            if pair.numel()
            else _without_mass(pair, dustbin.to(pair.dtype))
            for pair in wider
        ]


def _checked(problem: Tuple[Tensor, Tensor, Tensor], log_P: Tensor, finite: Tensor, iterations: int) -> Tensor:
    return log_P if bool(finite) else _log_domain(*problem, iterations)


def padded_optimal_transport(
    scores: Tensor, marginals: Marginals, dustbin: Tensor, iterations: int, varying: bool = False
) -> Tuple[Tensor, Tensor]:
    """`log_optimal_transport` of a padded batch: few launches on a GPU, no device-to-host synchronisation.

    Args:
        scores: (B, M, N), pair i in its first m_i rows and n_i columns; the rest does not matter.
        marginals: of m_i and n_i keypoints.
        varying: B differs from step to step, so that what is captured is of other numbers of pairs.

    Returns:
        log P (B, M', N'), pair i in its first m_i + 1 rows and n_i + 1 columns; and (B,) bool, whether it is finite,
        and its gradient if that can be asked. If not, only `log_optimal_transport` gives the answer. The corner of a
        pair without any keypoint is 0.
    """
    with no_autocast(dustbin.device.type):
        learning = torch.is_grad_enabled() and (scores.requires_grad or dustbin.requires_grad)
        captured = learning and sinkhorn_kernel.can_capture(scores.device)
        size = _captured_size(scores.shape, varying) if captured else 0
        pairs = max(1, len(scores))
        if captured:
            most = max(1, CHUNK_BYTES // (4 * size * size))
            pairs = min(most, MAX_VARYING) if varying else _at_a_time(len(scores), most)
        missing = -len(scores) % pairs if varying and captured else 0  # pairs without keypoints fill the last chunk
        # dustbins, and multiples of 16
        rows, columns = (size or -(-(keypoints + 1) // 16) * 16 for keypoints in scores.shape[1:])
        given = marginals.padded(len(scores) + missing, rows, columns, to_float32(scores).dtype)
        Z = _augment_padded(to_float32(scores), given, dustbin)
        log_P, finite = _Sinkhorn.apply(iterations, pairs, Z, given.mu, given.nu)
        kept = slice(len(scores))
        return log_P[kept] + given.log_mass[kept], finite[kept]


def _at_a_time(pairs: int, most: int) -> int:
    """Pairs of a chunk, at most `most`; as many in each where that makes few chunks more: one shape to capture."""
    if pairs <= most:
        return max(1, pairs)
    even = max(number for number in range(1, most + 1) if pairs % number == 0)
    return even if 2 * even > most else -(-pairs // -(-pairs // most))


def to_float32(t: Tensor) -> Tensor:
    """In float32, or float64 as it is."""
    return t if t.dtype == torch.float64 else t.float()


def _captured_size(shape: Sequence[int], varying: bool) -> int:
    """Of a captured loop: keypoints rounded up to one of a few sizes, and the dustbin.

    The longest view of a batch differs from step to step, and each size is captured once: to one of eight sizes an
    octave and a multiple of 64; where the number of pairs is fixed too, of two.
    """
    keypoints = max(shape[1:])
    unit = max(64, 1 << (keypoints - 1).bit_length() >> 4)
    return (size_class(keypoints) if varying else -(-keypoints // unit) * unit) + 16


def _augment_padded(scores: Tensor, marginals: OnDevice, dustbin: Tensor) -> Tensor:
    """Z of a batch, of the size of its marginals.

    Beyond a pair's dustbins lie more of their score, without mass: a row or column of them has a product above 0, so
    that its quotient is 0 and not 0/0. For the same reason a pair without any keypoint has mass in its corner.
    """
    missing = (both - own for own, both in zip(scores.shape, marginals.core.shape))
    further = [side for axis in reversed(list(missing)) for side in (0, axis)]
    padded = torch.nn.functional.pad(scores, further)
    return torch.where(marginals.core, padded, dustbin.to(scores.dtype))
