"""Checks of this machine as pure functions: GPUs, driver, shared memory, disk.

Each returns a `Finding`; `pipeline.doctor` reads the machine and prints them.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple, Optional, Sequence, Tuple

OK = "ok"
NOTE = "note"
WARN = "warn"
FAIL = "FAIL"
GIB = 1 << 30
MIB = 1 << 20

# Lowest driver for a CUDA version (docs.nvidia.com, CUDA release notes, minor-version
# compatibility).
DRIVERS = ((13, "580"), (12, "525.60.13"), (11, "450.80.02"))
NCCL_BYTES_PER_RANK = 64 * MIB  # its shared-memory channels between the ranks of one machine


class Finding(NamedTuple):
    """One line of the doctor: its level, what was checked, the result and the fix, if any."""

    level: str
    subject: str
    text: str


def check_capability(
    name: str, capability: Tuple[int, int], arch_list: Sequence[str], cuda: str
) -> Finding:
    """Whether this torch build has kernels for a card.

    A kernel for sm_XY runs on cards of the same X and the same or a later Y. PTX (`compute_XY`) can
    be compiled for any later card, but takes minutes, so it does not count.
    """
    card = f"{name} (compute capability {capability[0]}.{capability[1]})"
    names = re.findall(r"\bsm_(\d+)(\d)\b", " ".join(arch_list))
    built = [(int(major), int(minor)) for major, minor in names]
    if any(major == capability[0] and minor <= capability[1] for major, minor in built):
        return Finding(OK, "GPU", f"{card}: this torch build has kernels for it (CUDA {cuda})")
    older = capability < max(built, default=capability)
    image = "cu111 image" if older else "modern image (docker build --target modern)"
    text = f"{card}: this torch build (CUDA {cuda}) has no kernels for it; use the {image}"
    return Finding(FAIL, "GPU", text)


def check_driver(driver: str, cuda: str) -> Finding:
    """The NVIDIA driver against the CUDA version torch was built with."""
    major = int(cuda.split(".")[0])
    wanted = next((version for since, version in DRIVERS if major >= since), "0")
    installed, needed = (
        [int(part) for part in text.split(".") if part.isdigit()] for text in (driver, wanted)
    )
    if installed >= needed:
        return Finding(OK, "driver", f"{driver} serves CUDA {cuda} (needs {wanted} or later)")
    fix = f"install {wanted} or later, or use the cu111 image"
    return Finding(FAIL, "driver", f"{driver} is too old for CUDA {cuda}: {fix}")


def check_gpu_count(
    gpus: int, processes: str, hidden: int = 0, cuda: Optional[str] = None
) -> Finding:
    """GPUs torch can use against NPROC_PER_NODE; `hidden`: number of GPUs that the driver
    reports.
    """
    if not gpus and hidden:
        build = "has no CUDA" if cuda is None else f"has CUDA {cuda}"
        text = f"{hidden} in the machine and none usable: this torch build {build}; check driver"
        return Finding(FAIL, "GPU", f"{text}, and in docker --gpus all")
    if not gpus:
        return Finding(NOTE, "GPU", "none: training runs on the CPU (docker: --gpus all adds them)")
    if processes.isdigit() and int(processes) > gpus:
        text = f"NPROC_PER_NODE={processes}, but there are {gpus}: set it to {gpus} or auto"
        return Finding(FAIL, "GPU", text)
    return Finding(OK, "GPU", f"{gpus} usable")


def shared_memory_needed(gpus: int) -> int:
    """Bytes of /dev/shm that NCCL needs for its channels between the ranks of `gpus` GPUs."""
    return gpus * NCCL_BYTES_PER_RANK if gpus > 1 else 0


def check_shared_memory(free: int, needed: int, batches: int = 0) -> Finding:
    """/dev/shm against what training needs; Docker gives 64 MB by default.

    Args:
        needed: bytes that it requires; batches: bytes for the processes that load batches. With
            less memory there are fewer of these, or a thread.
    """
    text = f"{size(free)} free, {size(needed + batches)} wanted"
    if free >= needed + batches:
        return Finding(OK, "/dev/shm", text)
    fix = f"docker run --shm-size={math.ceil((needed + batches) / GIB)}g (or --ipc=host)"
    if free >= needed:
        return Finding(WARN, "/dev/shm", f"{text}: fewer processes load batches; {fix}")
    return Finding(FAIL, "/dev/shm", f"{text}: {fix}")


def disk_needed(archives: int, images: int, views: int, keypoints: int) -> int:
    """Bytes that a preset needs: its archives (bytes), the keypoints in workspace and DVC cache,
    checkpoints.
    """
    # Not at the top: OpenCV may not load on a machine that the doctor checks
    from superglue_sift.features.sift import ORIENTED

    # Most photographs give fewer keypoints than the limit; three quarters is a safe mean.
    return archives + 2 * int(0.75 * images * views * keypoints * ORIENTED.itemsize) + GIB


def check_disk(free: int, needed: int, place: str) -> Finding:
    """Disk space for a preset."""
    space = f"{size(free)} free in {place}, about {size(needed)} wanted"
    if free >= needed:
        return Finding(OK, "disk", space)
    fix = "choose a smaller preset, set fetch.limit, link DVC's cache (docs/data.md), or free space"
    return Finding(FAIL, "disk", f"{space}: {fix}")


def size(count: float) -> str:
    """Bytes as text: 64 MiB, 1.5 GiB."""
    if count >= GIB:
        return f"{count / GIB:.1f} GiB"
    return f"{math.ceil(count / MIB)} MiB"
