"""CUDA graphs: launch many small kernels as one."""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any, Callable, Dict, Iterator, List, Optional

import torch

from superglue_sift.torch_compat import can_compile


class SharedMemory:
    """Memory and stream of several graphs that are never replayed at the same time and are deleted together.

    Only what outlives a `work` is kept for each. The largest graph should be captured first.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = _own_stream(device)
        weakref.finalize(self, _free_streams[device].append, self.stream)
        self.pool: Any = torch.cuda.graph_pool_handle()


def capture_cuda_graph(
    work: Callable[[], None], device: torch.device, memory: Optional[SharedMemory] = None
) -> Callable[[], None]:
    """Run `work` and capture it as a CUDA graph; returns a function that replays it on the same memory.

    `work` must not synchronise with the host, and must use the same memory each time. Returns `work` itself on a CPU,
    and with torch 1.10, where no other thread may allocate memory during a capture. memory: None: the graph's own.
    """
    if not can_capture(device):
        work()
        return work
    with _capturing, torch.cuda.device(device), _one_capture() if memory else contextlib.nullcontext():
        stream = memory.stream if memory else _own_stream(device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()  # warm-up: the setup of libraries cannot be captured
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        pool = memory.pool if memory else None
        if not memory:
            weakref.finalize(graph, _free_streams[device].append, stream)
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            work()
        graph.replay()
    return graph.replay


_capturing = threading.RLock()  # DataParallel has a thread for each GPU
_within: List[bool] = []  # not empty during a capture into shared memory; autograd's threads read it


@contextlib.contextmanager
def _one_capture() -> Iterator[None]:
    """Nothing is captured on its own inside, not even in the warm-up, which runs what the graph will."""
    _within.append(True)
    try:
        yield
    finally:
        _within.pop()


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
    return device.type == "cuda" and can_compile() and not (_within or torch.cuda.is_current_stream_capturing())
