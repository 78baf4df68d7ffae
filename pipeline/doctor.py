"""Check this machine before the work; with `--quick`, as in `make repro`, what would stop it.

Driver, GPUs, memory, shared memory, disk, packages, and whether MLflow answers. Exit code 0 if the
work can start, 2 if something prevents it.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import os
import platform
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from importlib import metadata
from pathlib import Path
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

from pipeline import errors, launch, tracking
from pipeline.image_sets import manifest
from pipeline.processes import machine
from pipeline.processes.machine import FAIL, NOTE, OK, WARN, Finding

SECONDS = 3.0
MIN_OPEN_FILES = 256
QUICK = ("gpus", "shared_memory", "user", "open_files", "disk")
PACKAGES = (
    "numpy",
    "opencv-python",
    "torchvision",
    "dvc",
    "mlflow",
    "nvidia-dali-cuda110",
    "nvidia-dali-cuda130",
)
MANIFEST = Path("data/images/manifest.csv")


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Print the findings; 0 or 2."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.doctor", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument(
        "--quick", action="store_true", help="only what would stop the work, without the network"
    )
    options = parser.parse_args(argv)
    found: List[Tuple[str, Finding]] = []
    checks = (software, packages, gpus, memory, shared_memory, user, open_files, git, mlflow, disk)
    for check in [check for check in checks if not options.quick or check.__name__ in QUICK]:
        found += [(check.__name__, finding) for finding in guarded(check)]
    failed = machine.worst([finding for _, finding in found]) == FAIL
    for name, finding in found:
        wrong = options.quick and finding.level == FAIL
        if wrong or not options.quick or (name == "disk" and not failed):
            line = f"{finding.level:5} {finding.subject}: {finding.text}"
            print(line, file=sys.stderr if wrong else sys.stdout)
    return 2 if failed else 0


def guarded(check: Callable[[], Iterator[Finding]]) -> List[Finding]:
    """The findings of a check; an exception becomes a warning."""
    try:
        return list(check())
    except errors.RequestError as error:
        return [Finding(FAIL, check.__name__.replace("_", " "), str(error))]
    except Exception as error:  # of any kind, on an unusual machine
        return [
            Finding(
                WARN,
                check.__name__.replace("_", " "),
                f"not checked: {type(error).__name__}: {error}",
            )
        ]


def software() -> Iterator[Finding]:
    """Python, torch, CUDA, image."""
    import torch

    image = os.environ.get("IMAGE_STACK", "none")
    cuda = torch.version.cuda or "none"
    versions = (
        f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {cuda}, image {image}"
    )
    yield Finding(OK, "software", versions)


def packages() -> Iterator[Finding]:
    """Versions of the packages of the locks that decide what works; DALI only where it is
    installed.
    """
    found = []
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    yield Finding(OK, "packages", ", ".join(found) or "none of " + ", ".join(PACKAGES))


def gpus() -> Iterator[Finding]:
    """Cards against the torch build, the driver, and the number of processes asked for."""
    import torch

    driver, known = nvidia_driver()
    cuda = torch.version.cuda
    if driver and cuda:
        yield machine.check_driver(driver, cuda)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    processes = os.environ.get("NPROC_PER_NODE", "auto")
    yield machine.check_gpu_count(count, processes, known, cuda)
    for index in range(count):
        name = torch.cuda.get_device_name(index)
        capability = torch.cuda.get_device_capability(index)
        yield machine.check_capability(name, capability, torch.cuda.get_arch_list(), cuda or "none")


def memory() -> Iterator[Finding]:
    """Memory of the machine and of each GPU."""
    import psutil
    import torch

    held = psutil.virtual_memory()
    yield Finding(
        OK, "memory", f"{machine.size(held.available)} free of {machine.size(held.total)}"
    )
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        yield Finding(
            OK, f"memory of GPU {index}", f"{machine.size(free)} free of {machine.size(total)}"
        )


def nvidia_driver() -> tuple[str, int]:
    """Driver version and number of GPUs; ("", 0) without a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        return (
            version.decode() if isinstance(version, bytes) else version
        ), pynvml.nvmlDeviceGetCount()
    except Exception:  # NVML's own error types, one of them for "no driver"
        return "", 0


def sections() -> dict:
    """The sections of params.yaml; {} if it cannot be read (the stages report why)."""
    from pipeline.parameters import params

    try:
        return params.load_all(Path("params.yaml"))
    except errors.RequestError:
        return {}


def shared_memory() -> Iterator[Finding]:
    """/dev/shm against the needs of ranks on GPUs and of the processes that load batches."""
    import torch

    if os.path.isdir("/dev/shm"):
        gpus = min(launch.processes_per_node(), torch.cuda.device_count())
        needed = machine.shared_memory_needed(gpus)
        yield machine.check_shared_memory(
            shutil.disk_usage("/dev/shm").free, needed, shared_by_loader(gpus)
        )


def shared_by_loader(gpus: int) -> int:
    """Bytes of /dev/shm for the processes that load batches, by params.yaml; 0 with a thread."""
    from pipeline.train import setup
    from pipeline.train.pairs import workers
    from superglue_sift.sift import ORIENTED

    known = sections()
    if not {"keypoints", "train"} <= set(known) or known["train"].loader != "plain":
        return 0
    train = known["train"]
    ranks = setup.processes(known["train"], launch.processes_per_node())
    wanted = workers.wanted(gpus > 0, ranks)
    limit = min(train.max_keypoints, known["keypoints"].max_keypoints)
    pairs = -(-setup.global_batch(train, ranks) // ranks)
    step = workers.StepSize(pairs, limit, ORIENTED.itemsize, train.accumulate)
    return ranks * workers.Plan(wanted, workers.AHEAD).shared(step)


def disk() -> Iterator[Finding]:
    """Free space against what the preset still needs."""
    from pipeline.fetch import coco

    known = sections()
    if "fetch" not in known or "keypoints" not in known:
        return
    keypoints = known["keypoints"]
    fetch = known["fetch"]
    expected = coco.expected(fetch.source, fetch.limit)[0], photographs(fetch)
    needed, linked = (
        machine.disk_needed(*expected, keypoints.views_per_image, keypoints.max_keypoints, n)
        for n in (2, 1)
    )
    present = sum(path.stat().st_size for path in Path("data").rglob("*") if path.is_file())
    needed = max(needed - present, 0)
    linked = max(linked - present, 0)
    yield machine.check_disk(shutil.disk_usage(".").free, needed, os.getcwd(), linked)


def photographs(fetch: Any) -> int:
    """Number of photographs of a preset; of a folder those that `fetch` listed, 0 before it has
    run.
    """
    from pipeline.fetch import coco

    if fetch.source == "folder":
        with contextlib.suppress(errors.RequestError):  # missing or damaged: `fetch` writes it
            return len(manifest.read(MANIFEST))
    return coco.expected(fetch.source, fetch.limit)[1]


def user() -> Iterator[Finding]:
    """The user, and whether the folder is writable."""
    uid = os.getuid()
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        yield Finding(FAIL, "user", f"uid {uid} has no name, which DVC needs: set USER to any name")
        return
    if not os.access(".", os.W_OK):
        yield Finding(
            FAIL,
            "user",
            f"{os.getcwd()} cannot be written by {name}: docker run --user $(id -u):$(id -g)",
        )
    elif uid == 0 and os.environ.get("IMAGE_STACK") and os.stat(".").st_uid != 0:
        yield Finding(
            WARN,
            "user",
            "root writes files that their owner cannot change: --user $(id -u):$(id -g)",
        )
    else:
        yield Finding(OK, "user", f"{name} (uid {uid}) can write here")


def open_files() -> Iterator[Finding]:
    """The limit on open files."""
    import resource

    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    fix = "ulimit -n 4096, or docker run --ulimit nofile=4096"
    enough = soft >= MIN_OPEN_FILES
    text = f"limit {soft}" if enough else f"limit {soft}, {MIN_OPEN_FILES} wanted: {fix}"
    yield Finding(OK if enough else FAIL, "open files", text)


def git() -> Iterator[Finding]:
    """Whether git works: it gives a run its commit."""
    if shutil.which("git") is None:
        yield Finding(WARN, "git", "not installed: runs will not name their commit")
        return
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=20)
    if done.returncode == 0:
        yield Finding(OK, "git", f"at commit {done.stdout.strip()[:12]}")
    elif "dubious ownership" in done.stderr:
        yield Finding(WARN, "git", f"git config --global --add safe.directory {os.getcwd()}")
    else:
        yield Finding(NOTE, "git", "no repository here: runs will not name their commit")


def mlflow() -> Iterator[Finding]:
    """Whether the tracking store can be reached."""
    uri = tracking.redact(tracking.tracking_uri())
    if not uri.startswith(("http://", "https://")):
        folder = Path(uri.partition("///")[2]).resolve().parent
        fine = os.access(str(folder), os.W_OK)
        yield Finding(
            OK if fine else WARN,
            "MLflow",
            f"{uri}{'' if fine else ': the folder cannot be written'}",
        )
        return
    address = f"{uri}/api/2.0/mlflow/experiments/get?experiment_id=0"
    try:
        with urllib.request.urlopen(address, timeout=SECONDS) as answer:
            yield machine.check_tracking(uri, answer.status, "")
    except urllib.error.HTTPError as error:
        yield machine.check_tracking(uri, error.code, "")
    except OSError as error:
        yield machine.check_tracking(uri, None, str(getattr(error, "reason", error)))


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
