"""How OpenMP's threads wait, which must be said before torch is loaded; this module loads nothing."""

from __future__ import annotations

import os
from typing import MutableMapping, Optional

SAID = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")  # by GNU's or Intel's OpenMP


def wait_passively(variables: Optional[MutableMapping[str, str]] = None) -> None:
    """Let idle threads sleep, unless one of `SAID` is set in the environment, or in `variables` of a process to start.

    OpenMP's default is to compute while waiting. On a busy machine that takes the cores which the work needs: four
    pairs of a scene with two threads on two cores took 7.4 s of processor time, and 3.9 s when threads sleep.
    """
    variables = os.environ if variables is None else variables
    if not any(name in variables for name in SAID):
        variables["OMP_WAIT_POLICY"] = "passive"
