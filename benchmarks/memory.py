"""Peak memory of a piece of work, alone in a fresh process (CPU) or by the allocator's own count (CUDA)."""

from __future__ import annotations

import gc
import multiprocessing
from typing import Any, Callable

import torch

MIB = 1 << 20


def peak_mib(work: Callable[..., Callable[[], object]], device: str, *arguments: Any) -> float:
    """MiB by which one call raises the memory in use at its peak.

    Args:
        work: a module-level function; `work(device, *arguments)` prepares and returns the call to be measured.
    """
    context = multiprocessing.get_context("spawn")
    ends = context.SimpleQueue()
    process = context.Process(target=_measure, args=(ends, work, device, arguments))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the measuring process ended with {process.exitcode}")
    return ends.get()


def _measure(ends: Any, work: Any, device: str, arguments: Any) -> None:
    torch.set_num_threads(1)
    call = work(device, *arguments)
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        ends.put((torch.cuda.max_memory_allocated() - before) / MIB)
        return
    _reset_peak()
    before = _kib("VmRSS")
    call()
    ends.put((_kib("VmHWM") - before) / 1024)


def _reset_peak() -> None:
    """Reset the high-water mark to the resident memory (Linux)."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _kib(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name))
