"""How threads of OpenMP and OpenBLAS wait, to be said before torch and numpy are loaded; this module loads nothing."""

from __future__ import annotations

import os
from typing import MutableMapping, Optional

SAID = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")  # by GNU's or Intel's OpenMP
COUNTED = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS")  # threads of OpenBLAS


def wait_passively(variables: Optional[MutableMapping[str, str]] = None) -> None:
    """Let idle threads sleep, in this process, or in one to be started with the environment `variables`.

    OpenMP's default, which torch uses, is to compute while waiting. On a busy machine that takes the cores which the
    work needs: four pairs of a scene with two threads on two cores took 7.4 s of processor time, and 3.9 s when threads
    sleep. OpenBLAS, which numpy and scipy solve small systems by, does the same and gets one thread: 2,500 matches are
    aligned in 0.36 s of processor time in place of 0.62. What is said already, one of `SAID` or of `COUNTED`, stays.
    """
    variables = os.environ if variables is None else variables
    if not any(name in variables for name in SAID):
        variables["OMP_WAIT_POLICY"] = "passive"
    if not any(name in variables for name in COUNTED):
        variables["OPENBLAS_NUM_THREADS"] = "1"
