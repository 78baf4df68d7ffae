"""CUDA graphs: launch many small kernels as one."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Callable, Dict, List

import torch

from superglue_sift.torch_compat import can_compile


def capture_cuda_graph(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Run `work` and capture it as a CUDA graph; returns a function that replays it on the same memory.

    `work` must not synchronise with the host, and must use the same memory each time. Returns `work` itself on a CPU,
    and with torch 1.10, where no other thread may allocate memory during a capture.
    """
    if not can_capture(device):
        work()
        return work
    with _capturing, torch.cuda.device(device):
        stream = _own_stream(device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()  # warm-up: the setup of libraries cannot be captured
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        weakref.finalize(graph, _free_streams[device].append, stream)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            work()
        graph.replay()
    return graph.replay


_capturing = threading.RLock()  # DataParallel has a thread for each GPU
_free_streams: Dict[torch.device, List[Any]] = {}


def _own_stream(device: torch.device) -> Any:
    """A stream on which no other existing graph was captured.

    If two graphs share a stream, as by default, deleting one frees the cuBLAS workspace of the other.
    """
    if device not in _free_streams:
        _free_streams[device] = [torch.cuda.Stream(device) for _ in range(32)]  # all that torch has
    free = _free_streams[device]
    return free.pop() if free else torch.cuda.Stream(device)


def can_capture(device: torch.device) -> bool:
    """Whether `capture_cuda_graph` captures here; not within another capture."""
    return device.type == "cuda" and can_compile() and not torch.cuda.is_current_stream_capturing()
