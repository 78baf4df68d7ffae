"""Errors for the user, the exit codes of commands, and numbers in environment variables.

The exit code is 0 if the work is done, 1 if it failed, and 2 if the request was wrong. It is 130
after Ctrl-C, and 143 after a signal that stopped the work with a checkpoint.
"""

from __future__ import annotations

import os
import re
from typing import Optional

from superglue_sift.errors import RequestError, WorkError, make_parser  # noqa: F401
from superglue_sift.errors import run_main as run  # noqa: F401

STOPPED = 143
LARGEST = 2**32 - 1  # Maximum of a number in a variable, such as the id of SLURM's job
# The environment variable in which pipeline.launch says how often it has started the ranks again
RESTARTS = "SG_RESTARTS"


def read_environment_number(
    name: str, default: Optional[int] = None, minimum: int = 0, maximum: int = LARGEST
) -> int:
    """Read a whole number from an environment variable.

    Args:
        name: name of the variable.
        default: value of a variable that is not set, or empty. If it is None, the variable must be
            set.
        minimum: smallest number that is allowed.
        maximum: largest number that is allowed.

    Raises:
        RequestError: If the variable is not set and has no default, or if it is no such number.
    """
    text = os.environ.get(name) or ("" if default is None else str(default))
    # The method str.isdigit would also take digits that int refuses, such as a superscript.
    if not re.fullmatch("[0-9]{1,10}", text) or not minimum <= int(text) <= maximum:
        shown_text = text if len(text) <= 20 else f"{text[:20]}..."
        raise RequestError(
            f"environment {name}={shown_text!r}: must be a whole number from {minimum} to {maximum}"
        )
    return int(text)


def is_in_container_image() -> bool:
    """Return whether this runs in one of the project's container images, which have no make."""
    return "IMAGE_STACK" in os.environ


def spell_command(command: str, **options: str) -> str:
    """Return a command as the user types it in a clone, or in a container image.

    It is `make repro PRESET=ci` in a clone, and `docker run ... repro --preset ci` in an image.

    Args:
        command: target of make, or command of the image.
        options: value of each option by its name in lower case.
    """
    if is_in_container_image():
        words = ["docker run ...", command, *(f"--{key} {value}" for key, value in options.items())]
    else:
        words = ["make", command, *(f"{key.upper()}={value}" for key, value in options.items())]
    return " ".join(words)
