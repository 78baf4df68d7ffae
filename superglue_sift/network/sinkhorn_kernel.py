"""The iterations of optimal transport in the scaled-kernel form, and the gradient through them (see `sinkhorn`).

All functions take one pair, (M, N) and marginals (M,) and (N,), or a batch of pairs with a leading axis.
"""

from __future__ import annotations

import collections
import threading
from typing import Callable, List, NamedTuple, OrderedDict, Tuple

import torch
from torch import Tensor

from superglue_sift.network.cuda_graphs import can_capture, capture_cuda_graph

# Size of a block of rows of K that fits the cache of a core, where it is used twice: K b gives a for its rows, which
# give its part of K^T a. Multiplied by the number of torch's threads.
BLOCK_BYTES = 5 << 18

# Limits of the CUDA graphs that are kept, for recently used shapes.
MAX_GRAPHS, GRAPH_BYTES = 24, 512 << 20


def _mv(matrix: Tensor, vector: Tensor, out: Tensor, add: bool = False) -> Tensor:
    """Matrix-vector product into `out`, single (2-D matrix; with `add`, added to `out`) or batched (3-D)."""
    if matrix.dim() == 2:
        return torch.addmv(out, matrix, vector, beta=float(add), out=out)
    return torch.bmm(matrix, vector.unsqueeze(-1), out=out.unsqueeze(-1)).squeeze(-1)


def empty_aligned(like: Tensor) -> Tensor:
    """An empty tensor of the shape of `like` whose rows start at multiples of 64 bytes.

    This halves the time of products with K^T, compared with rows of n + 1 numbers.
    """
    width = like.shape[-1]
    return like.new_empty((*like.shape[:-1], -(-width // 16) * 16))[..., :width]


def _kernel(Z: Tensor) -> Tuple[Tensor, Tensor]:
    """exp(Z - r) and r, the row maxima."""
    r = Z.amax(dim=-1, keepdim=True)
    return torch.sub(Z, r, out=empty_aligned(Z)).exp_(), r.squeeze(-1)


def _block_rows(K: Tensor) -> int:
    """Rows of a block: all, except for a single large kernel."""
    if K.dim() > 2:
        return K.shape[-2]
    return max(1, BLOCK_BYTES * torch.get_num_threads() // (K.stride(0) * K.element_size()))


def _blocks(K: Tensor, *others: Tensor) -> List[Tuple]:
    """For each block of rows: its part of K, the transpose, and its part of `others` (..., M).

    For others with a leading axis, (T, ..., M), a list over T.
    """
    rows = _block_rows(K)
    parts = [[part if t.dim() < K.dim() else part.unbind(0) for part in t.split(rows, -1)] for t in others]
    return [(K_i, K_i.transpose(-1, -2), *rest) for K_i, *rest in zip(K.split(rows, -2), *parts)]


def _forward_loop(K: Tensor, mu: Tensor, nu: Tensor, a: Tensor, b: Tensor) -> None:
    """Write all iterates a (T, ..., M) and b (T + 1, ..., N)."""
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
    """Write w_u (T, ..., M) and w_v (T, ..., N) of `gradient`, from the last w_v and the direct gradient of u."""
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


class _Captured(NamedTuple):
    inputs: List[Tensor]
    outputs: List[Tensor]
    replay: Callable[[], None]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(t.numel() * t.element_size() for t in (*self.inputs, *self.outputs))


_lock = threading.RLock()  # DataParallel has a thread for each GPU
_captured: OrderedDict[tuple, _Captured] = collections.OrderedDict()


def _run(loop: Callable[..., None], inputs: List[Tensor], outputs: List[Tensor], recurs: bool) -> None:
    """Call `loop(*inputs, *outputs)`, which writes the outputs.

    On a GPU, if shapes recur, it is captured once for these shapes and replayed: a capture takes as long as several
    calls.
    """
    device = inputs[0].device
    if inputs[0].dim() == 2 or not (recurs and can_capture(device)):
        loop(*inputs, *outputs)
        return
    tensors = [*inputs, *outputs]
    key = (loop.__name__, device, *((t.shape, t.dtype) for t in tensors))
    with _lock:
        if key in _captured:
            graph = _captured[key]
            _copy(inputs, graph.inputs)
            graph.replay()
        else:
            _evict()
            graph = _captured[key] = _capture(loop, inputs, outputs)
        _captured.move_to_end(key)
        _copy(graph.outputs, outputs)


def _evict() -> None:
    """Drop graphs before a new one; a loop and its gradient are kept at any size."""
    while len(_captured) >= MAX_GRAPHS or (
        len(_captured) > 1 and sum(kept.size for kept in _captured.values()) > GRAPH_BYTES
    ):
        _captured.popitem(last=False)


def _capture(loop: Callable[..., None], inputs: List[Tensor], outputs: List[Tensor]) -> _Captured:
    with torch.inference_mode(False):  # the memory is overwritten outside of inference mode
        fixed = [empty_aligned(t) for t in (*inputs, *outputs)]
    _copy(inputs, fixed)
    replay = capture_cuda_graph(lambda: loop(*fixed), inputs[0].device)
    return _Captured(fixed[: len(inputs)], fixed[len(inputs) :], replay)


def _copy(sources: List[Tensor], targets: List[Tensor]) -> None:
    for source, target in zip(sources, targets):
        target.copy_(source)


def _run_each(loop: Callable[..., None], inputs: List[Tensor], outputs: List[Tensor], recurs: bool, pairs: int) -> None:
    """`_run` for chunks of `pairs`; 0: all at once.

    inputs: the kernel (B, M, N), then (..., B, M) or (..., B, N) as the outputs.
    """
    count = len(inputs[0])
    if not 0 < pairs < count or inputs[0].dim() == 2:
        _run(loop, inputs, outputs, recurs)
        return
    parts = [inputs[0].split(pairs), *(t.split(pairs, -2) for t in (*inputs[1:], *outputs))]
    for chunk in zip(*parts):
        _run(loop, list(chunk[: len(inputs)]), list(chunk[len(inputs) :]), recurs)


def iterate(
    Z: Tensor, mu: Tensor, nu: Tensor, iterations: int, recurs: bool, pairs: int = 0
) -> Tuple[Tensor, Tensor, Tensor]:
    """All iterates a (T, ..., M), b (T + 1, ..., N) and the row maxima r (..., M).

    recurs, pairs: see `_run_each`.
    """
    K, r = _kernel(Z)
    a = Z.new_empty((iterations, *mu.shape))
    b = Z.new_empty((iterations + 1, *nu.shape))
    _run_each(_forward_loop, [K, mu, nu], [a, b], recurs, pairs)
    return a, b, r


def largest(iterates: Tensor) -> Tensor:
    """(...) maximum of each pair over all of its iterates (T, ..., M)."""
    return iterates.amax((0, -1))


def gradient(Z: Tensor, mu: Tensor, nu: Tensor, a: Tensor, b: Tensor, grad: Tensor, pairs: int = 0) -> Tensor:
    """Gradient with respect to Z of <grad, log P>, exact for the unrolled iterations. pairs: see `_run_each`.

    With w_v = (gradient of v_t) b_t / nu and w_u = (gradient of u_t) a_t / mu, each computed from the next one,
    the gradient is grad - K o sum_t (a_t w_v^T + w_u b_{t-1}^T). The same holds for s a and b / s: with equal maxima,
    their squares stay in the range of float32, which the square of a leaves if a score leads by 45.
    """
    K, _ = _kernel(Z)
    s = torch.sqrt(largest(b) / largest(a)).unsqueeze(-1)
    a, b = a * s, b / s
    inverse_mu, inverse_nu = ((1 / mass).masked_fill_(mass == 0, 0.0) for mass in (mu, nu))
    down, back = a.square() * -inverse_mu, b.square() * -inverse_nu
    from_u, from_v = torch.empty_like(a), torch.empty_like(b[1:])
    start = grad.sum(-2) * b[-1] * inverse_nu
    direct = grad.sum(-1) * a[-1] * inverse_mu
    _run_each(_backward_loop, [K, down, back, start, direct], [from_u, from_v], True, pairs)
    # (..., M, 2T) times (..., 2T, N)
    left, right = torch.cat([a, from_u]).movedim(0, -1), torch.cat([from_v, b[:-1]]).movedim(0, -2)
    product = (left @ right).mul_(K)
    return torch.sub(grad, product, out=product)
