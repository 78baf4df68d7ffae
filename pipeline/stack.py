"""Differences between the two software stacks, one function each, with the reason beside it.

Stack "cu111": Python 3.9 + torch 1.10. Stack "modern": Python 3.11 + torch 2.x. Nothing else in the
project asks for a version.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from typing import Any, Callable, Dict, List, Optional

import torch
from torch import Tensor, nn

from pipeline.errors import RequestError


def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor] = None) -> Tensor:
    """softmax(q k^T / sqrt(d)) v over the last two axes; `mask` is True where a key may be seen.

    torch 1.10 has no fused kernel (`F.scaled_dot_product_attention` came with 2.0): the plain formula serves.
    """
    if has_fused_attention():
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    logits = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    return logits.softmax(-1) @ v


def has_fused_attention() -> bool:
    """Is there a kernel that never holds the weights of a whole batch (torch 2.0)?"""
    return hasattr(torch.nn.functional, "scaled_dot_product_attention")


def has_packed_attention(q: Tensor) -> bool:
    """Is there a fused kernel for packed sequences of any lengths (torch 2.10, Ampere or newer, half precision)?"""
    fits = q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and q.dtype in (torch.float16, torch.bfloat16)
    return (
        fits and q.is_cuda and torch.cuda.get_device_capability(q.device) >= (8, 0) and _varlen() is not None
    )


def _varlen() -> Optional[Callable[..., Tensor]]:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, partner_starts: Tensor, longest: int
) -> Tensor:
    """Attention of packed sequences; where `has_packed_attention`.

    Args:
        q (S, H, d), k and v (S', H, d); starts, partner_starts: (B + 1,) int32, where each sequence begins.
        longest: at least the length of the longest sequence.
    """
    return _varlen()(q, k, v, starts, partner_starts, longest, longest)


def recorded(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """`work` recorded as a CUDA graph: call the result to do it again on the same memory, in one launch.

    `work` is called now as well. It must neither make the host wait nor read other memory each time.

    torch 1.10 records too, but then no other thread may ask for memory meanwhile, such as the loader's: there, as on a
    CPU, the work itself is returned.
    """
    if not can_record(device):
        work()
        return work
    with _recording, torch.cuda.device(device):
        stream = _own_stream(device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()  # what libraries set up at a first call cannot be recorded
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        weakref.finalize(graph, _free_streams[device].append, stream)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            work()
        graph.replay()
    return graph.replay


_recording = threading.RLock()  # DataParallel has a thread for each GPU
_free_streams: Dict[torch.device, List[Any]] = {}


def _own_stream(device: torch.device) -> Any:
    """A stream that no other living graph was recorded on.

    Where two share one, as all do by default, the end of one takes the workspace of cuBLAS from the other.
    """
    if device not in _free_streams:
        _free_streams[device] = [torch.cuda.Stream(device) for _ in range(32)]  # torch has no more than these
    free = _free_streams[device]
    return free.pop() if free else torch.cuda.Stream(device)


def can_record(device: torch.device) -> bool:
    """Does `recorded` record here? Not within another recording."""
    return device.type == "cuda" and can_compile() and not torch.cuda.is_current_stream_capturing()


def softmax_(logits: Tensor) -> None:
    """Softmax over the last axis, in place; torch 1.10 has no form that is told where to write."""
    if has_fused_attention():
        torch.softmax(logits, -1, out=logits)
    else:
        logits.copy_(logits.softmax(-1))


def softmax_gradient_(grad: Tensor, weights: Tensor) -> None:
    """Gradient of what `weights` = softmax(., -1) was taken of, in place of `grad`, that of the weights.

    torch 1.10 wants to see a tensor of the input's element type, later versions name the type.
    """
    if has_fused_attention():
        torch._softmax_backward_data(grad, weights, -1, weights.dtype, grad_input=grad)
    else:
        grad.copy_(torch._softmax_backward_data(grad, weights, -1, weights))


def exact_float32() -> None:
    """Products of float32 in float32, not TF32: scores reach 40, where TF32 errs by 0.02. Later versions begin so."""
    torch.backends.cuda.matmul.allow_tf32 = False


def no_autocast(device_type: str):
    """A context in which nothing is cast down.

    torch 1.10's `autocast` for the CPU accepts bfloat16 alone and only there needs naming it.
    """
    if device_type == "cpu":
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=False)
    return torch.autocast(device_type, enabled=False)


def autocast(device_type: str, precision: str):
    """Mixed precision for `precision` in float32 (nothing happens), bfloat16, float16."""
    if precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype=getattr(torch, precision))


class _WideLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def layer_norm(channels: int) -> nn.LayerNorm:
    """LayerNorm of (..., channels), also under `autocast`.

    torch 1.10 takes no bfloat16 beside float32 weights on the CPU; like its own autocast on a GPU, it is then computed
    and handed on in float32.
    """
    return nn.LayerNorm(channels) if can_compile() else _WideLayerNorm(channels)


def inference_mode():
    """`torch.inference_mode` on both stacks (torch 1.10 has it; named here so that a change has one home)."""
    return torch.inference_mode()


def can_compile() -> bool:
    """Does this torch have a compiler that works on a module in place? torch 1.10 has none."""
    return hasattr(torch.nn.Module, "compile")


def grad_scaler(enabled: bool):
    """Loss scaling for float16; moved from `torch.cuda.amp` to `torch.amp` in torch 2.3."""
    if hasattr(torch.amp if hasattr(torch, "amp") else torch, "GradScaler"):
        return torch.amp.GradScaler("cuda", enabled=enabled)
    return torch.cuda.amp.GradScaler(enabled=enabled)


def fused_adam() -> Dict[str, bool]:
    """Options of Adam for one pass over all parameters, a quarter of the time; torch 1.10 has no such form."""
    return {"fused": True} if can_compile() else {}


def floats_of_bytes(data: Tensor) -> Tensor:
    """uint8 (..., 4 k) read as little-endian float32 (..., k).

    torch 1.10's `view` cannot change the size of an element: there the bytes are put together as integers.
    """
    if hasattr(torch.Tensor, "untyped_storage"):
        return data.view(torch.float32)
    return join_bytes(data)


def join_bytes(data: Tensor) -> Tensor:
    """`floats_of_bytes` by integer arithmetic."""
    parts = data.reshape(*data.shape[:-1], data.shape[-1] // 4, 4).to(torch.int32)
    words = parts[..., 0] | (parts[..., 1] << 8) | (parts[..., 2] << 16) | (parts[..., 3] << 24)
    return words.view(torch.float32)


def recomputed(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """`function(*arguments)` whose inner tensors are computed again for the backward pass (gradient checkpointing).

    torch 1.10 has only the reentrant form, which later versions advise against.
    """
    from torch.utils.checkpoint import checkpoint

    if can_compile():
        return checkpoint(function, *arguments, use_reentrant=False)
    return checkpoint(function, *arguments)


def own_address(address: str, config: type, agent: Any) -> List[str]:
    """torchrun's option for the address by which other nodes reach this one; "": none, its host name serves.

    torch 1.10's torchrun has no such option (nor its class `config`, LaunchConfig): there its module `agent` is told
    another name for this host.
    """
    if not address:
        return []
    if hasattr(config, "local_addr"):
        return [f"--local_addr={address}"]
    agent._get_fq_hostname = lambda: address
    return []


def dali_package() -> str:
    """The pip requirement of NVIDIA DALI.

    The cuda110 packages after 1.34.0 are stubs that fetch the wheel from NVIDIA's own index.
    """
    return "nvidia-dali-cuda130==2.4.0" if can_compile() else "nvidia-dali-cuda110==1.34.0"


def without_dali(asked: str, instead: str) -> RequestError:
    """The error of a request for DALI where it is not installed."""
    key = asked.split(" ")[0]
    return RequestError(
        f"{asked}: NVIDIA DALI is not installed; `pip install {dali_package()}`, or set {key}: {instead}"
    )
