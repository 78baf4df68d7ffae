"""Settings of a process that runs SIFT all day."""

from __future__ import annotations

import ctypes

import cv2

_MIB = 1 << 20
# (glibc's number of the setting, value): M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD
_MALLOPT = ((-3, 32 * _MIB), (-1, 2**31 - 1), (-2, 256 * _MIB))


def tune_process() -> None:
    """Keep freed memory, and use one OpenCV thread.

    Each SIFT call allocates and frees about 70 MB; giving it back to the system every time costs 17,500 page
    faults, more than a third of the call. Processes side by side fill the cores better than threads inside
    one. Results do not change. Elsewhere than on glibc only the threads are set.
    """
    cv2.setNumThreads(1)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    for setting, value in _MALLOPT:
        mallopt(ctypes.c_int(setting), ctypes.c_int(value))
