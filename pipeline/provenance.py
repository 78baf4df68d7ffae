"""Record where a result comes from: commit, versions, machine, and the photographs of its model.

A list of photographs stands next to the file of each model, so that nobody tests on these
photographs by accident. Next to `best.safetensors` is `best.trained_on.txt`. It has one photograph
a line (`ImageSet.identify_photograph`), and includes the photographs of the initial weights.
The description inside the model file has the digest of the list.
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
from typing import Any, Dict, FrozenSet, Iterable, List, Mapping, Optional, Sequence, Tuple

from superglue_sift.environment import CPU_INFO
from superglue_sift.errors import RequestError
from superglue_sift.files import compute_file_sha256, compute_json_digest, write_atomically

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
# Variables of the container's image. A run has them as parameters, such as `image.revision`.
VARIABLES = ("IMAGE_STACK", "IMAGE_REVISION")
PHOTOGRAPHS_KEY = "trained_on"  # Key of the digest in a model's description
UNKNOWN = "unknown"  # The only line of the list if the photographs are not known
TITLE = (
    "# Photographs the weights were trained on: COCO's number, or CRC-32 and bytes of the file.\n"
)


def find_repository() -> Path:
    """Return DVC_ROOT, or the nearest folder upwards that has dvc.yaml or .git.

    If there is no such folder, return the current one.
    """
    # DVC sets DVC_ROOT for its stages, also in a copy of the clone.
    if os.environ.get("DVC_ROOT"):
        return Path(os.environ["DVC_ROOT"]).resolve()
    current = Path.cwd()
    for folder in (current, *current.parents):
        if (folder / "dvc.yaml").is_file() or (folder / ".git").exists():
            return folder
    return current


def find_clone() -> Path:
    """Return the user's clone, for files that outlive DVC's copies (`.dvc/tmp/exps/<name>`)."""
    return Path(str(find_repository()).partition("/.dvc/tmp/exps/")[0])


def read_git_state(root: Optional[Path] = None) -> Dict[str, str]:
    """Ask git for the commit of a clone, and whether files differ from it.

    Args:
        root: the folder of the clone. If None, that of `find_repository`.

    Returns:
        `commit` is hexadecimal or "unknown". `dirty` is "true", "false" or "unknown".
    """
    git = ["git", "-C", str(root or find_repository())]
    # The state of dvc.lock and the reports does not count: they change while the pipeline runs.
    options = ["--untracked-files=no", "--", ".", ":!dvc.lock", ":!reports"]
    try:
        commit, changed = (
            subprocess.check_output(
                [*git, *words], stderr=subprocess.DEVNULL, timeout=20, text=True
            )
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", *options])
        )
    except (OSError, subprocess.SubprocessError):
        return {"commit": "unknown", "dirty": "unknown"}
    return {"commit": commit.strip(), "dirty": str(bool(changed)).lower()}


@functools.cache
def compute_code_digest(stage: str) -> str:
    """Return 16 hexadecimal digits of the Python files on which a stage depends, by dvc.yaml."""
    from ruamel.yaml import YAML

    root = Path(__file__).resolve().parents[1]
    tree = YAML(typ="safe", pure=True).load((root / "dvc.yaml").read_text(encoding="utf-8"))
    paths = [root / name for name in tree["stages"][stage]["deps"]]
    files = [path for path in paths if path.suffix == ".py"]
    files += [file for path in paths if not path.suffix for file in path.rglob("*.py")]
    return compute_json_digest(
        {file.relative_to(root).as_posix(): compute_file_sha256(file) for file in files}
    )


def get_versions(packages: Sequence[str]) -> Dict[str, str]:
    """Return the versions of those packages that are installed, without importing them."""
    installed = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


def get_release_versions(packages: Sequence[str]) -> Dict[str, str]:
    """Return the versions of installed packages without the build, such as `+cu130`.

    Results on a CPU do not depend on the build.
    """
    return {name: version.partition("+")[0] for name, version in get_versions(packages).items()}


def read_processor() -> str:
    """Read vendor and model of the processor, such as "AuthenticAMD, AMD EPYC 7742".

    The result is "" if they are not known.
    """
    text = CPU_INFO.read_text(encoding="utf-8", errors="replace") if CPU_INFO.is_file() else ""
    lines = re.findall(r"^(vendor_id|model name)\s*: *(.*\S)", text, re.MULTILINE)
    # The file repeats both lines for each core, of which the dict keeps one.
    return ", ".join(dict(lines).values())


def describe_machine() -> Dict[str, str]:
    """Return the properties of machine and image, and the versions of packages, by name.

    A name without a value is left out, such as `gpus` on a machine without a GPU.
    """
    import torch

    gpu_names = map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
    properties = {
        **{name.lower().replace("_", "."): os.environ.get(name, "") for name in VARIABLES},
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "processor": read_processor(),
        "gpus": ", ".join(gpu_names),
        "version.python": platform.python_version(),
        **{f"version.{name}": version for name, version in get_versions(PACKAGES).items()},
    }
    return {key: value for key, value in properties.items() if value}


# --- the photographs that a model was trained on


def get_photographs_path(model: Path) -> Path:
    """Return the path of the list of photographs, next to the file of the model."""
    return model.with_suffix(f".{PHOTOGRAPHS_KEY}.txt")


def compute_photographs_digest(photographs: Iterable[str]) -> str:
    """Return a digest (16 hexadecimal digits) of photographs, the same for any order."""
    return hashlib.sha256("\n".join(sorted(photographs)).encode()).hexdigest()[:16]


def write_photographs(model: Path, photographs: Optional[Iterable[str]]) -> None:
    """Write the list of the photographs on which a model was trained.

    The same photographs give the same bytes in any order.

    Args:
        model: the file of the model.
        photographs: the photographs, or None if they are not known.
    """
    lines = [UNKNOWN]
    if photographs is not None:
        lines = sorted(photographs, key=lambda name: (len(name), name))
    write_atomically(get_photographs_path(model), TITLE + "".join(f"{line}\n" for line in lines))


def read_photographs(
    model: Path, info: Optional[Mapping[str, Any]] = None
) -> Optional[FrozenSet[str]]:
    """Read the photographs on which a model was trained. Return None if they are not known.

    Args:
        model: the file of the model.
        info: the description in this file. If None, it is read.

    Raises:
        RequestError: If the list belongs to another model.
    """
    from superglue_sift.network.weights import BadCheckpoint, load_model_file

    path = get_photographs_path(model)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    # Each line is a photograph, or the word `unknown`.
    photographs = frozenset(line for line in lines if line and not line.startswith("#"))
    if UNKNOWN in photographs:
        return None
    # The model file has the digest of its list.
    try:
        info = load_model_file(model).info if info is None else info
    except (FileNotFoundError, BadCheckpoint):  # This error is reported where the model is loaded
        info = {}
    digest = info.get(PHOTOGRAPHS_KEY)
    if digest is not None and digest != compute_photographs_digest(photographs):
        raise RequestError(
            f"{path}: is not the list of {model.name}; put the one back that was written with it"
        )
    return photographs


def leave_out_photographs(
    model: Path,
    photographs: Sequence[str],
    keep: bool,
    title: str,
    info: Optional[Mapping[str, Any]] = None,
    purpose: str = "",
) -> Tuple[List[int], str]:
    """Leave out the photographs on which a model was trained.

    Args:
        model: the file of the model.
        photographs: the photographs, as in the list of the model.
        keep: whether to keep them all, and only say how many are from the training.
        title: name of the model in the message.
        info: the description in the model's file. If None, it is read.
        purpose: what the photographs are for, such as "validation", if one of them has to stay.

    Returns:
        The indices of the photographs that stay, and a message. The message is "" if the model was
        trained on none of the photographs.

    Raises:
        RequestError: If the model was trained on all of the photographs, and there is a `purpose`.
    """
    indices = list(range(len(photographs)))
    trained_on = read_photographs(model, info)
    if trained_on is None:
        has_list = get_photographs_path(model).is_file()
        reason = "its training did not know either" if has_list else "it has no list"
        message = f"what {model.name} was trained on is not known ({reason}): none is left out"
        return indices, message
    unseen = [index for index in indices if photographs[index] not in trained_on]
    count = f"{len(indices) - len(unseen)} of {len(indices)} photographs"
    if len(unseen) == len(indices):
        return indices, ""
    if keep:
        return indices, f"{count} are from the training of {title}"
    if not unseen and purpose:
        raise RequestError(
            f"{model}: was trained on all of the {len(indices)} {purpose} photographs; hold out"
            " others (fetch.val_path, VAL_IMAGES), train from scratch (train.init_from: ''), or"
            " keep them with run.allow_training_images: true"
        )
    return unseen, f"{count} left out: {title} was trained on them"
