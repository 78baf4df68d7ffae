"""How threads of OpenMP and OpenBLAS wait, to set before torch and numpy are imported, and the
number of cores.
"""

from __future__ import annotations

import os
from typing import MutableMapping, Optional

# Of GNU's and Intel's OpenMP
WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS")  # threads of OpenBLAS


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
