"""The same keypoints on every x86-64 processor with AVX2, Intel's or AMD's.

OpenCV's SIFT gives other last bits where it calls Intel's IPP (its RSQRTPS is an approximation that
the vendors define differently) or its own AVX-512 code. Both are switched off, before OpenCV is
loaded; this costs nothing that can be measured. `cv2.ipp.setUseIPP` acts on one thread only.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import MutableMapping

CPU_INFO = Path("/proc/cpuinfo")


def prepare_opencv(variables: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that OpenCV reads when it is loaded. Those already set are kept."""
    variables.setdefault("OPENCV_IPP", "disabled")
    variables.setdefault("OPENCV_LOG_LEVEL", "ERROR")  # else it warns that IPP is disabled
    # OpenCV complains about a feature that the processor lacks.
    if CPU_INFO.exists() and " avx512vl" in CPU_INFO.read_text(encoding="ascii", errors="ignore"):
        variables.setdefault("OPENCV_CPU_DISABLE", "AVX512-SKX")
