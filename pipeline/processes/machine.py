"""Checks of this machine as pure functions: GPUs, driver, shared memory, disk, files, tracking
server.

Each returns a `Finding`; `pipeline.doctor` reads the machine and prints them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Optional, Sequence, Tuple

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


@dataclass(frozen=True)
class Finding:
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
    matches = filter(None, (re.fullmatch(r"sm_(\d+)(\d)", arch) for arch in arch_list))
    built = sorted((int(match[1]), int(match[2])) for match in matches)
    if any(major == capability[0] and minor <= capability[1] for major, minor in built):
        return Finding(OK, "GPU", f"{card}: this torch build has kernels for it (CUDA {cuda})")
    text = f"{card} is older than this torch build supports (CUDA {cuda}): use the cu111 image"
    if built and capability > built[-1]:
        ends = "ends at {}.{}".format(*built[-1])
        text = (
            f"{card} is newer than this torch build, which {ends} (CUDA {cuda}): use the modern"
            " image "
        )
        text += "(docker build --target modern)"
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
        reason = (
            "this torch build has no CUDA"
            if cuda is None
            else "the driver is too old or not passed in"
        )
        text = f"{hidden} in the machine and none usable: {reason}; docker needs --gpus all"
        return Finding(FAIL, "GPU", text)
    if not gpus:
        return Finding(
            NOTE, "GPU", "none: training runs on the CPU (in docker, --gpus all passes GPUs in)"
        )
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
    if not needed + batches:
        return Finding(OK, "/dev/shm", f"{size(free)} free, none wanted: one process, or no GPU")
    text = f"{size(free)} free, {size(needed + batches)} wanted"
    if free >= needed + batches:
        return Finding(OK, "/dev/shm", text)
    fix = f"docker run --shm-size={math.ceil((needed + batches) / GIB)}g (or --ipc=host)"
    if free >= needed:
        return Finding(
            WARN,
            "/dev/shm",
            f"{text}, {size(batches)} of it for batches: fewer processes load them; {fix}",
        )
    return Finding(FAIL, "/dev/shm", f"{text}: {fix}")


def disk_needed(archives: int, images: int, views: int, keypoints: int, copies: int = 2) -> int:
    """Bytes that a preset needs: its archives (bytes), the keypoints in workspace and DVC cache,
    checkpoints.

    copies: of the keypoints; 1 if DVC's cache.type is a link.
    """
    # Not at the top: OpenCV may not load on a machine that the doctor checks
    from superglue_sift.sift import ORIENTED

    # Most photographs give fewer keypoints than the limit; three quarters is a safe mean.
    return archives + copies * int(0.75 * images * views * keypoints * ORIENTED.itemsize) + GIB


def check_disk(free: int, needed: int, place: str, linked: Optional[int] = None) -> Finding:
    """Disk space for a preset; `linked`: bytes needed if DVC's cache.type is a link."""
    space = f"{size(free)} free in {place}, about {size(needed)} wanted"
    if free >= needed:
        return Finding(OK, "disk", space)
    if linked is not None and free >= linked:
        less = f"{size(linked)} with `dvc config --local cache.type hardlink`"
        return Finding(WARN, "disk", f"{space}, or {less}")
    return Finding(
        FAIL, "disk", f"{space}: choose a smaller preset, set fetch.limit, or free some space"
    )


def check_tracking(uri: str, status: Optional[int], error: str = "") -> Finding:
    """A tracking server by its REST interface: the HTTP status, or None and the error."""
    text = f"{uri} answers"
    if status == 403:
        host = uri.split("://", 1)[1].split("/", 1)[0]
        text = (
            f"{uri} refuses the name {host} (403): start it with --allowed-hosts"
            f" '{host},localhost:*'"
        )
    elif status is None or status >= 400:
        why = error or f"HTTP {status}"
        text = (
            f"{uri} does not answer ({why}); runs wait in reports/train (pipeline.tracking resend)"
        )
    return Finding(OK if status and status < 400 else WARN, "MLflow", text)


def size(count: float) -> str:
    """Bytes as text: 64 MiB, 1.5 GiB."""
    if count >= GIB:
        return f"{count / GIB:.1f} GiB"
    return f"{math.ceil(count / MIB)} MiB"
