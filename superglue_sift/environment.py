"""Variables of the environment that libraries read when they are loaded.

This module imports neither torch nor numpy, so that a command can set the variables before it loads
them. They serve two purposes: threads that sleep while they wait (`wait_passively`), and the same
bytes on every x86-64 processor with AVX2, Intel's or AMD's.

Libraries choose their code by vendor and instruction set, and round differently in each. These
variables make them choose alike; they must be set before the libraries are loaded.

Keypoints, always: OpenCV's SIFT gives other last bits where it calls Intel's IPP (its RSQRTPS is an
approximation that the vendors define differently) or its own AVX-512 code. Both are off; this costs
nothing that can be measured. `cv2.ipp.setUseIPP` acts on one thread only.

Networks, for `train.precision: portable`: `NETWORK`, which costs time (docs/training.md), and
`torch_compat.sqrt` in place of MKL's, which uses RSQRTPS too.
"""

from __future__ import annotations

import codecs
import importlib
import io
import os
import sys
from pathlib import Path
from typing import MutableMapping, Optional

from superglue_sift.errors import exit_code

CPU_INFO = Path("/proc/cpuinfo")
ERRORS = 2  # OpenCV's log level
NETWORK = {
    # MKL takes its AVX-512 kernels on Intel only. "AVX2" would mean AVX2 on Intel, anything on AMD.
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    # numpy's exp, log and more have other last bits with AVX-512
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
    # read by the OpenBLAS of numpy, of SciPy and of OpenCV
    "OPENBLAS_CORETYPE": "Haswell",
    "OPENBLAS_NUM_THREADS": "1",
    # The number of threads decides how sums are split
    "OMP_NUM_THREADS": "1",
}

# read by GNU's and Intel's OpenMP
WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS")  # threads of OpenBLAS


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


def run(module: str) -> int:
    """Run the `main` of a module with threads that wait passively; returns the exit code."""
    wait_passively()  # before torch is loaded
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names of files are printed as the system has them. A pipe on Windows takes only the
        # letters of one language: others are then printed as numbers instead of an error.
        names = (sys.stdout.encoding, sys.getfilesystemencoding())
        own = len({codecs.lookup(name).name for name in names}) == 1
        sys.stdout.reconfigure(errors="surrogateescape" if own else "backslashreplace")
    return exit_code(importlib.import_module(module).main)


def wait_passively(variables: Optional[MutableMapping[str, str]] = None) -> None:
    """Let idle threads sleep: in this process, or in one that is started with the environment
    `variables`.

    By default OpenMP, which torch uses, spins while it waits. On a busy machine this takes cores
    from the work: four pairs of a scene with two threads on two cores took 7.4 s of processor time,
    and 3.9 s when threads sleep. OpenBLAS, by which numpy and scipy solve small systems, also spins
    and gets one thread: aligning 2,500 matches takes 0.36 s of processor time instead of 0.62.
    Variables that are already set, in each of both groups, are kept.
    """
    variables = os.environ if variables is None else variables
    if not any(name in variables for name in WAIT_VARIABLES):
        variables["OMP_WAIT_POLICY"] = "passive"
    if not any(name in variables for name in THREAD_VARIABLES):
        variables["OPENBLAS_NUM_THREADS"] = "1"


def usable_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
