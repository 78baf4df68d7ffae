"""Hide differences between versions of torch, and between processors, in one function each.

Stack "cu111" is Python 3.9 with torch 1.10. Stack "modern" is Python 3.11 with torch 2.x. No other
code checks the version of torch. The functions at the end are for training.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import shutil
from typing import Any, Callable, ContextManager, Dict, List, Optional

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn

from superglue_sift.environment import CPU_INFO

# Maximum number of weights of attention at a time, 256 MiB in float32
MAX_WEIGHTS = 1 << 26


def compute_attention(q: Tensor, k: Tensor, v: Tensor, visible: Optional[Tensor]) -> Tensor:
    """Compute softmax(q k^T / sqrt(d)) v without storing the weights (SuperGlue, equation 4).

    Args:
        q: queries, (B, H, M, d).
        k: keys, (B, H, N, d).
        v: values, (B, H, N, d).
        visible: (B, 1, 1, N) bool, True for keys to attend to. If None, attend to all keys.

    Returns:
        (B, H, M, d).
    """
    if not hasattr(nn.functional, "scaled_dot_product_attention"):
        # torch 1.10 has no kernel for attention.
        return _compute_attention_in_chunks(q, k, v, visible)
    if visible is not None and is_traced():
        # The kernel adds this mask. With a bool mask, ONNX would also test all weights for nan,
        # which takes half of the time of a pair.
        visible = torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, -math.inf)
    with _disable_cudnn() if q.is_cuda else contextlib.nullcontext():
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)


def _disable_cudnn() -> ContextManager[Any]:
    """Return a context without cuDNN, which takes 70 ms on an H100 to plan each new shape."""
    try:
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        # torch 2.2 or older
        return contextlib.nullcontext()
    return sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    )


def _compute_attention_in_chunks(
    q: Tensor, k: Tensor, v: Tensor, visible: Optional[Tensor]
) -> Tensor:
    """Compute attention for chunks of queries one by one, and once more for the gradient."""
    # Take as many queries at a time as have at most MAX_WEIGHTS weights.
    rows = max(MAX_WEIGHTS // max(q.shape[0] * q.shape[1] * k.shape[2], 1), 1)
    attend: Callable[..., Any] = _multiply_by_attention
    if torch.is_grad_enabled():
        attend = functools.partial(
            torch_checkpoint.checkpoint, _multiply_by_attention, preserve_rng_state=False
        )
    return torch.cat([attend(chunk, k, v, visible) for chunk in q.split(rows, 2)], 2)


def _multiply_by_attention(q: Tensor, k: Tensor, v: Tensor, visible: Optional[Tensor]) -> Tensor:
    """Compute attention by matrix products, with the softmax in float32 or wider."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    logits = (q @ k.transpose(-1, -2)).to(dtype) / math.sqrt(q.shape[-1])
    if visible is not None:
        logits = logits.masked_fill(~visible, -math.inf)
    return logits.softmax(-1).to(q.dtype) @ v


def can_compile() -> bool:
    """Return whether torch can compile a module in place (2.x)."""
    return hasattr(torch.nn.Module, "compile")


class _WideLayerNorm(nn.LayerNorm):
    """LayerNorm for torch 1.10, which cannot mix bfloat16 and float32 on a CPU under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x in the dtype of the weights."""
        return super().forward(x.to(self.weight.dtype))


LayerNorm = nn.LayerNorm if can_compile() else _WideLayerNorm


def describe_missing_compiler(device_type: str) -> str:
    """Return why `torch.compile` cannot run on "cpu" or "cuda" here, or "" if it can.

    torch 2 needs a C++ compiler, and on a GPU a C compiler.
    """
    if not can_compile():
        return "this torch has no compiler"
    on_gpu = device_type == "cuda"
    if " " in torch.__file__ and not on_gpu:
        return "torch is in a folder whose path has a space, where its compiler cannot link"
    names = ("cc", "gcc", "clang") if on_gpu else ("g++", "clang++")
    compiler = os.environ.get("CC" if on_gpu else "CXX", names[0])
    if any(shutil.which(name) for name in (compiler, *names)):
        return ""
    return f"there is no C{'' if on_gpu else '++'} compiler ({' or '.join(names[-2:])})"


# Return whether `torch.compile` or `torch.export` is reading the code (torch 2.1 or newer).
is_traced: Callable[[], bool] = getattr(
    getattr(torch, "compiler", None), "is_compiling", lambda: False
)


def can_export() -> bool:
    """Return whether torch can export a network with dynamic shapes (2.5 or newer)."""
    return hasattr(getattr(getattr(torch, "export", None), "Dim", None), "AUTO")


def sqrt(x: Tensor) -> Tensor:
    """Compute the square root of float32 (...), with the same bytes on every processor.

    The error is at most 1.5 units of the last place. On CPUs `Tensor.sqrt` calls MKL, which begins
    with an instruction (RSQRTPS) that Intel and AMD round differently.
    """
    # The root of 0 is 1 / inf.
    return x.sqrt() if x.is_cuda else x.rsqrt().reciprocal()


def checkpoint_gradients(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Call `function(*arguments)` with gradient checkpointing.

    What the function computes on the way is not kept for the gradient, but computed again, within
    the one backward pass that DistributedDataParallel allows. The state of random generators is not
    kept, because the network draws no numbers and a CUDA graph cannot read the state.
    """
    if not can_compile():
        return _checkpoint_gradients_by_hooks(function, *arguments)
    return torch_checkpoint.checkpoint(
        function, *arguments, preserve_rng_state=False, use_reentrant=False
    )


def _checkpoint_gradients_by_hooks(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Checkpoint gradients by hooks of saved tensors, for torch 1.10.

    The form of torch 1.10 itself would run a second backward pass inside the first.
    """
    # The first forward pass saves numbers in place of tensors. The backward pass asks for the
    # tensor of a number, and a second forward pass computes all tensors again.
    numbers = itertools.count()
    # The tensors that the second forward pass saves, in the same order
    saved: List[Tensor] = []

    def unpack(number: int) -> Tensor:
        """Return a saved tensor. The first call runs the function once more."""
        if not saved:
            save_tensors = torch.autograd.graph.saved_tensors_hooks(
                lambda tensor: saved.append(tensor.detach()),
                lambda _: torch.empty(0, dtype=torch.float32, device="cpu"),  # Nothing reads it.
            )
            with torch.enable_grad(), save_tensors:
                function(*arguments)
        return saved[number]

    with torch.autograd.graph.saved_tensors_hooks(lambda _: next(numbers), unpack):
        return function(*arguments)


# --- what the training needs


def make_grad_scaler(enabled: bool):
    """Create the scaler of the loss for float16. If not `enabled`, it does nothing.

    The class moved to `torch.amp` in torch 2.3, which torch 1.10 does not have.
    """
    if hasattr(getattr(torch, "amp", torch), "GradScaler"):
        return torch.amp.GradScaler("cuda", enabled=enabled)
    return torch.cuda.amp.GradScaler(enabled=enabled)


def get_fused_adam_options() -> Dict[str, bool]:
    """Return the options with which `torch.optim.Adam` updates all parameters in one pass.

    One pass takes a quarter of the time. torch 1.10 has no such option.
    """
    return {"fused": True} if can_compile() else {}


def restore_optimizer_value(name: str, value: Tensor) -> Any:
    """Return a value of an optimizer's state as `torch.optim` expects it.

    The step of Adam is a number in torch 1.10, and a tensor in later versions.
    """
    return value if name != "step" or can_compile() else value.item()


def interpolate_in_place(values: List[Tensor], targets: List[Tensor], weight: float) -> None:
    """Move each tensor of `values` towards its target by a part of the way (`weight`), in place.

    This is one launch on a GPU. torch 1.10 needs one launch for each tensor.
    """
    foreach = getattr(torch, "_foreach_lerp_", None)
    if foreach is not None:
        foreach(values, targets, weight)
        return
    for value, target in zip(values, targets):
        value.lerp_(target, weight)


def choose_backend(device_type: str) -> str:
    """Return the backend of torch.distributed: NCCL for GPU tensors, gloo for the rest.

    torch 1.10 allows only one backend.
    """
    if device_type != "cuda":
        return "gloo"
    # torch 2 takes one backend for each type of device.
    return "cpu:gloo,cuda:nccl" if can_compile() else "nccl"


def abort_nccl(group: Any) -> None:
    """End the communication of a process group by NCCL, where torch has a function for it."""
    if hasattr(group, "_get_backend"):
        nccl = group._get_backend(torch.device("cuda"))
        if hasattr(nccl, "abort"):
            nccl.abort()


def has_amx() -> bool:
    """Return whether torch can use matrix units of this CPU for bfloat16. torch 1.10 cannot."""
    return can_compile() and CPU_INFO.is_file() and "amx_bf16" in CPU_INFO.read_text()


def name_dali_package() -> str:
    """Return what `pip install` needs for NVIDIA DALI.

    Versions of `nvidia-dali-cuda110` after 1.34.0 only fetch a wheel from NVIDIA's own index.
    """
    return "nvidia-dali-cuda130==2.4.0" if can_compile() else "nvidia-dali-cuda110==1.34.0"
