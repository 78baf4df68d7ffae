"""How a process keeps memory: one that runs SIFT all day, one that trains in little memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Iterator, Tuple

import cv2

_MIB = 1 << 20
_TUNABLES, _HUGE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"
# (glibc's number of the setting, value): M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD
_KEEP = ((-3, 32 * _MIB), (-1, 2**31 - 1), (-2, 256 * _MIB))
_RETURN = ((-3, _MIB),)


def tune_process() -> None:
    """Keep freed memory, and use one OpenCV thread.

    Processes side by side fill the cores better than threads inside one. Results do not change.
    """
    cv2.setNumThreads(1)
    keep_memory()


def keep_memory() -> None:
    """Keep freed memory; elsewhere than on glibc nothing happens.

    Each SIFT call allocates and frees about 70 MB. Whether glibc gives it back to the system hangs on sizes and on
    what else is in memory; for views of 640x480 it does, which costs 17,500 page faults, a quarter to a third of the
    call (docs/data.md has the figures).
    """
    _mallopt(_KEEP)


def return_memory() -> None:
    """Give each freed block of a MiB and more back to the system; elsewhere than on glibc nothing happens.

    Where a few tensors are kept between many that are freed (`train.checkpoint_layers`), the holes in glibc's heap
    take as much memory as the tensors.
    """
    _mallopt(_RETURN)


def _mallopt(settings: Tuple[Tuple[int, int], ...]) -> None:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    for setting, value in settings:
        mallopt(ctypes.c_int(setting), ctypes.c_int(value))


@contextlib.contextmanager
def huge_pages() -> Iterator[None]:
    """Processes started inside this context have a heap of huge pages, where kernel and glibc (2.35) can.

    SIFT walks through 70 MB of pyramid at every call; with pages of 2 MiB it takes 5 to 8 % less time of a core.
    glibc reads the setting when a process starts, so this one stays as it is. Results do not change.
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
