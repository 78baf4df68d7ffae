"""Provenance of a result: commit, lock, versions, machine."""

from __future__ import annotations

import functools
import os
import platform
import socket
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Dict, Optional, Sequence

from pipeline.files import file_sha256
from superglue_sift import __version__

PACKAGES = (
    "torch",
    "numpy",
    "scipy",
    "opencv-python",
    "safetensors",
    "dvc",
    "mlflow",
    "nvidia-dali-cuda110",
)

# Of PACKAGES, those that compute keypoints and weights
WEIGHTY = ("torch", "numpy", "opencv-python")

# Packages that compute keypoints, weights and metrics, under all names by which they are installed.
COMPUTING = (
    "torch",
    "numpy",
    "scipy",
    "opencv-python",
    "opencv-python-headless",
    "opencv-contrib-python",
)


def repo_root(start: Optional[Path] = None) -> Path:
    """The folder of dvc.yaml (or .git), also in `dvc exp run --temp`'s copies: DVC_ROOT, or the
    nearest upwards.
    """
    if start is None and os.environ.get("DVC_ROOT"):
        return Path(os.environ["DVC_ROOT"]).resolve()
    here = Path(start or ".").resolve()
    for folder in (here, *here.parents):
        if (folder / "dvc.yaml").is_file() or (folder / ".git").exists():
            return folder
    return here


def main_root(start: Optional[Path] = None) -> Path:
    """The user's clone, for files that outlive DVC's temporary copies (`.dvc/tmp/exps/<name>`)."""
    root = repo_root(start)
    clone, exps, _ = str(root).partition("/.dvc/tmp/exps/")
    return Path(clone) if exps else root


def git_state(root: Optional[Path] = None) -> Dict[str, str]:
    """{"commit": hex or "unknown", "dirty": "true" | "false" | "unknown"} of the clone at
    `root`.
    """
    folder = repo_root() if root is None else root
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return {"commit": "unknown", "dirty": "unknown"}
    # dvc.lock and the reports change while the pipeline runs; they are not code.
    changed = _git(
        folder,
        "status",
        "--porcelain",
        "--untracked-files=no",
        "--",
        ".",
        ":!dvc.lock",
        ":!reports",
    )
    return {"commit": commit, "dirty": "unknown" if changed is None else str(bool(changed)).lower()}


@functools.lru_cache(maxsize=1)
def code_version() -> str:
    """The commit of this code, with a + if files differ from it; of an installed package its
    version.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return os.environ.get("IMAGE_REVISION") or __version__
    git = git_state(root)
    return git["commit"][:12] + ("+" if git["dirty"] == "true" else "")


def _git(folder: Path, *args: str) -> Optional[str]:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else None


def versions(packages: Sequence[str]) -> Dict[str, str]:
    """Versions of those packages that are installed, without importing them."""
    found = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def pinned(packages: Sequence[str]) -> Dict[str, str]:
    """`versions` without the build after a `+`: on one CPU, CPU and CUDA builds of one version
    compute the same.
    """
    return {name: version.partition("+")[0] for name, version in versions(packages).items()}


def provenance(root: Optional[Path] = None) -> Dict[str, str]:
    """Tags for a run in MLflow, as strings; without those that have no value here (no DVC, GPU or
    image).
    """
    import torch

    folder = repo_root() if root is None else root
    git = git_state(folder)
    lock = folder / "dvc.lock"
    cards = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    of_process = {
        "dvc.stage": "DVC_STAGE",
        "dvc.exp_name": "DVC_EXP_NAME",
        "dvc.exp_baseline_rev": "DVC_EXP_BASELINE_REV",
    }
    of_process.update(
        {f"image.{name}": f"IMAGE_{name.upper()}" for name in ("digest", "stack", "revision")}
    )
    tags = {
        "git.commit": git["commit"],
        "git.dirty": git["dirty"],
        "dvc.lock.sha256": file_sha256(lock) if lock.is_file() else "",
        **{name: os.environ.get(name.upper().replace(".", "_"), "") for name in of_process},
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "gpus": ", ".join(torch.cuda.get_device_name(index) for index in cards),
        "world_size": os.environ.get("WORLD_SIZE", "1"),
        "version.python": platform.python_version(),
    }
    tags.update({f"version.{name}": version for name, version in versions(PACKAGES).items()})
    return {key: value for key, value in tags.items() if value}
