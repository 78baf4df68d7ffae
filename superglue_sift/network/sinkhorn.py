"""Optimal transport between two sets of keypoints with a dustbin each (SuperGlue, section 3.2).

The paper runs T Sinkhorn iterations in the log domain,

    u <- log mu - logsumexp_j(Z + v),    v <- log nu - logsumexp_i(Z + u),    log P = Z + u + v.

Here the same iterates are computed in the scaled-kernel form: with r_i = max_j Z_ij, K = exp(Z - r),
a = exp(u + r) and b = exp(v), one iteration is a <- mu / (K b), b <- nu / (K^T a): two matrix-vector
products instead of two passes of exp and log. The dustbin row is flat, so every column of K contains 1, and
every row has maximum 1: no row or column can underflow entirely. Only a_t and b_t are kept for the backward
pass, which is the exact gradient of the unrolled loop: walking back gives rank-one terms, summed by one
matrix product at the end. Memory does not grow with T beyond these vectors.

If the iterates of a pair, or the products of a and b in its gradient, leave the range of the dtype, the pair falls back
to the log domain (`_log_domain`, plain autograd): in float32, if rival scores lead by more than about 65.

On a CPU, each of torch's threads works on one pair, whose kernel stays in its cache (or all threads on one pair, if
pairs are few or small). In training on a GPU, pairs are split into chunks whose kernels fit its cache, and the 2T small
products of a chunk are captured as a CUDA graph, for few shapes; without capture, all pairs are processed at once.
"""

from __future__ import annotations

import functools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from superglue_sift.network import sinkhorn_kernel
from superglue_sift.network.packing import size_class, to_device_async
from superglue_sift.torch_compat import no_autocast

# Size of the kernels K in a chunk of a captured loop: fits the L2 cache of an A100 or newer.
CHUNK_BYTES = 32 << 20
MAX_VARYING = 32  # maximum pairs of a chunk if the number of pairs varies

# Minimum entries per pair for one thread per pair: with smaller pairs, threads wait for Python's global lock.
MIN_ENTRIES_PER_THREAD = 1 << 17

# a * b must stay this factor below float32's maximum, or the backward pass, which multiplies them further, overflows.
# The factor also excludes the range where exp(Z - r) is subnormal.
GRADIENT_HEADROOM = 1e12


class OnDevice(NamedTuple):
    """Marginals of B problems padded to (M', N') (equation 8).

    mu (B, M'), nu (B, N'): 1 for a keypoint and the other image's number of keypoints for the dustbin, divided by their
    sum; 0 for padding. log_mass (B, 1, 1): log of that sum. core (B, M', N') bool: entries of two keypoints.
    """

    mu: Tensor
    nu: Tensor
    log_mass: Tensor
    core: Tensor


class Marginals:
    """Marginals of pairs of m_i and n_i keypoints, computed on the host and cached for each padded size."""

    def __init__(self, counts0: Sequence[int], counts1: Sequence[int], device: torch.device) -> None:
        self._counts = np.array([[int(m), int(n)] for m, n in zip(counts0, counts1)], np.int64).reshape(-1, 2)
        self._device = device
        self._kept: Dict[tuple, OnDevice] = {}

    def padded(self, pairs: int, rows: int, columns: int, dtype: torch.dtype) -> OnDevice:
        """Marginals for (pairs, rows, columns). Additional pairs are empty; empty pairs have mass in their corner."""
        key = (pairs, rows, columns, dtype)
        if key not in self._kept:
            self._kept[key] = self._computed(*key)
        return self._kept[key]

    def _computed(self, pairs: int, rows: int, columns: int, dtype: torch.dtype) -> OnDevice:
        counts = np.zeros((pairs, 2), np.int64)
        counts[: len(self._counts)] = self._counts
        number = np.float64 if dtype == torch.float64 else np.float32
        total = np.maximum(counts.sum(1, keepdims=True), 1).astype(number)
        dustbins = np.where(counts.sum(1, keepdims=True) > 0, counts[:, ::-1], 1)
        inside, masses = [], []
        for side, size in enumerate((rows, columns)):
            index, count = np.arange(size), counts[:, side : side + 1]
            inside.append(index < count)
            masses.append(((index < count) + (index == count) * dustbins[:, side : side + 1]).astype(number) / total)
        table = self._moved(np.concatenate([*masses, np.log(total)], 1))
        mu, nu, log_mass = table.split([rows, columns, 1], 1)
        valid = self._moved(np.concatenate(inside, 1)).split([rows, columns], 1)
        return OnDevice(mu, nu, log_mass.unsqueeze(2), valid[0].unsqueeze(2) & valid[1].unsqueeze(1))

    def _moved(self, values: np.ndarray) -> Tensor:
        return to_device_async(torch.from_numpy(values), self._device)


class _Sinkhorn(torch.autograd.Function):
    """log P (..., M, N) of each problem, then (...) bool: whether it and its gradient, if needed, are finite.

    A problem is three arguments: Z (..., M, N) and marginals mu (..., M), nu (..., N), 0 for padding.
    pairs: number of pairs of a problem that are iterated together; 0: all.
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

        log_P, finite, a, b = zip(*_map(solve, list(zip(problems[::3], problems[1::3], problems[2::3]))))
        ctx.save_for_backward(*problems, *a, *b)
        ctx.pairs = pairs
        ctx.mark_non_differentiable(*finite)
        ctx.set_materialize_grads(False)  # outputs without gradient are skipped
        return (*log_P, *finite)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Optional[Tensor]):
        count = len(grads) // 2
        saved = ctx.saved_tensors
        parts = zip(*(saved[start : 3 * count : 3] for start in range(3)), saved[3 * count : 4 * count],
                    saved[4 * count :], grads)  # fmt: skip
        used = [part for part in parts if part[-1] is not None]
        computed = iter(_map(functools.partial(sinkhorn_kernel.gradient, pairs=ctx.pairs), used))
        of_Z = [None if grad is None else next(computed) for grad in grads[:count]]
        return (None, None, *(value for grad in of_Z for value in (grad, None, None)))


def _map(work: Callable, problems: Sequence[Tuple[Tensor, ...]]) -> List:
    """`work(*problem)` for each problem; many large ones on a CPU in parallel."""
    entries = sum(problem[0].numel() for problem in problems)
    many = len(problems) >= 2 * torch.get_num_threads() and entries >= MIN_ENTRIES_PER_THREAD * len(problems)
    if many and problems[0][0].device.type == "cpu":
        return map_over_threads(work, problems)
    return [work(*problem) for problem in problems]


def map_over_threads(function: Callable[..., Any], items: Sequence[Any]) -> List[Any]:
    """`function(*item)` for each item, without gradients, in as many threads as torch has.

    Meanwhile torch's number of threads is 1 for the whole process. A thread that first calls torch during this time
    keeps that number.
    """
    threads = torch.get_num_threads()
    if threads == 1 or len(items) < 2:
        return [function(*item) for item in items]

    def alone(item: Any) -> Any:
        # OpenMP's number is per thread, MKL's global: the caller only waits
        torch.set_num_threads(1)
        with torch.no_grad():
            return function(*item)

    try:
        with ThreadPoolExecutor(min(threads, len(items))) as pool:
            return list(pool.map(alone, items))
    finally:
        torch.set_num_threads(threads)


def _log_domain(Z: Tensor, mu: Tensor, nu: Tensor, iterations: int) -> Tensor:
    """The paper's iterations, differentiated by autograd: slower, without overflow."""
    log_mu, log_nu = mu.log(), nu.log()
    v = torch.zeros_like(nu)
    for _ in range(iterations):
        u = log_mu - torch.logsumexp(Z + v.unsqueeze(-2), dim=-1)
        v = log_nu - torch.logsumexp(Z + u.unsqueeze(-1), dim=-2)
    return Z + u.unsqueeze(-1) + v.unsqueeze(-2)


def _finite(u: Tensor, v: Tensor, mu: Tensor, nu: Tensor) -> Tensor:
    """(...) bool: whether all potentials except padding are finite. A non-finite score makes its row's non-finite."""
    without = torch.cat([mu, nu], -1) == 0
    largest = torch.cat([u, v], -1).masked_fill_(without, 0.0).abs_().amax(-1)  # propagates nan
    return largest < math.inf


def _augment(scores: Tensor, dustbin: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """Z (m + 1, n + 1) with the dustbins last, and marginals of total mass 1 (equation 8, divided by m + n)."""
    m, n = scores.shape
    Z = torch.cat([torch.cat([scores, dustbin.expand(m, 1)], dim=1), dustbin.expand(1, n + 1)], dim=0)
    mu = torch.cat([Z.new_ones(m), Z.new_full((1,), n)]) / (m + n)
    nu = torch.cat([Z.new_ones(n), Z.new_full((1,), m)]) / (m + n)
    return Z, mu, nu


def _without_mass(scores: Tensor, dustbin: Tensor) -> Tensor:
    """log P of a pair with an empty side: each keypoint of the other is unmatched, log P = 0."""
    m, n = scores.shape
    log_P = scores.new_zeros((m + 1, n + 1)) + dustbin * 0
    corner = torch.zeros_like(log_P, dtype=torch.bool)
    corner[m, n] = True
    return log_P.masked_fill(corner, -math.inf)


def log_optimal_transport(scores: List[Tensor], dustbin: Tensor, iterations: int) -> List[Tensor]:
    """Log of the partial assignment of each pair, dustbins last (SuperGlue, equations 8 and 9), pair by pair.

    Computed in float32 or wider, also under autocast, which would round the products of each iteration.

    Args:
        scores: B matrices (m_i, n_i) of similarities.
        dustbin: scalar, the score of leaving a keypoint unmatched.
        iterations: T >= 1.

    Returns:
        B matrices (m_i + 1, n_i + 1). P = exp() has mass m_i + n_i; its rows and columns but the last sum to
        1 at convergence, so P is the probability of a match. If a side is empty, the other's keypoints are
        unmatched with log P = 0 and the corner, which has no mass, is -inf.
    """
    with no_autocast(dustbin.device.type):
        wider = [to_float32(pair) for pair in scores]
        full = [_augment(pair, dustbin.to(pair.dtype)) for pair in wider if pair.numel()]
        solved = _Sinkhorn.apply(iterations, 0, *(t for problem in full for t in problem)) if full else ()
        results = iter(zip(full, solved, solved[len(full) :]))
        return [
            _checked(*next(results), iterations) + math.log(sum(pair.shape))
            if pair.numel()
            else _without_mass(pair, dustbin.to(pair.dtype))
            for pair in wider
        ]


def _checked(problem: Tuple[Tensor, Tensor, Tensor], log_P: Tensor, finite: Tensor, iterations: int) -> Tensor:
    return log_P if bool(finite) else _log_domain(*problem, iterations)


def padded_optimal_transport(
    scores: Tensor, marginals: Marginals, dustbin: Tensor, iterations: int, varying: bool = False, fixed: bool = False
) -> Tuple[Tensor, Tensor]:
    """`log_optimal_transport` of a padded batch: few launches on a GPU, no device-to-host synchronisation.

    Args:
        scores: (B, M, N), pair i in its first m_i rows and n_i columns; the rest is ignored.
        marginals: of m_i and n_i keypoints.
        varying: B differs between steps, so that chunks of a fixed number of pairs are captured.
        fixed: no shape differs between steps, so that chunks are as the shapes are; a part of a larger capture.

    Returns:
        log P (B, M', N'), pair i in its first m_i + 1 rows and n_i + 1 columns; and (B,) bool, whether it and, in
        training, its gradient are finite. For the others, use `log_optimal_transport`. The corner of an empty pair is
        0.
    """
    with no_autocast(dustbin.device.type):
        learning = torch.is_grad_enabled() and (scores.requires_grad or dustbin.requires_grad)
        captured = learning and not fixed and sinkhorn_kernel.can_capture(scores.device)
        size = _captured_size(scores.shape, varying) if captured else 0
        # with dustbins, rounded up to multiples of 16
        rows, columns = (size or -(-(keypoints + 1) // 16) * 16 for keypoints in scores.shape[1:])
        pairs = max(1, len(scores))
        if captured or fixed:
            most = max(1, CHUNK_BYTES // (4 * rows * columns))
            pairs = min(most, MAX_VARYING) if varying and captured else _at_a_time(len(scores), most)
        missing = -len(scores) % pairs if varying and captured else 0  # empty pairs that complete the last chunk
        on_device = marginals.padded(len(scores) + missing, rows, columns, to_float32(scores).dtype)
        Z = _augment_padded(to_float32(scores), on_device, dustbin)
        log_P, finite = _Sinkhorn.apply(iterations, pairs, Z, on_device.mu, on_device.nu)
        kept = slice(len(scores))
        return log_P[kept] + on_device.log_mass[kept], finite[kept]


def _at_a_time(pairs: int, most: int) -> int:
    """Pairs per chunk, at most `most`; if possible with few more chunks, a divisor: one shape to capture."""
    if pairs <= most:
        return max(1, pairs)
    even = max(number for number in range(1, most + 1) if pairs % number == 0)
    return even if 2 * even > most else -(-pairs // -(-pairs // most))


def to_float32(t: Tensor) -> Tensor:
    """Convert to float32; float64 is unchanged."""
    return t if t.dtype == torch.float64 else t.float()


def _captured_size(shape: Sequence[int], varying: bool) -> int:
    """Size of a captured loop: keypoints rounded up to one of a few sizes, and the dustbin.

    The longest view differs between steps, and each size is captured once: multiples of 64, eight sizes per octave; two
    per octave if the number of pairs varies.
    """
    keypoints = max(shape[1:])
    unit = max(64, 1 << (keypoints - 1).bit_length() >> 4)
    return (size_class(keypoints) if varying else -(-keypoints // unit) * unit) + 16


def _augment_padded(scores: Tensor, marginals: OnDevice, dustbin: Tensor) -> Tensor:
    """Z of a batch, of the size of its marginals.

    Padding has the dustbin's score and no mass: the products of its rows and columns are above 0, so that quotients are
    0 and not 0/0. For the same reason an empty pair has mass in its corner.
    """
    missing = (padded - size for size, padded in zip(scores.shape, marginals.core.shape))
    further = [side for axis in reversed(list(missing)) for side in (0, axis)]
    padded = torch.nn.functional.pad(scores, further)
    return torch.where(marginals.core, padded, dustbin.to(scores.dtype))
