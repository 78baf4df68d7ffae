"""Where a result came from: commit, lock, versions, machine. Everything a second run would need."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, Optional

from pipeline.files import file_sha256

PACKAGES = ("torch", "numpy", "scipy", "opencv-python", "safetensors", "dvc", "mlflow", "nvidia-dali-cuda110")

WEIGHTY = ("torch", "numpy", "opencv-python")  # of PACKAGES, those that compute keypoints and weights


def repo_root(start: Optional[Path] = None) -> Path:
    """The folder that holds dvc.yaml, also inside the temporary copies of `dvc exp run --temp`.

    DVC names it in DVC_ROOT; else it is the nearest folder upwards with a dvc.yaml or .git; else `start`.
    """
    if start is None and os.environ.get("DVC_ROOT"):
        return Path(os.environ["DVC_ROOT"]).resolve()
    here = (Path.cwd() if start is None else Path(start)).resolve()
    for folder in (here, *here.parents):
        if (folder / "dvc.yaml").is_file() or (folder / ".git").exists():
            return folder
    return here


def main_root(start: Optional[Path] = None) -> Path:
    """The person's own clone: like `repo_root`, but an experiment's temporary copy leads back to it.

    DVC runs queued experiments in `<clone>/.dvc/tmp/exps/<name>`; what must outlive such a copy (the tracking
    store) belongs to the clone.
    """
    root = repo_root(start)
    parts = root.parts
    for at in range(len(parts) - 2, 0, -1):
        if parts[at : at + 3] == (".dvc", "tmp", "exps"):
            return Path(*parts[:at])
    return root


def git_state(root: Optional[Path] = None) -> Dict[str, str]:
    """{"commit": hex or "unknown", "dirty": "true" | "false" | "unknown"} of the clone at `root`."""
    folder = repo_root() if root is None else root
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return {"commit": "unknown", "dirty": "unknown"}
    # dvc.lock and the reports change while the pipeline runs; they say nothing about the code that runs.
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!dvc.lock", ":!reports")
    return {"commit": commit, "dirty": "unknown" if changed is None else str(bool(changed)).lower()}


def _git(folder: Path, *args: str) -> Optional[str]:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *args], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else None


def versions() -> Dict[str, str]:
    """Installed versions of what can change a number, without importing any of it."""
    from importlib import metadata

    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def pinned_versions() -> Dict[str, str]:
    """{"version.torch": "2.13.0", ...} of what can change a weight, for a file that is the same in every clone.

    Without the build behind a `+`: the CPU file and the CUDA file of one version give the same on one CPU.
    """
    found = versions()
    return {f"version.{name}": found[name].partition("+")[0] for name in WEIGHTY if name in found}


def gpu_names() -> List[str]:
    """Names of the CUDA devices this process can use."""
    torch = sys.modules.get("torch")
    if torch is None:
        import torch
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def provenance(root: Optional[Path] = None) -> Dict[str, str]:
    """Flat tags, strings only, for a run in MLflow, a checkpoint or an exported model.

    Keys with no value here (not under DVC, no GPU, no image) are left out.
    """
    folder = repo_root() if root is None else root
    git, lock = git_state(folder), folder / "dvc.lock"
    tags = {
        "git.commit": git["commit"],
        "git.dirty": git["dirty"],
        "dvc.lock.sha256": file_sha256(lock) if lock.is_file() else "",
        "dvc.stage": os.environ.get("DVC_STAGE", ""),
        "dvc.exp_name": os.environ.get("DVC_EXP_NAME", ""),
        "dvc.exp_baseline_rev": os.environ.get("DVC_EXP_BASELINE_REV", ""),
        "image.digest": os.environ.get("IMAGE_DIGEST", ""),
        "image.stack": os.environ.get("IMAGE_STACK", ""),
        "image.revision": os.environ.get("IMAGE_REVISION", ""),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "gpus": ", ".join(gpu_names()),
        "world_size": os.environ.get("WORLD_SIZE", "1"),
    }
    tags.update({f"version.{name}": version for name, version in versions().items()})
    return {key: value for key, value in tags.items() if value}
