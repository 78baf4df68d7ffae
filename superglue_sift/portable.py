"""The same bytes on every x86-64 processor with AVX2, Intel's or AMD's.

Libraries choose their code by vendor and instruction set, and round differently in each. These
variables make them choose alike; they must be set before the libraries are loaded.

Keypoints, always: OpenCV's SIFT gives other last bits where it calls Intel's IPP (its RSQRTPS is an
approximation that the vendors define differently) or its own AVX-512 code. Both are off; this costs
nothing that can be measured. `cv2.ipp.setUseIPP` acts on one thread only.

Networks, for `train.precision: portable`: `NETWORK`, which costs time (docs/training.md), and
`torch_compat.sqrt` in place of MKL's, which uses RSQRTPS too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
ERRORS = 2  # OpenCV's log level
NETWORK = {
    # MKL takes its AVX-512 kernels on Intel only. "AVX2" would mean AVX2 on Intel, anything on AMD.
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    # numpy's exp, log and more have other last bits with AVX-512
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
    # Of numpy, SciPy and OpenCV, which has its own
    "OPENBLAS_CORETYPE": "Haswell",
    "OPENBLAS_NUM_THREADS": "1",
    # The number of threads decides how sums are split
    "OMP_NUM_THREADS": "1",
}


def prepare_opencv() -> None:
    """Set the variables that OpenCV reads when it is loaded. Those already set are kept.

    A program that loads OpenCV before this package keeps OpenCV's AVX-512 code, and IPP too if it
    has called a function that uses it: keypoints may then differ in their last bits.
    """
    os.environ.setdefault("OPENCV_IPP", "disabled")
    os.environ.setdefault("OPENCV_LOG_LEVEL", "ERROR")  # else it warns that IPP is disabled
    # OpenCV complains about a feature that the processor lacks.
    if CPU_INFO.exists() and " avx512vl" in CPU_INFO.read_text(encoding="ascii", errors="ignore"):
        os.environ.setdefault("OPENCV_CPU_DISABLE", "AVX512-SKX")
    if "cv2" in sys.modules:
        _start_without_ipp()


def _start_without_ipp() -> None:
    """OpenCV, loaded but not used yet, reads OPENCV_IPP now, without its warning."""
    import cv2

    level = cv2.setLogLevel(ERRORS)
    cv2.ipp.useIPP()
    cv2.setLogLevel(level)


def prepare_network() -> None:
    """Set the variables of `NETWORK`, whatever they were."""
    os.environ.update(NETWORK)


def is_prepared() -> bool:
    """Whether this process has the variables of `NETWORK`."""
    return all(os.environ.get(name) == value for name, value in NETWORK.items())
