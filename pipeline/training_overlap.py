"""The overlap of training and test: which photographs a model was trained on.

A list stands next to the file of each model, so that nobody tests on these photographs by accident.
`best.safetensors` has `best.trained_on.txt`: one photograph a line
(`fetch.dataset.Entry.photograph`), including the photographs of the initial weights. The
description inside the model file has the list's digest.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import FrozenSet, Iterable, List, Optional, Sequence, Tuple

from pipeline.errors import RequestError
from pipeline.files import write_atomic
from superglue_sift.network.weights import BadCheckpoint, load_model_file

KEY = "trained_on"  # key of the digest in a model's description
_UNKNOWN = "unknown"
_TITLE = (
    "# Photographs the weights were trained on: COCO's number, or CRC-32 and bytes of the file.\n"
)


def list_of(model: Path) -> Path:
    """Return the file of the list, next to the file of the model."""
    return model.with_suffix(f".{KEY}.txt")


def digest(photographs: Iterable[str]) -> str:
    """Return a digest (16 hexadecimal digits) of a list, the same for any order."""
    return hashlib.sha256("\n".join(sorted(photographs)).encode()).hexdigest()[:16]


def write(model: Path, photographs: Optional[Iterable[str]]) -> None:
    """Write the list of a model atomically, or that it is unknown if `photographs` is None.

    The same photographs give the same bytes in any order.
    """
    lines = [_UNKNOWN]
    if photographs is not None:
        lines = sorted(photographs, key=lambda name: (len(name), name))
    write_atomic(list_of(model), _TITLE + "".join(f"{line}\n" for line in lines))


def read(model: Path) -> Optional[FrozenSet[str]]:
    """Read the photographs that a model was trained on. Returns None if they are not known.

    Raises RequestError if the list belongs to another model.
    """
    path = list_of(model)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    # a line for each photograph, or `unknown`
    photographs = frozenset(line for line in lines if line and not line.startswith("#"))
    if _UNKNOWN in photographs:
        return None
    # the model states the digest of its list
    try:
        stated = load_model_file(model)[1].get(KEY)
    except (FileNotFoundError, BadCheckpoint):  # this error is reported where the model is loaded
        stated = None
    if stated is not None and stated != digest(photographs):
        raise RequestError(
            f"{path}: is not the list of {model.name}; put the one back that was written with it"
        )
    return photographs


def leave_out(
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
    known = read(model)
    if known is None:
        why = "its training did not know either" if list_of(model).is_file() else "it has no list"
        return every, f"what {model.name} was trained on is not known ({why}): none is left out"
    # the photographs that the model has not seen
    left = [place for place in every if photographs[place] not in known]
    count = f"{len(every) - len(left)} of {len(every)} photographs"
    if len(left) == len(every):
        return every, ""
    if keep:
        return every, f"{count} are from the training of {title}"
    return left, f"{count} left out: {title} was trained on them"
