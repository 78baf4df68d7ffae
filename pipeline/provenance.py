"""Record where a result is from: commit, versions, machine, and the photographs of its model.

A list of photographs stands next to the file of each model, so that nobody tests on these
photographs by accident. `best.safetensors` has `best.trained_on.txt`: one photograph a line
(`fetch.dataset.ImageSet.photograph`), including the photographs of the initial weights. The
description inside the model file has the list's digest.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import re
import socket
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Dict, FrozenSet, Iterable, List, Optional, Sequence, Tuple

from superglue_sift import __version__
from superglue_sift.environment import CPU_INFO
from superglue_sift.errors import RequestError
from superglue_sift.files import file_sha256, write_atomic

# Packages that compute keypoints, weights and metrics, under all names by which they are installed.
COMPUTING = (
    "torch",
    "numpy",
    "scipy",
    "opencv-python",
    "opencv-python-headless",
    "opencv-contrib-python",
)
PACKAGES = (*COMPUTING, "safetensors", "dvc", "mlflow", "nvidia-dali-cuda110")
# Variables of the container's image. A run has them as parameters, such as `image.digest`.
VARIABLES = ("IMAGE_DIGEST", "IMAGE_STACK", "IMAGE_REVISION")
PHOTOGRAPHS_KEY = "trained_on"  # key of the digest in a model's description
UNKNOWN = "unknown"  # the only line of a list that is not known
TITLE = (
    "# Photographs the weights were trained on: COCO's number, or CRC-32 and bytes of the file.\n"
)


def repo_root() -> Path:
    """Return the folder of dvc.yaml (or .git): DVC_ROOT, or the nearest one upwards."""
    here = Path.cwd()
    # DVC sets DVC_ROOT for its stages, also in a copy of the clone.
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
    # The state of dvc.lock and the reports does not count: they change while the pipeline runs.
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
    # An image says of which commit it was built.
    if not (root / ".git").exists():
        return os.environ.get("IMAGE_REVISION") or __version__
    git = git_state(root)
    return git["commit"][:12] + ("+" if git["dirty"] == "true" else "")


@functools.cache
def code_digests(stage: str) -> Dict[str, str]:
    """Return a digest of each Python file on which a stage depends, as dvc.yaml lists them.

    Raises:
        RequestError: If there is no dvc.yaml beside this code.
    """
    from ruamel.yaml import YAML

    root = Path(__file__).resolve().parents[1]
    try:
        tree = YAML(typ="safe", pure=True).load((root / "dvc.yaml").read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"{root / 'dvc.yaml'}: cannot be read: {error.strerror}") from None
    paths = [root / name for name in tree["stages"][stage]["deps"]]
    files = [path for path in paths if path.suffix == ".py"]
    files += [file for path in paths if not path.suffix for file in path.rglob("*.py")]
    return {file.relative_to(root).as_posix(): file_sha256(file)[:16] for file in sorted(files)}


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
    """Return vendor and model of the processor, or "" if they are not known.

    An example is "AuthenticAMD, AMD EPYC 7742".
    """
    # The file repeats both lines for each core.
    text = CPU_INFO.read_text(encoding="utf-8", errors="replace") if CPU_INFO.is_file() else ""
    found = re.findall(r"^(vendor_id|model name)\s*: *(.*\S)", text, re.MULTILINE)
    return ", ".join(dict(found).values())


def machine() -> Dict[str, str]:
    """Return machine, image and versions by name.

    A name without a value is left out, such as `gpus` on a machine without a GPU.
    """
    import torch

    # Each GPU has a name, such as in "NVIDIA H100, NVIDIA H100".
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


# --- the photographs that a model was trained on


def photographs_file(model: Path) -> Path:
    """Return the file of the list, next to the file of the model."""
    return model.with_suffix(f".{PHOTOGRAPHS_KEY}.txt")


def photographs_digest(photographs: Iterable[str]) -> str:
    """Return a digest (16 hexadecimal digits) of a list, the same for any order."""
    return hashlib.sha256("\n".join(sorted(photographs)).encode()).hexdigest()[:16]


def write_photographs(model: Path, photographs: Optional[Iterable[str]]) -> None:
    """Write the list of a model atomically, or that it is unknown if `photographs` is None.

    The same photographs give the same bytes in any order.
    """
    lines = [UNKNOWN]
    if photographs is not None:
        lines = sorted(photographs, key=lambda name: (len(name), name))
    write_atomic(photographs_file(model), TITLE + "".join(f"{line}\n" for line in lines))


def read_photographs(model: Path) -> Optional[FrozenSet[str]]:
    """Read the photographs that a model was trained on. Returns None if they are not known.

    Raises:
        RequestError: If the list belongs to another model.
    """
    from superglue_sift.network.weights import BadCheckpoint, load_model_file

    path = photographs_file(model)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    # Each line is a photograph, or the word `unknown`.
    photographs = frozenset(line for line in lines if line and not line.startswith("#"))
    if UNKNOWN in photographs:
        return None
    # The model states the digest of its list.
    try:
        stated = load_model_file(model)[1].get(PHOTOGRAPHS_KEY)
    except (FileNotFoundError, BadCheckpoint):  # this error is reported where the model is loaded
        stated = None
    if stated is not None and stated != photographs_digest(photographs):
        raise RequestError(
            f"{path}: is not the list of {model.name}; put the one back that was written with it"
        )
    return photographs


def leave_out_photographs(
    model: Path, photographs: Sequence[str], keep: bool, title: str
) -> Tuple[List[int], str]:
    """Leave out the photographs that a model was trained on.

    Args:
        keep: whether to keep them, and only say how many there are.
        title: name of the model in the message.

    Returns:
        The indices of the photographs that stay, and a message. It is "" if the model was trained
        on none of the photographs.
    """
    every = list(range(len(photographs)))
    known = read_photographs(model)
    if known is None:
        listed = photographs_file(model).is_file()
        why = "its training did not know either" if listed else "it has no list"
        return every, f"what {model.name} was trained on is not known ({why}): none is left out"
    # The photographs that the model has not seen.
    left = [place for place in every if photographs[place] not in known]
    count = f"{len(every) - len(left)} of {len(every)} photographs"
    if len(left) == len(every):
        return every, ""
    if keep:
        return every, f"{count} are from the training of {title}"
    return left, f"{count} left out: {title} was trained on them"
