"""Settings of malloc: for processes that run SIFT, and for training in little memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Dict, Iterator

import cv2

_MIB = 1 << 20
_TUNABLES, _HUGE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _TOP_PAD = -3, -1, -2  # glibc's numbers of its settings


def tune_process() -> None:
    """Keep freed memory and use one OpenCV thread, since several processes use the cores better. Same results."""
    cv2.setNumThreads(1)
    keep_memory()


def keep_memory() -> None:
    """Keep freed memory (glibc only).

    Each SIFT call takes about 70 MB. By default glibc returns them to the system for views of 640x480, which costs
    17,500 page faults, a quarter to a third of the call (docs/data.md).
    """
    _mallopt({_MMAP_THRESHOLD: 32 * _MIB, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 256 * _MIB})


def return_memory() -> None:
    """Return freed blocks of 1 MiB and more to the system (glibc only).

    For `--checkpoint-layers`, where the gaps between a few kept tensors would take as much memory as the tensors.
    """
    _mallopt({_MMAP_THRESHOLD: _MIB})


def _mallopt(settings: Dict[int, int]) -> None:
    with contextlib.suppress(OSError, AttributeError, TypeError):
        for setting, value in settings.items():
            ctypes.CDLL(None).mallopt(ctypes.c_int(setting), ctypes.c_int(value))


@contextlib.contextmanager
def huge_pages() -> Iterator[None]:
    """Processes started inside this context have a heap of huge pages, if kernel and glibc (2.35) support them.

    SIFT, with its pyramid of 70 MB, takes 5 to 8 % less CPU time. Same results.
    """
    before = os.environ.get(_TUNABLES)
    os.environ[_TUNABLES] = f"{before}:{_HUGE}" if before else _HUGE
    try:
        yield
    finally:
        if before is None:
            del os.environ[_TUNABLES]
        else:
            os.environ[_TUNABLES] = before
