"""Multi-head attention between ragged sets of keypoints (SuperGlue, section 3.1, equations 3 to 5)."""

from __future__ import annotations

import math
from typing import Any, Iterable, List, NamedTuple, Optional, Sequence

import torch
from torch import Tensor, nn

from superglue_sift import torch_compat
from superglue_sift.network.chunked_attention import scaled_dot_product_attention
from superglue_sift.network.packing import Edges, Group, kernel_length
from superglue_sift.torch_compat import no_autocast

# Maximum attention weights, before padding, that the gradient on a CPU holds: those of several short sequences.
MAX_SCRATCH = 1 << 22

SPREAD = 2.0  # initial standard deviation of the frequencies of rotary positions, radians over half an image


def rotated(vectors: Tensor, rotation: Tensor) -> Tensor:
    """Rotate vectors (..., d): entries i and i + d / 2 are a point of the plane; keeps the dtype.

    rotation: cos and sin of the angles, (2, ..., d / 2), broadcast.
    """
    a, b = vectors.chunk(2, -1)
    cos, sin = rotation.to(vectors.dtype).unbind(0)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class RotaryPositions(nn.Module):
    """Rotary embedding of 2-D positions, with learned frequencies (Su et al. 2021; LightGlue, section 3.1).

    Inner products of rotated queries and keys depend on the relative positions of keypoints.
    """

    def __init__(self, channels: int) -> None:
        """channels: d of each head, even."""
        super().__init__()
        if channels % 2:
            raise ValueError(f"rotary positions need an even number of channels per head, not {channels}")
        self.frequencies = nn.Parameter(SPREAD * torch.randn(2, channels // 2))

    def forward(self, positions: Tensor) -> Tensor:
        """positions (..., 2) of order one -> cos and sin (2, ..., d / 2), for `rotated`."""
        angles = positions @ self.frequencies
        return torch.stack([angles.cos(), angles.sin()])


def ragged_attention(heads: Tensor, edges: Any, rotation: Optional[Tensor] = None) -> Tensor:
    """Attention of each sequence to its partner sequence; other images have no weight.

    Args:
        heads: (S, 3, H, d) query, key and value of packed tokens, for H heads.
        edges: `Edges`, or an object with an `attention` method (`onnx`).
        rotation: of queries and keys, (2, S, d / 2), see `rotated`.

    Returns:
        (S, H, d). A sequence whose partner is empty receives zeros.
    """
    if rotation is not None:
        heads = torch.cat([rotated(heads[:, :2], rotation[:, :, None, None]), heads[:, 2:]], 1)
    if not isinstance(edges, Edges):
        return edges.attention(heads)
    if not edges.partner:
        return heads[:, 0]
    learns = torch.is_grad_enabled() and heads.requires_grad
    if learns and heads.device.type == "cpu" and heads.dtype == torch.bfloat16:
        return _WithOwnGradient.apply(heads, edges)
    return _fused(heads, edges)


def _fused(heads: Tensor, edges: Edges) -> Tensor:
    """`ragged_attention` with torch's kernels, in the fastest form for the sequences and the device."""
    on_cpu = heads.device.type == "cpu"
    if edges.packing.full and (torch_compat.has_fused_attention() or not on_cpu):
        return _padded(heads, edges)
    if on_cpu:
        return _one_by_one(heads, edges)
    return in_one_call(heads, edges)


def in_one_call(heads: Tensor, edges: Any) -> Tensor:
    """`ragged_attention` of all sequences at once. edges: `Edges`, or with the attributes read here."""
    return _packed(heads, edges) if torch_compat.has_packed_attention(heads) else _padded(heads, edges)


def _one_by_one(heads: Tensor, edges: Edges) -> Tensor:
    """One call per sequence, without padding or masks; launches are cheap on a CPU."""
    queries, keys, values = (t.split(edges.packing.counts) for t in heads.unbind(1))
    messages = []
    for i, j in enumerate(edges.partner):
        if len(queries[i]) == 0 or len(keys[j]) == 0:
            messages.append(torch.zeros_like(queries[i]))
            continue
        # (1, H, n, d) without a copy; the result is (n, H, d) in memory
        inputs = (t.transpose(0, 1).unsqueeze(0) for t in (queries[i], keys[j], values[j]))
        form = _of_few_shapes if heads.dtype == torch.bfloat16 else scaled_dot_product_attention
        messages.append(form(*inputs).squeeze(0).transpose(0, 1))
    return torch.cat(messages)


def _of_few_shapes(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of n queries (1, H, n, d) to m keys, both padded to `kernel_length`.

    In bfloat16 torch compiles a kernel for each new shape and keeps it: ragged views would take ever more memory.
    """
    n, m = query.shape[2], key.shape[2]
    N, M = kernel_length(n), kernel_length(m)
    query, key, value = (
        nn.functional.pad(t, (0, 0, 0, more)) for t, more in ((query, N - n), (key, M - m), (value, M - m))
    )
    visible = (torch.arange(M) < m)[None, None, None] if m < M else None
    return scaled_dot_product_attention(query, key, value, visible)[:, :, :n]


class _WithOwnGradient(torch.autograd.Function):
    """`_fused` with a backward pass of plain products and recomputed weights.

    On a CPU, the backward pass of the fused kernel is slower in bfloat16 than in float32, while plain products use the
    matrix units (docs/performance.md). For each new shape of a product oneDNN compiles a kernel, which takes as long as
    eight products; therefore sequences are padded to few lengths.
    """

    @staticmethod
    def forward(ctx, heads: Tensor, edges: Edges) -> Tensor:
        ctx.save_for_backward(heads)
        ctx.edges = edges
        return _fused(heads, edges)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (heads,), edges = ctx.saved_tensors, ctx.edges
        d_heads = torch.empty_like(heads)
        groups = list(edges.groups(MAX_SCRATCH // heads.shape[2]))
        # one buffer for all groups, which stays in the cache
        sizes = [group.number * math.prod(map(kernel_length, group.lengths)) for group in groups]
        scratch = heads.new_empty((2, heads.shape[2] * max(sizes)))
        with no_autocast("cpu"):
            for group in groups:
                own, others = group.own, group.others
                inputs = heads[own, 0], heads[others, 1], heads[others, 2], grad[own]
                outputs = d_heads[own, 0], d_heads[others, 1], d_heads[others, 2]
                _write_gradient(inputs, outputs, group, scratch)
        return d_heads, None


def _write_gradient(inputs: Sequence[Tensor], outputs: Sequence[Tensor], group: Group, scratch: Tensor) -> None:
    """Write the gradient of attention of a group of sequences of n tokens to as many of m tokens.

    Args:
        inputs: q (number n, H, d), k, v (number m, H, d) and the gradient of the message, as q.
        outputs: for the gradients of q, k and v.
        scratch: (2, at least the number of padded weights), overwritten.
    """
    n, m = group.lengths
    if 0 in (n, m):
        for t in outputs:
            t.zero_()
        return
    q, k, v, grad = (_padded_copy(t, group.number) for t in inputs)
    shape = (len(q), q.shape[1], k.shape[1])
    weights, d_logits = (part[: math.prod(shape)].view(shape) for part in scratch)
    scale = 1 / math.sqrt(q.shape[-1])
    k.mul_(scale)
    torch.bmm(q, k.transpose(1, 2), out=weights)[..., m:] = -math.inf
    torch_compat.softmax_(weights)
    d_v = torch.bmm(weights.transpose(1, 2), grad)
    # of padding all gradients are zero: grad is, and the weights of padded keys are
    torch_compat.softmax_gradient_(torch.bmm(grad, v.transpose(1, 2), out=d_logits), weights)
    d_k = torch.bmm(d_logits.transpose(1, 2), q).mul_(scale)
    d_q = torch.bmm(d_logits, k)
    for output, t, length in zip(outputs, (d_q, d_k, d_v), (n, m, m)):
        heads = t.unflatten(0, (group.number, -1))[:, :, :length].transpose(1, 2)
        output.unflatten(0, (group.number, length)).copy_(heads)


def _padded_copy(tokens: Tensor, number: int) -> Tensor:
    """Tokens (number n, H, d) of sequences of n tokens -> (number H, `kernel_length(n)`, d), the rest zero."""
    n, (H, d) = len(tokens) // number, tokens.shape[1:]
    padded = tokens.new_zeros((number, H, kernel_length(n), d))
    padded[:, :, :n] = tokens.unflatten(0, (number, n)).transpose(1, 2)
    return padded.flatten(0, 1)


def _packed(heads: Tensor, edges: Any) -> Tensor:
    """One call on the packed tokens, for a GPU with a fused kernel for sequences of any length."""
    q, k, v = heads.unbind(1)
    if edges.offset:
        k, v = (_Rolled.apply(t, edges.first_token) for t in (k, v))
    partners = edges.partner_packing
    return torch_compat.packed_attention(q, k, v, edges.packing.starts, partners.starts, edges.packing.width)


def _padded(heads: Tensor, edges: Any) -> Tensor:
    """One padded and masked call for the batch: few launches on a GPU."""
    packing = edges.packing
    queries, keys, values = (t.transpose(1, 2) for t in packing.pad(heads).unbind(2))  # (B, H, N, d)
    if edges.offset:
        keys, values = (_Rolled.apply(t, edges.offset) for t in (keys, values))
    mask = None if packing.full else edges.visible
    return packing.pack(scaled_dot_product_attention(queries, keys, values, mask).transpose(1, 2))


class _Rolled(torch.autograd.Function):
    """Roll rows so that `first` comes first, in one launch; `torch.roll` also copies strided inputs."""

    @staticmethod
    def forward(ctx, rows: Tensor, first: int) -> Tensor:
        ctx.first = first
        return torch.cat([rows[first:], rows[:first]])

    @staticmethod
    def backward(ctx, grad: Tensor):
        first = len(grad) - ctx.first
        return torch.cat([grad[first:], grad[:first]]), None


class Maps(NamedTuple):
    """The linear maps of a `Layer`, H heads of d = D / H.

    heads_weight (3 D, D), heads_bias: query, key and value; own (2 D, D) and message (D, 2 D): the MLP's first map of
    the state and, with the merge of the heads, of the message; bias (2 D,): of both; last_weight (D, 2 D), last_bias.
    """

    heads_weight: Tensor
    heads_bias: Tensor
    own: Tensor
    message: Tensor
    bias: Tensor
    last_weight: Tensor
    last_bias: Tensor


class Update(nn.Sequential):
    """MLP([x, merge(message)]): Linear, norm, ReLU, Linear.

    Fuses the merge into the first Linear by multiplying their weights, and adds the products of the two halves of the
    input instead of concatenating them.
    """

    def forward(self, x: Tensor, message: Tensor, maps: Maps) -> Tensor:
        """x, message (S, D) -> (S, D)."""
        hidden = nn.functional.linear(x, maps.own, maps.bias).addmm_(message, maps.message)
        for module in list(self)[1:-1]:
            hidden = module(hidden)
        return nn.functional.linear(hidden, maps.last_weight, maps.last_bias)


class Layer(nn.Module):
    """One residual update of every keypoint: x <- x + MLP([x, message]) (equation 3)."""

    heads: int
    mlp: Update

    def maps(self) -> Maps:
        """The linear maps for `forward`."""
        raise NotImplementedError

    def forward(self, x: Tensor, edges: Any, rotation: Optional[Tensor] = None, maps: Optional[Maps] = None) -> Tensor:
        """x (S, D) packed -> (S, D), in float32 also under autocast: the residual stream is not rounded.

        edges, rotation: see `ragged_attention`. maps: `self.maps()` or from `maps_of`, if known.
        """
        maps = maps or self.maps()
        state = torch_compat.cast_as_autocast(x.to(maps.own.dtype))
        heads = nn.functional.linear(state, maps.heads_weight, maps.heads_bias)  # (S, 3 D)
        message = ragged_attention(heads.view(x.shape[0], 3, self.heads, x.shape[1] // self.heads), edges, rotation)
        return x + self.mlp(state, message.reshape(x.shape), maps)


class AttentionalLayer(Layer):
    """A trainable layer."""

    def __init__(self, dim: int, heads: int, norm: nn.Module) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim {dim} is not divisible by heads {heads}")
        self.heads = heads
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.merge = nn.Linear(dim, dim)
        self.mlp = Update(nn.Linear(2 * dim, 2 * dim), norm, nn.ReLU(inplace=True), nn.Linear(2 * dim, dim))
        # the layer starts as the identity: the untrained network is then a soft nearest-neighbour matcher
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    @property
    def first(self) -> nn.Linear:
        """The MLP's first map."""
        first = self.mlp[0]
        assert isinstance(first, nn.Linear)
        return first

    @property
    def last(self) -> nn.Linear:
        """The MLP's last map."""
        last = self.mlp[-1]
        assert isinstance(last, nn.Linear)
        return last

    def maps(self) -> Maps:
        """Compute the maps from the weights, with gradients."""
        own, others = self.first.weight.split(self.merge.out_features, dim=1)
        bias = torch.addmv(self.first.bias, others, self.merge.bias)
        heads, last = self.query_key_value, self.last
        return Maps(heads.weight, heads.bias, own, (others @ self.merge.weight).t(), bias, last.weight, last.bias)


def maps_of(layers: Sequence[AttentionalLayer]) -> List[Maps]:
    """`maps()` of layers of equal width, for a GPU: one set of launches and casts for all layers."""

    def stacked(tensors: Iterable[Tensor]) -> Tensor:
        return torch_compat.cast_as_autocast(torch.stack(list(tensors)))

    first = stacked(layer.first.weight for layer in layers)
    own, others = first.split(layers[0].merge.out_features, dim=2)
    merge_weight = stacked(layer.merge.weight for layer in layers)
    merge_bias = stacked(layer.merge.bias for layer in layers).unsqueeze(2)
    bias = torch.baddbmm(stacked(layer.first.bias for layer in layers).unsqueeze(2), others, merge_bias).squeeze(2)
    message = torch.bmm(others, merge_weight).transpose(1, 2)
    heads_weight, heads_bias, last_weight, last_bias = (
        stacked(getattr(getattr(layer, map_), kind) for layer in layers)
        for map_ in ("query_key_value", "last")
        for kind in ("weight", "bias")
    )
    every = (heads_weight, heads_bias, own, message, bias, last_weight, last_bias)
    return [Maps(*maps) for maps in zip(*(t.unbind() for t in every))]
