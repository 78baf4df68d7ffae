"""Set variables of the environment that libraries read when they are loaded.

This module imports neither torch nor numpy, so that a command can set the variables before it loads
them. They serve two purposes. Threads sleep while they wait (`wait_passively`), and results have
the same bytes on every x86-64 processor with AVX2, Intel's or AMD's. Commands also keep the memory
that they free (`keep_freed_memory`).

Libraries choose their code by vendor and instruction set, and each code rounds differently. These
variables make them choose alike. They must be set before the libraries are loaded.

For keypoints they are always set. The last bits of OpenCV's SIFT change where it calls its own
AVX-512 code, or Intel's IPP, whose RSQRTPS is an approximation that the vendors define differently.
Both are turned off, which costs no time that can be measured. `cv2.ipp.setUseIPP` would act on one
thread only.

For networks they are set with `train.precision: portable`. The variables are `NETWORK`, which costs
time (docs/training.md). `torch_compat.sqrt` replaces MKL's square root, which uses RSQRTPS, too.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import importlib
import io
import os
import sys
from pathlib import Path
from typing import MutableMapping, Optional

from superglue_sift.errors import run_main

CPU_INFO = Path("/proc/cpuinfo")
ERRORS = 2  # level of OpenCV's log
NETWORK = {
    # MKL takes its AVX-512 kernels on Intel only. "AVX2" would mean AVX2 on Intel, and any code on
    # AMD.
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    # AVX-512 changes the last bits of numpy's exp, log and other functions.
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
    # The OpenBLAS libraries of numpy, SciPy and OpenCV read these two.
    "OPENBLAS_CORETYPE": "Haswell",
    "OPENBLAS_NUM_THREADS": "1",
    # The number of threads decides how sums are split.
    "OMP_NUM_THREADS": "1",
}

READERS = ("numpy", "torch")  # packages that read these variables, or load libraries that do
PREPARED = "SG_PREPARED"  # variable that says that they were set before these packages were loaded

# GNU's and Intel's OpenMP read these variables.
WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS")  # number of threads of OpenBLAS

# The numbers of glibc's settings in malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3


def prepare_opencv() -> None:
    """Set the variables that OpenCV reads when it is loaded. Variables that are set are kept.

    If a program loads OpenCV before this package, OpenCV keeps its AVX-512 code. It also keeps IPP
    if the program has called a function that uses it. Keypoints may then differ in their last bits.
    """
    os.environ.setdefault("OPENCV_IPP", "disabled")
    os.environ.setdefault("OPENCV_LOG_LEVEL", "ERROR")  # Otherwise it warns about IPP.
    # OpenCV would complain about a feature that the processor lacks.
    if CPU_INFO.exists() and " avx512vl" in CPU_INFO.read_text(encoding="ascii", errors="ignore"):
        os.environ.setdefault("OPENCV_CPU_DISABLE", "AVX512-SKX")
    if "cv2" in sys.modules:
        # OpenCV is loaded, but may not have read OPENCV_IPP. Let it do so now, without its warning.
        import cv2

        logging = getattr(cv2.utils, "logging", cv2)  # OpenCV 5 has it in cv2.utils alone.
        level = logging.setLogLevel(ERRORS)
        cv2.ipp.useIPP()
        logging.setLogLevel(level)


def prepare_network() -> None:
    """Set the variables of `NETWORK`, whatever they were.

    Libraries that are loaded already do not read them. Then `is_prepared` returns False.
    """
    if not any(library in sys.modules for library in READERS):
        os.environ[PREPARED] = "1"
    os.environ.update(NETWORK)


def is_prepared() -> bool:
    """Return whether the variables of `NETWORK` were set before torch and numpy were loaded.

    This also holds in a process that inherits the variables from such a process.
    """
    return all(os.environ.get(name) == value for name, value in {**NETWORK, PREPARED: "1"}.items())


def import_and_run_main(module: str) -> int:
    """Run the `main` of a module as a command, and return the exit code.

    Its threads wait passively, and it keeps the memory that it frees.
    """
    keep_freed_memory()
    # This comes before torch is loaded.
    wait_passively()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names of files are printed with the bytes that the file system has. A pipe on Windows
        # takes only the letters of one language, so other letters are printed as numbers.
        encodings = (sys.stdout.encoding, sys.getfilesystemencoding())
        stdout_codec, files_codec = map(codecs.lookup, encodings)
        is_same = stdout_codec.name == files_codec.name
        sys.stdout.reconfigure(errors="surrogateescape" if is_same else "backslashreplace")
    return run_main(importlib.import_module(module).main)


def wait_passively(variables: Optional[MutableMapping[str, str]] = None) -> None:
    """Set variables with which idle threads sleep. Groups of variables that are set are kept.

    By default OpenMP, which torch uses, spins while it waits, which takes cores from other work.
    Four pairs of a scene with two threads on two cores took 7.4 s of processor time, and take 3.9 s
    if threads sleep. OpenBLAS, by which numpy and scipy solve small systems, also spins, and gets
    one thread. To refine 2,500 matches then takes 0.36 s of processor time instead of 0.62.

    Args:
        variables: the environment with which a process will be started. If None, it is that of this
            process.
    """
    variables = os.environ if variables is None else variables
    if not any(name in variables for name in WAIT_VARIABLES):
        variables["OMP_WAIT_POLICY"] = "passive"
    if not any(name in variables for name in THREAD_VARIABLES):
        variables["OPENBLAS_NUM_THREADS"] = "1"


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, if its libc is glibc.

    SIFT takes and frees some 70 MB a call, and a training a batch a step. By default, glibc gives
    blocks of this size back to the system, and gets the next ones by a page fault for every 4 KiB.
    SIFT then takes 1.4 times the processor time at 640x480, and making a batch of 64 pairs of 512
    keypoints up to 2.2 times.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # musl has no mallopt
            libc = ctypes.CDLL(None)
            libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)  # The largest value
            libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def count_usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
