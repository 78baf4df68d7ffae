"""Check this machine before the work: `python -m pipeline.doctor`.

It checks driver, GPUs, memory, shared memory, disk and packages. The exit code is 0 if the work can
start, and 2 if something prevents it. With `--quick`, which `repro` runs first, only what prevents
the work is printed, or else the line about the disk.
"""

from __future__ import annotations

import argparse
import configparser
import contextlib
import math
import os
import platform
import re
import shutil
import sys
from pathlib import Path
from typing import Callable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from pipeline import errors, launch, params, provenance
from pipeline.fetch import dataset
from pipeline.files import GIB, format_bytes
from pipeline.params import FetchParams

PACKAGES = (*provenance.PACKAGES, "torchvision", "nvidia-dali-cuda130")
MANIFEST = Path("data/images/manifest.csv")
BEFORE_OUTPUTS = ("data", "checkpoints", "reports")  # folders in which stages have outputs
OK = "ok"
NOTE = "note"
WARN = "warn"
FAIL = "FAIL"

# The lowest driver for each CUDA version (docs.nvidia.com, CUDA release notes, minor-version
# compatibility)
DRIVERS = ((13, "580"), (12, "525.60.13"), (11, "450.80.02"))


class Finding(NamedTuple):
    """One line of the doctor.

    `level` is OK, NOTE, WARN or FAIL. `subject` is what was checked. `text` is the result, and the
    fix.
    """

    level: str
    subject: str
    text: str


Findings = Iterator[Finding]


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Print the findings. Return 0, or 2 if something prevents the work."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.doctor", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="only what would stop the work")
    options = parser.parse_args(argv)
    checks = (workspace, gpus, shared_memory, disk)
    if not options.quick:
        checks = (software, memory, *checks)
    found = [finding for check in checks for finding in run_check(check)]
    failed = [finding for finding in found if finding.level == FAIL]
    shown = failed or [each for each in found if each.subject == "disk"] if options.quick else found
    for finding in shown:
        line = f"{finding.level:5} {finding.subject}: {finding.text}"
        print(line, file=sys.stderr if options.quick and failed else sys.stdout)
    return 2 if failed else 0


def run_check(check: Callable[[], Findings]) -> List[Finding]:
    """Run a check and return its findings. An exception becomes a warning."""
    subject = check.__name__.replace("_", " ")
    try:
        return list(check())
    except errors.RequestError as error:
        return [Finding(FAIL, subject, str(error))]
    except Exception as error:  # an unusual machine may raise anything
        return [Finding(WARN, subject, f"not checked: {type(error).__name__}: {error}")]


def software() -> Findings:
    """Report Python, torch, CUDA, the image, and the packages that decide what works."""
    import torch

    text = f"Python {platform.python_version()}, torch {torch.__version__}"
    image = os.environ.get("IMAGE_STACK", "none")
    yield Finding(OK, "software", f"{text}, CUDA {torch.version.cuda or 'none'}, image {image}")
    found = provenance.versions(PACKAGES).items()
    yield Finding(OK, "packages", ", ".join(f"{name} {version}" for name, version in found))


def gpus() -> Findings:
    """Check the cards against the torch build, the driver, and the number of processes asked
    for."""
    import torch

    driver, known = nvidia_driver()
    cuda = torch.version.cuda
    if driver and cuda:
        yield check_driver(driver, cuda)
    count = torch.cuda.device_count()
    processes = os.environ.get("NPROC_PER_NODE", "auto")
    yield check_gpu_count(count, processes, known, cuda)
    for index in range(count):
        name = torch.cuda.get_device_name(index)
        capability = torch.cuda.get_device_capability(index)
        yield check_capability(name, capability, torch.cuda.get_arch_list(), cuda or "none")


def nvidia_driver() -> Tuple[str, int]:
    """Return the driver version and the number of GPUs, or ("", 0) without a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        text = version.decode() if isinstance(version, bytes) else version
        return text, pynvml.nvmlDeviceGetCount()
    # NVML has error types of its own, one of them for "no driver"
    except Exception:
        return "", 0


def memory() -> Findings:
    """Report the memory of the machine and of each GPU."""
    import psutil
    import torch

    held = psutil.virtual_memory()
    cards = [torch.cuda.mem_get_info(index) for index in range(torch.cuda.device_count())]
    for index, (free, total) in enumerate([(held.available, held.total), *cards]):
        subject = f"memory of GPU {index - 1}" if index else "memory"
        yield Finding(OK, subject, f"{format_bytes(free)} free of {format_bytes(total)}")


def shared_memory() -> Findings:
    """Check /dev/shm against the needs of NCCL and of the processes that load batches for GPUs."""
    import torch

    from pipeline import distributed

    if os.path.isdir("/dev/shm"):
        ranks = min(launch.processes_per_node(), torch.cuda.device_count())
        needed = distributed.shared_memory_needed(ranks)
        # One GiB for each rank holds batches of a few hundred pairs, for each of a few processes
        free = shutil.disk_usage("/dev/shm").free
        yield check_shared_memory(free, needed, ranks * GIB)


def workspace() -> Findings:
    """Check that DVC can work here: no output lies behind a link, and there is a git repository."""
    for name in BEFORE_OUTPUTS:
        if Path(name).is_symlink():
            fix = (
                f"{name} is a link, and DVC refuses outputs behind one: make {name} a folder, and"
                " keep the large files on the other disk by `dvc config --local cache.dir"
                " /disk/cache` and `dvc config --local cache.type symlink`"
            )
            archives = "; data/archives may be a link" if name == "data" else ""
            yield Finding(FAIL, "workspace", fix + archives)
    config = configparser.ConfigParser(interpolation=None)
    config.read([".dvc/config", ".dvc/config.local"])
    has_git = any((folder / ".git").exists() for folder in (Path.cwd(), *Path.cwd().parents))
    if not has_git and not config.getboolean("core", "no_scm", fallback=False):
        fix = "type `git init`, or `dvc config --local core.no_scm true`"
        yield Finding(FAIL, "workspace", f"no git repository, which DVC looks for: {fix}")


def disk() -> Findings:
    """Check the free space against what the preset still needs."""
    from pipeline.fetch import coco

    try:
        sections = params.load(Path("params.yaml"))
    except errors.RequestError:  # the stages report this error
        return
    fetch = sections.fetch
    views = sections.keypoints.views_per_image
    limit = sections.keypoints.max_keypoints
    archives = 0 if fetch.path else coco.expect(fetch.source, fetch.limit)[0]
    present = sum(path.stat().st_size for path in Path("data").rglob("*") if path.is_file())
    needed = disk_needed(archives, photographs(fetch), views, limit) - present
    yield check_disk(shutil.disk_usage(".").free, max(needed, 0), os.getcwd())


def photographs(fetch: FetchParams) -> int:
    """Return the number of photographs of a preset.

    For a folder it is the number that `fetch` listed, and 0 before `fetch` has run.
    """
    from pipeline.fetch import coco

    if fetch.source == "folder":
        # a missing or damaged manifest is written by `fetch`
        with contextlib.suppress(errors.RequestError):
            return len(dataset.read_manifest(MANIFEST))
    return coco.expect(fetch.source, fetch.limit)[1]


def check_capability(
    name: str, capability: Tuple[int, int], arch_list: Sequence[str], cuda: str
) -> Finding:
    """Check that this torch build has kernels for a card.

    A kernel for sm_XY runs on cards of the same X and the same or a later Y. PTX (`compute_XY`) can
    be compiled for any later card, but this takes minutes, so it does not count.
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
    """Check the NVIDIA driver against the CUDA version that torch was built with."""
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
    """Check the GPUs that torch can use against NPROC_PER_NODE.

    `hidden` is the number of GPUs that the driver reports.
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


def check_shared_memory(free: int, needed: int, batches: int = 0) -> Finding:
    """Check /dev/shm against what training needs. Docker gives 64 MB by default.

    Args:
        free: bytes that are free.
        needed: bytes without which training does not start.
        batches: bytes for the processes that load batches. With less memory there are fewer
            processes, or a thread.
    """
    text = f"{format_bytes(free)} free, {format_bytes(needed + batches)} wanted"
    if free >= needed + batches:
        return Finding(OK, "/dev/shm", text)
    fix = f"docker run --shm-size={math.ceil((needed + batches) / GIB)}g (or --ipc=host)"
    if free >= needed:
        return Finding(WARN, "/dev/shm", f"{text}: fewer processes load batches; {fix}")
    return Finding(FAIL, "/dev/shm", f"{text}: {fix}")


def disk_needed(archives: int, images: int, views: int, keypoints: int) -> int:
    """Return the bytes that a preset needs.

    They are its archives (bytes), its keypoints in workspace and DVC cache, and its checkpoints.
    """
    # This import is not at the top, because OpenCV may not load on a machine that the doctor checks
    from superglue_sift.features.sift import ORIENTED

    # Most photographs give fewer keypoints than the limit. Three quarters of it is a safe mean.
    return archives + 2 * int(0.75 * images * views * keypoints * ORIENTED.itemsize) + GIB


def check_disk(free: int, needed: int, place: str) -> Finding:
    """Check the disk space for a preset."""
    space = f"{format_bytes(free)} free in {place}, about {format_bytes(needed)} wanted"
    if free >= needed:
        return Finding(OK, "disk", space)
    fix = "choose a smaller preset, set fetch.limit, link DVC's cache (docs/data.md), or free space"
    return Finding(FAIL, "disk", f"{space}: {fix}")


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
