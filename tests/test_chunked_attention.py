"""Attention for a torch without a fused kernel: the plain formula, its gradient, and what it keeps."""

from __future__ import annotations

import math

import pytest
import torch

from superglue_sift.network import chunked_attention

pytestmark = pytest.mark.cu111


def plain(q, k, v, mask):
    logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    return logits.softmax(-1) @ v


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 3, 17, 8), (2, 3, 13, 8), (2, 3, 13, 8)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("most", [1, 5 * 6 * 13, 1 << 26])  # one query at a time, five, all
def test_values_and_gradients_are_those_of_the_formula(monkeypatch, masked, most):
    monkeypatch.setattr(chunked_attention, "MAX_WEIGHTS", most)
    mask = (torch.arange(13) < torch.tensor([[9], [13]]))[:, None, None] if masked else None
    answers = []
    for form in (plain, chunked_attention.attention):
        q, k, v = inputs()
        out = form(q, k, v, mask)
        (out * torch.arange(8.0)).sum().backward()
        answers.append((out, q.grad, k.grad, v.grad))
    for expected, found in zip(*answers):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_half_precision_is_near_the_same(monkeypatch):
    q, k, v = inputs(torch.bfloat16)
    out = chunked_attention.attention(q, k, v)
    out.float().square().sum().backward()
    assert out.dtype == q.grad.dtype == torch.bfloat16
    expected = plain(*(t.detach().double() for t in (q, k, v)), None)
    # three roundings to 8 bits, of weights, products and result; how torch 1.10 adds them depends on the processor
    assert float((out.detach().double() - expected).abs().max()) < 3 * 2**-8 * float(v.detach().abs().max())


def test_nothing_of_the_size_of_the_weights_is_kept():
    q, k, v = (torch.randn(1, 2, 64, 8, requires_grad=True) for _ in range(3))
    kept = []

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        chunked_attention.attention(q, k, v)
    assert kept and max(kept) == q.numel() < 2 * 64 * 64
