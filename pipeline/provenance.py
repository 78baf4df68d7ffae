"""Provenance of a result: commit, lock, versions, machine."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import socket
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Dict, Optional, Sequence

from superglue_sift import __version__
from superglue_sift.environment import CPU_INFO

# Packages that compute keypoints, weights and metrics, under all names by which they are installed
COMPUTING = (
    "torch",
    "numpy",
    "scipy",
    "opencv-python",
    "opencv-python-headless",
    "opencv-contrib-python",
)
PACKAGES = (*COMPUTING, "safetensors", "dvc", "mlflow", "nvidia-dali-cuda110")
# Variables of the image that become parameters of a run, in lower case and with a dot
VARIABLES = ("IMAGE_DIGEST", "IMAGE_STACK", "IMAGE_REVISION")


def repo_root() -> Path:
    """Return the folder of dvc.yaml (or .git): DVC_ROOT, or the nearest one upwards."""
    here = Path.cwd()
    # DVC sets it for its stages, also in a copy of the clone
    if os.environ.get("DVC_ROOT"):
        return Path(os.environ["DVC_ROOT"]).resolve()
    folders = (here, *here.parents)
    roots = (at for at in folders if (at / "dvc.yaml").is_file() or (at / ".git").exists())
    return next(roots, here)


def main_root() -> Path:
    """Return the user's clone, for files that outlive DVC's copies (`.dvc/tmp/exps/<name>`)."""
    return Path(str(repo_root()).partition("/.dvc/tmp/exps/")[0])


def git_state(root: Optional[Path] = None) -> Dict[str, str]:
    """Return the commit of the clone `root`, and whether files differ from it.

    The result is {"commit": hex or "unknown", "dirty": "true", "false" or "unknown"}.
    """
    git = ["git", "-C", str(root or repo_root())]
    # The state of dvc.lock and the reports does not count: they change while the pipeline runs
    code = ["--untracked-files=no", "--", ".", ":!dvc.lock", ":!reports"]
    try:
        commit, changed = (
            subprocess.check_output(
                [*git, *words], stderr=subprocess.DEVNULL, timeout=20, text=True
            )
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", *code])
        )
    except (OSError, subprocess.SubprocessError):
        return {"commit": "unknown", "dirty": "unknown"}
    return {"commit": commit.strip(), "dirty": str(bool(changed)).lower()}


@functools.lru_cache(maxsize=1)
def code_version() -> str:
    """Return the commit of this code, with a + if files differ from it.

    An installed package has no commit. Return its version instead.
    """
    root = Path(__file__).resolve().parents[1]
    # an image says of which commit it was built
    if not (root / ".git").exists():
        return os.environ.get("IMAGE_REVISION") or __version__
    git = git_state(root)
    return git["commit"][:12] + ("+" if git["dirty"] == "true" else "")


def versions(packages: Sequence[str]) -> Dict[str, str]:
    """Return the versions of those packages that are installed, without importing them."""
    found = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def pin(packages: Sequence[str]) -> Dict[str, str]:
    """Return `versions` without the build after a `+`, on which results on a CPU do not depend."""
    return {name: version.partition("+")[0] for name, version in versions(packages).items()}


def processor() -> str:
    """Return vendor and model of the processor: "AuthenticAMD, AMD EPYC 7742". It is "" if
    unknown."""
    # the file repeats both lines for each core
    text = CPU_INFO.read_text(encoding="utf-8", errors="replace") if CPU_INFO.is_file() else ""
    found = re.findall(r"^(vendor_id|model name)\s*: *(.*\S)", text, re.MULTILINE)
    return ", ".join(dict(found).values())


def machine() -> Dict[str, str]:
    """Return machine, image and versions, without what has no value (no GPU or image)."""
    import torch

    # one name for each GPU, such as "NVIDIA H100, NVIDIA H100"
    cards = map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
    found = {
        **{name.lower().replace("_", "."): os.environ.get(name, "") for name in VARIABLES},
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "processor": processor(),
        "gpus": ", ".join(cards),
        "version.python": platform.python_version(),
        **{f"version.{name}": version for name, version in versions(PACKAGES).items()},
    }
    return {key: value for key, value in found.items() if value}
