"""Errors for the user, and the exit codes of commands.

The code is 0 if the work is done, 1 if it failed, and 2 if the request was wrong. It is 130 after
Ctrl-C, and 143 after a signal that stopped the work with a checkpoint.
"""

from __future__ import annotations

import os

from superglue_sift.errors import RequestError, WorkError, make_parser  # noqa: F401
from superglue_sift.errors import exit_code as run  # noqa: F401

STOPPED = 143
RESTARTS = "SG_RESTARTS"  # pipeline.launch sets it to how often it has started the ranks again


def read_number(name: str, usual: int, least: int = 0) -> int:
    """Read a whole number, at least `least`, from the environment. Raises RequestError."""
    text = os.environ.get(name) or str(usual)
    if not text.isdigit() or int(text) < least:
        raise RequestError(f"environment {name}={text!r}: must be a whole number from {least} on")
    return int(text)


def in_image() -> bool:
    """Return whether this runs in one of the project's container images, which have no make."""
    return "IMAGE_STACK" in os.environ


def spell_command(command: str, **options: str) -> str:
    """Return a command as the user types it.

    It is `make repro PRESET=ci` in a clone, and `docker run ... repro --preset ci` in an image.
    """
    if in_image():
        words = ["docker run ...", command, *(f"--{key} {value}" for key, value in options.items())]
    else:
        words = ["make", command, *(f"{key.upper()}={value}" for key, value in options.items())]
    return " ".join(words)
