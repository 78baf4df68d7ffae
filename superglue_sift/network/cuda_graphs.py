"""CUDA graphs: many small kernels, launched as one."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Callable, Dict, List

import torch

from superglue_sift.torch_compat import can_compile


def capture_cuda_graph(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """`work` captured as a CUDA graph: the result replays it on the same memory, in one launch.

    `work` is called now as well. It must not synchronise with the host, and must use the same memory each time.

    torch 1.10 captures too, but then no other thread, such as the loader's, may allocate memory meanwhile: there, as on
    a CPU, `work` itself is returned.
    """
    if not can_capture(device):
        work()
        return work
    with _capturing, torch.cuda.device(device):
        stream = _own_stream(device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()  # what libraries set up at a first call cannot be captured
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
    """A stream that no other living graph was captured on.

    Where two share one, as all do by default, the end of one takes the workspace of cuBLAS from the other.
    """
    if device not in _free_streams:
        _free_streams[device] = [torch.cuda.Stream(device) for _ in range(32)]  # torch has no more than these
    free = _free_streams[device]
    return free.pop() if free else torch.cuda.Stream(device)


def can_capture(device: torch.device) -> bool:
    """Does `capture_cuda_graph` capture here? Not within another capture."""
    return device.type == "cuda" and can_compile() and not torch.cuda.is_current_stream_capturing()
