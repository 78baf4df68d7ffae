"""Check whether this machine can run the pipeline: `python -m pipeline.doctor`.

The doctor checks the user, the clone, GPUs, shared memory, disk and packages. The exit code is 0 if
the pipeline can run, and 2 if something prevents it. With `--quick`, which `make repro` runs first,
only what prevents it is printed. If nothing does, the warnings and the free disk space are printed.
"""

from __future__ import annotations

import configparser
import contextlib
import getpass
import os
import platform
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Iterator, Optional, Sequence, Tuple

from pipeline import errors, launch, params, provenance
from pipeline.fetch import coco, dataset
from superglue_sift.files import GIB, format_bytes

PACKAGES = (*provenance.PACKAGES, "torchvision", "nvidia-dali-cuda130")
# Files and folders of the clone that a run writes
WRITTEN_PATHS = (".dvc", "data", "checkpoints", "models", "reports", "dvc.lock")
OUTPUT_FOLDERS = ("data", "checkpoints", "reports")  # Folders in which stages have outputs
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
    checks = (
        check_user,
        check_workspace,
        check_permissions,
        check_commit,
        check_gpus,
        check_shared_memory,
        check_disk,
    )
    findings = [finding for check in checks for finding in check()]
    failures = [finding for finding in findings if finding[0] == FAIL]
    if is_quick:
        findings = failures or [
            (level, subject, text)
            for level, subject, text in findings
            if level == WARN or subject == "disk"
        ]
    else:
        findings = [*report_software(), *findings]
    for level, subject, text in findings:
        stream = sys.stderr if is_quick and failures else sys.stdout
        print(f"{level:5} {subject}: {text}", file=stream)
    return 2 if failures else 0


def report_software() -> Iterator[Finding]:
    """Report Python, torch, CUDA, the image, and the packages that decide what works."""
    import torch

    text = f"Python {platform.python_version()}, torch {torch.__version__}"
    image = os.environ.get("IMAGE_STACK", "none")
    yield OK, "software", f"{text}, CUDA {torch.version.cuda or 'none'}, image {image}"
    yield OK, "packages", ", ".join(map(" ".join, provenance.get_versions(PACKAGES).items()))


def check_user() -> Iterator[Finding]:
    """Check that DVC and MLflow find the name and the home of the user, who may have no account."""
    missing = []
    if os.path.expanduser("~") == "~":
        missing.append("HOME=/tmp")
    try:
        getpass.getuser()
    except (KeyError, OSError):  # Python 3.13 raises OSError
        missing.append("USER=user")
    if missing:
        why = f"number {os.getuid()} has no account here, and DVC looks for its home and name"
        yield FAIL, "user", f"{why}: type `export {' '.join(missing)}` (or others)"


def check_workspace() -> Iterator[Finding]:
    """Check that DVC can work here.

    DVC needs a git repository, and refuses outputs behind a link.
    """
    for name in OUTPUT_FOLDERS:
        if Path(name).is_symlink():
            text = (
                f"{name} is a link, and DVC refuses outputs behind one: make {name} a folder, and"
                " keep the large files on the other disk by `dvc config --local cache.dir"
                " /disk/cache` and `dvc config --local cache.type symlink`"
            )
            exception = "; data/archives may be a link" if name == "data" else ""
            yield FAIL, "workspace", text + exception
    # DVC looks for git, unless its own configuration says that there is none.
    config = configparser.ConfigParser(interpolation=None)
    config.read([".dvc/config", ".dvc/config.local"])
    if not find_git_folder() and not config.getboolean("core", "no_scm", fallback=False):
        fix = "type `git init`, or `dvc config --local core.no_scm true`"
        yield FAIL, "workspace", f"no git repository, which DVC looks for: {fix}"


def find_git_folder() -> Optional[Path]:
    """Return the nearest folder upwards that is a git repository, or None."""
    folders = (Path.cwd(), *Path.cwd().parents)
    return next((folder for folder in folders if (folder / ".git").exists()), None)


def check_permissions() -> Iterator[Finding]:
    """Check that this user can write what a run writes, also after a run of another user."""
    existing_paths = [path for name in WRITTEN_PATHS if (path := Path(name)).exists()]
    paths = [Path.cwd(), *existing_paths]
    for path in existing_paths:
        for folder, subfolders, files in os.walk(path):
            paths += [Path(folder, name) for name in subfolders]
            # Only DVC's locks are written in place. Any other file is replaced, for which the user
            # must be able to write into its folder.
            paths += [Path(folder, name) for name in files if folder == ".dvc/tmp"]
    denied = [path for path in paths if not os.access(path, os.W_OK)]
    if denied:
        others = f" and {len(denied) - 1} more" if denied[1:] else ""
        clone = shlex.quote(str(Path.cwd()))
        fix = f"type `sudo chown -R $(id -u) {clone}`, or work in a clone of your own"
        text = f"{denied[0]}{others}: user {os.getuid()} cannot write there: {fix}"
        yield FAIL, "permissions", text


def check_commit() -> Iterator[Finding]:
    """Check that git tells the commit, which a run records."""
    root = find_git_folder()
    if root is None or provenance.read_git_state(root)["commit"] != provenance.UNKNOWN:
        return
    try:
        command = ["git", "-C", str(root), "rev-parse", "HEAD"]
        reason = subprocess.run(command, capture_output=True, text=True, timeout=20).stderr
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(error)
    fix = "install git, and commit once"
    if "dubious ownership" in reason:
        fix = f"type `git config --global --add safe.directory {shlex.quote(str(root))}`"
    reason = reason.partition("\n")[0]
    yield WARN, "git", f"results will not name the commit ({reason}): {fix}"


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
            yield OK, "GPU", f"{name}: usable"
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
    from superglue_sift.features.sift import ORIENTED

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
    needed = 2 * int(views * keypoints.max_keypoints * ORIENTED.itemsize) + GIB
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
