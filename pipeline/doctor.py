"""Check this machine before the work: `python -m pipeline.doctor` (all), `--quick` (what `repro`
runs first).

Driver, GPUs, memory, shared memory, disk and packages. Exit code 0 if the work can start, 2 if
something prevents it. `--quick` prints only what does, or else the disk. How
long a training takes, its progress says.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Callable, Iterator, List, Optional, Sequence, Tuple

from pipeline import errors, launch
from pipeline.image_sets import manifest
from pipeline.parameters import params
from pipeline.parameters.schema import FetchParams
from pipeline.processes import machine
from pipeline.processes.machine import FAIL, GIB, OK, WARN, Finding
from pipeline.provenance import repro

PACKAGES = (*repro.PACKAGES, "torchvision", "nvidia-dali-cuda130")
MANIFEST = Path("data/images/manifest.csv")
Findings = Iterator[Finding]


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Print the findings; 0 or 2."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.doctor", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="only what would stop the work")
    options = parser.parse_args(argv)
    checks = (gpus, shared_memory, disk)
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
    """The findings of a check; an exception becomes a warning."""
    subject = check.__name__.replace("_", " ")
    try:
        return list(check())
    except errors.RequestError as error:
        return [Finding(FAIL, subject, str(error))]
    except Exception as error:  # of any kind, on an unusual machine
        return [Finding(WARN, subject, f"not checked: {type(error).__name__}: {error}")]


def software() -> Findings:
    """Python, torch, CUDA, image; versions of the packages that decide what works."""
    import torch

    text = f"Python {platform.python_version()}, torch {torch.__version__}"
    image = os.environ.get("IMAGE_STACK", "none")
    yield Finding(OK, "software", f"{text}, CUDA {torch.version.cuda or 'none'}, image {image}")
    found = repro.versions(PACKAGES).items()
    yield Finding(OK, "packages", ", ".join(f"{name} {version}" for name, version in found))


def gpus() -> Findings:
    """Cards against the torch build, the driver, and the number of processes asked for."""
    import torch

    driver, known = nvidia_driver()
    cuda = torch.version.cuda
    if driver and cuda:
        yield machine.check_driver(driver, cuda)
    count = torch.cuda.device_count()
    processes = os.environ.get("NPROC_PER_NODE", "auto")
    yield machine.check_gpu_count(count, processes, known, cuda)
    for index in range(count):
        name = torch.cuda.get_device_name(index)
        capability = torch.cuda.get_device_capability(index)
        yield machine.check_capability(name, capability, torch.cuda.get_arch_list(), cuda or "none")


def nvidia_driver() -> Tuple[str, int]:
    """Driver version and number of GPUs; ("", 0) without a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        text = version.decode() if isinstance(version, bytes) else version
        return text, pynvml.nvmlDeviceGetCount()
    except Exception:  # NVML's own error types, one of them for "no driver"
        return "", 0


def memory() -> Findings:
    """Memory of the machine and of each GPU."""
    import psutil
    import torch

    held = psutil.virtual_memory()
    cards = [torch.cuda.mem_get_info(index) for index in range(torch.cuda.device_count())]
    for index, (free, total) in enumerate([(held.available, held.total), *cards]):
        subject = f"memory of GPU {index - 1}" if index else "memory"
        yield Finding(OK, subject, f"{machine.size(free)} free of {machine.size(total)}")


def shared_memory() -> Findings:
    """/dev/shm against the needs of NCCL and of the processes that load batches for GPUs."""
    import torch

    if os.path.isdir("/dev/shm"):
        ranks = min(launch.processes_per_node(), torch.cuda.device_count())
        needed = machine.shared_memory_needed(ranks)
        # A batch of a few hundred pairs, for each of a few processes of a rank
        free = shutil.disk_usage("/dev/shm").free
        yield machine.check_shared_memory(free, needed, ranks * GIB)


def disk() -> Findings:
    """Free space against what the preset still needs."""
    from pipeline.fetch import coco

    try:
        sections = params.load_all(Path("params.yaml"))
    except errors.RequestError:  # the stages report it
        return
    fetch = sections["fetch"]
    views = sections["keypoints"].views_per_image
    limit = sections["keypoints"].max_keypoints
    archives = 0 if fetch.path else coco.expect(fetch.source, fetch.limit)[0]
    present = sum(path.stat().st_size for path in Path("data").rglob("*") if path.is_file())
    needed = machine.disk_needed(archives, photographs(fetch), views, limit) - present
    yield machine.check_disk(shutil.disk_usage(".").free, max(needed, 0), os.getcwd())


def photographs(fetch: FetchParams) -> int:
    """Photographs of a preset; of a folder those that `fetch` listed, 0 before it has run."""
    from pipeline.fetch import coco

    if fetch.source == "folder":
        with contextlib.suppress(errors.RequestError):  # missing or damaged: `fetch` writes it
            return len(manifest.read(MANIFEST))
    return coco.expect(fetch.source, fetch.limit)[1]


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
