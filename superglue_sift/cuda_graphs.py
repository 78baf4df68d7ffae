"""CUDA graphs: many small kernels, launched as one."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Callable, Dict, List

import torch

from superglue_sift.torch_compat import can_compile


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
