"""Check whether this machine can run the pipeline: `python -m pipeline.doctor`.

The doctor checks permissions, GPUs, shared memory and disk. The exit code is 0 if the pipeline can
run, and 2 if something prevents it. With `--quick`, which `make repro` runs first, only what
prevents it is printed. If nothing does, the warnings and the free disk space are printed.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import warnings
from pathlib import Path
from typing import Iterator, Optional, Sequence, Tuple

from pipeline import errors, launch, params
from pipeline.fetch import coco, dataset
from superglue_sift.files import GIB, format_bytes

WRITTEN_FOLDERS = (".dvc", "data", "checkpoints", "models", "reports")
GPU_FILE = Path("/dev/nvidia0")
OK = "ok"
NOTE = "note"
WARN = "warn"
FAIL = "FAIL"

# The level (OK, NOTE, WARN or FAIL), what was checked, and the result with the fix
Finding = Tuple[str, str, str]


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Print the findings. Return 0, or 2 if something prevents the work."""
    parser = errors.make_parser("pipeline.doctor", __doc__)
    parser.add_argument("--quick", action="store_true", help="only what would stop the work")
    is_quick = parser.parse_args(argv).quick
    checks = (check_permissions, check_gpus, check_shared_memory, check_disk)
    findings = [finding for check in checks for finding in check()]
    failures = [finding for finding in findings if finding[0] == FAIL]
    if is_quick:
        findings = failures or [
            (level, subject, text)
            for level, subject, text in findings
            if level == WARN or subject == "disk"
        ]
    for level, subject, text in findings:
        stream = sys.stderr if is_quick and failures else sys.stdout
        print(f"{level:5} {subject}: {text}", file=stream)
    return 2 if failures else 0


def check_permissions() -> Iterator[Finding]:
    """Check that this user can write the folders of a run, even after a run of another user."""
    folders = [os.getcwd()]
    folders += [folder for name in WRITTEN_FOLDERS for folder, _, _ in os.walk(name)]
    denied = [folder for folder in folders if not os.access(folder, os.W_OK)]
    if denied:
        fix = (
            f"type `sudo chown -R $(id -u) {shlex.quote(os.getcwd())}`, or use a clone of your own"
        )
        text = f"{', '.join(denied[:3])}: user {os.getuid()} cannot write there: {fix}"
        yield FAIL, "permissions", text


def check_gpus() -> Iterator[Finding]:
    """Run a kernel on each GPU. torch says what is wrong with the driver, the card or the build."""
    import torch

    # Torch warns if the driver is too old for its CUDA.
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        is_usable = torch.cuda.is_available()
    if not is_usable and GPU_FILE.exists():
        reasons = [str(warning.message) for warning in caught_warnings]
        yield FAIL, "GPU", f"torch {torch.__version__} cannot use it: {reasons}"
        return
    if not is_usable:
        yield NOTE, "GPU", "none: training runs on the CPU (docker: --gpus all adds them)"
        return
    # Each process needs a GPU of its own.
    try:
        launch.count_processes_per_node()
    except errors.RequestError as error:
        yield FAIL, "GPU", str(error)
    # A build without kernels for a card fails at the first one.
    for index in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(index)
        try:
            torch.ones(1, dtype=torch.float32, device=f"cuda:{index}").sum().item()
            yield OK, "GPU", f"{name}: usable with torch {torch.__version__}"
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            yield FAIL, "GPU", f"{name}: {reason}: use the other image (docs/containers.md)"


def check_shared_memory() -> Iterator[Finding]:
    """Check /dev/shm against the needs of NCCL and of the processes that load batches for GPUs.

    Docker gives 64 MB by default. NCCL needs that much for each of several GPUs. 1 GiB for each GPU
    holds batches of a few hundred pairs. With less, a thread loads them.
    """
    import torch

    ranks = torch.cuda.device_count()
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    text = f"{format_bytes(free)} free, {format_bytes(ranks * GIB)} wanted"
    if free >= ranks * GIB:
        yield OK, "/dev/shm", text
    else:
        fix = f"docker run --shm-size={ranks}g (or --ipc=host)"
        yield FAIL if ranks > 1 else WARN, "/dev/shm", f"{text}: {fix}"


def check_disk() -> Iterator[Finding]:
    """Check the free space against what the preset still needs.

    A run needs space for the archives, for the keypoints in the workspace and in DVC's cache, and
    1 GiB for checkpoints.
    """
    # OpenCV may not load on a machine that the doctor checks, so this import is not at the top.
    from pipeline.keypoints.store import SIFT_RECORD

    try:
        sections = params.load(Path("params.yaml"))
    except errors.RequestError:  # The stages report this error
        return
    # Estimate the bytes to download and the number of photographs.
    archives, photographs = coco.estimate_download(sections.fetch.source, sections.fetch.limit)
    if sections.fetch.source == "folder":
        # A missing or damaged manifest is written by `fetch`.
        with contextlib.suppress(errors.RequestError):
            photographs = len(dataset.read_manifest(Path("data/images/manifest.csv")))
    # Keypoints are stored twice, in the workspace and in DVC's cache.
    keypoints = sections.keypoints
    # Most photographs give fewer keypoints than the limit. Three quarters of it is a safe mean.
    views = 0.75 * photographs * keypoints.views_per_image
    needed = 2 * int(views * keypoints.max_keypoints * SIFT_RECORD.itemsize) + GIB
    needed += 0 if sections.fetch.path else archives
    # Earlier runs have written a part already.
    needed -= sum(path.stat().st_size for path in Path("data").rglob("*") if path.is_file())
    # Compare with the free space.
    free = shutil.disk_usage(".").free
    space = (
        f"{format_bytes(free)} free in {os.getcwd()}, about {format_bytes(max(needed, 0))} wanted"
    )
    fix = "choose a smaller preset, set fetch.limit, link DVC's cache (docs/data.md), or free space"
    yield (OK, "disk", space) if free >= needed else (FAIL, "disk", f"{space}: {fix}")


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
