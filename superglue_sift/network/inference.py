"""Prepare a trained network for matching: compute once what depends only on weights.

Fuses the merge of the heads into the first map of the MLP, and a BatchNorm into the preceding map. For bfloat16 the
layers' weights are cast once instead of in each call; the residual stream, the keypoint encoder, the scores and the
transport stay float32.
"""

from __future__ import annotations

import collections
import copy
from typing import OrderedDict, Tuple

import torch
from torch import Tensor, nn

from superglue_sift.network.attention import AttentionalLayer, Layer, Maps, Update
from superglue_sift.network.cuda_graphs import capture_cuda_graph
from superglue_sift.network.normalization import TokenBatchNorm
from superglue_sift.network.packing import Assignments, Layout
from superglue_sift.network.superglue import SuperGlue

MAX_GRAPHS = 8  # recently used graphs that a CUDAGraphModel keeps
MAX_CAPTURED_KEYPOINTS = 2048  # larger pairs keep a GPU busy, and their graphs take much memory


def fuse_for_inference(model: SuperGlue, precision: str = "float32") -> SuperGlue:
    """A faster copy of `model`, in float32 equal up to rounding. precision: float32, bfloat16 or float16."""
    ready = copy.deepcopy(model).eval().requires_grad_(False)
    dtype = getattr(torch, precision)
    ready.keypoint_encoder = _fuse_encoder(ready.keypoint_encoder)
    for layers in (ready.self_attention, ready.cross_attention):
        for number, layer in enumerate(layers):
            assert isinstance(layer, AttentionalLayer)
            layers[number] = FusedLayer(layer, dtype)
    return ready


class CUDAGraphModel:
    """A network that captures its call of a single pair as a CUDA graph, once for each pair of sizes, and replays it.

    Up to a thousand keypoints, launching the kernels of a pair takes longer than running them. A capture takes as long
    as several calls, so a pair is captured if the previous one had the same sizes: in a video, or if all images have
    the maximum number of keypoints. Other calls go to the network.
    """

    def __init__(self, model: SuperGlue) -> None:
        """model: for inference, as from `fuse_for_inference`."""
        self.model = model
        self._graphs: OrderedDict[tuple, _CapturedModel] = collections.OrderedDict()
        self._last: tuple = ()

    @torch.no_grad()
    def __call__(self, batch) -> Assignments:
        """Same as the network's call; later calls do not overwrite the result."""
        counts = (*batch.counts0.tolist(), *batch.counts1.tolist())
        last, self._last = self._last, (batch.device, counts, batch.records0.shape, batch.records1.shape)
        if len(batch) != 1 or max(counts) > MAX_CAPTURED_KEYPOINTS:
            return self.model(batch)
        graph = self._graphs.pop(self._last, None)
        if graph is not None:
            graph.batch.copy_(batch)
            graph.replay()
        elif last == self._last:
            graph = _CapturedModel(self.model, batch)
        else:
            return self.model(batch)
        self._graphs[self._last] = graph  # last: most recently used
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)
        result, finite = graph.result
        return result.clone() if bool(finite.all()) else self.model(batch)


class _CapturedModel:
    """The network with fixed memory: `replay()` overwrites `result` with the assignment of `batch`."""

    def __init__(self, model: SuperGlue, batch) -> None:
        with torch.inference_mode(False):  # the memory is overwritten outside of inference mode
            self.batch, self.layout = batch.clone(), Layout(batch)
        self.result: Tuple[Assignments, Tensor]

        def work() -> None:
            self.result = model.transport(model.matching_descriptors(self.batch, self.layout), self.layout)

        self.replay = capture_cuda_graph(work, batch.device)


class FusedLayer(Layer):
    """`AttentionalLayer` with its maps computed once, and a BatchNorm multiplied into them."""

    def __init__(self, layer: AttentionalLayer, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = layer.heads
        maps, norm = copy.deepcopy(layer).double().maps(), layer.mlp[1]
        if isinstance(norm, TokenBatchNorm):
            scale, shift = _scale_and_shift(norm)
            own, message, bias = scale[:, None] * maps.own, maps.message * scale, scale * maps.bias + shift
            maps, norm = maps._replace(own=own, message=message, bias=bias), nn.Identity()
        # the linear maps are in buffers
        self.mlp = Update(nn.Identity(), norm.to(dtype), nn.ReLU(inplace=True), nn.Identity())
        for name, value in maps._asdict().items():
            self.register_buffer(name, value.detach().to(dtype).contiguous())

    def maps(self) -> Maps:
        """The maps computed in the constructor."""
        return Maps(*(getattr(self, name) for name in Maps._fields))


def _scale_and_shift(norm: TokenBatchNorm) -> Tuple[Tensor, Tensor]:
    """Scale and shift of each channel by a BatchNorm in evaluation; float64."""
    scale = norm.weight.double() * torch.rsqrt(norm.running_var.double() + norm.eps)
    return scale, norm.bias.double() - norm.running_mean.double() * scale


def _fuse_encoder(encoder: nn.Sequential) -> nn.Sequential:
    for before, norm in zip(list(encoder), list(encoder)[1:]):
        if isinstance(norm, TokenBatchNorm):
            assert isinstance(before, nn.Linear)
            scale, shift = _scale_and_shift(norm)
            before.weight.data.copy_(scale[:, None] * before.weight.double())
            before.bias.data.copy_(scale * before.bias.double() + shift)
    return nn.Sequential(*(module for module in encoder if not isinstance(module, TokenBatchNorm)))
