"""Errors for the user, and the exit codes of commands.

The code is 0 if the work is done, 1 if it failed, and 2 if the request was wrong. It is 130 after
Ctrl-C, and 143 after a signal that stopped the work with a checkpoint.
"""

from __future__ import annotations

import os
import re
from typing import Optional

from superglue_sift.errors import RequestError, WorkError, make_parser  # noqa: F401
from superglue_sift.errors import run_main as run  # noqa: F401

STOPPED = 143
LARGEST = 2**32 - 1  # largest number of a variable, such as SLURM's number of a job
RESTARTS = "SG_RESTARTS"  # pipeline.launch sets it to how often it has started the ranks again


def read_environment_number(
    name: str, usual: Optional[int] = None, least: int = 0, most: int = LARGEST
) -> int:
    """Read a whole number from `least` to `most` from the environment.

    A variable that is not set, or empty, has the value `usual`. Raises RequestError if `usual` is
    None, too, or if the variable is no such number.
    """
    text = os.environ.get(name) or ("" if usual is None else str(usual))
    # str.isdigit would also take digits that int refuses, such as a superscript.
    if not re.fullmatch("[0-9]{1,10}", text) or not least <= int(text) <= most:
        short = text if len(text) <= 20 else f"{text[:20]}..."
        raise RequestError(
            f"environment {name}={short!r}: must be a whole number from {least} to {most}"
        )
    return int(text)


def is_in_container_image() -> bool:
    """Return whether this runs in one of the project's container images, which have no make."""
    return "IMAGE_STACK" in os.environ


def spell_command(command: str, **options: str) -> str:
    """Return a command as the user types it.

    It is `make repro PRESET=ci` in a clone, and `docker run ... repro --preset ci` in an image.
    """
    if is_in_container_image():
        words = ["docker run ...", command, *(f"--{key} {value}" for key, value in options.items())]
    else:
        words = ["make", command, *(f"{key.upper()}={value}" for key, value in options.items())]
    return " ".join(words)
