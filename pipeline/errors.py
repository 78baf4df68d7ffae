"""Errors for the user, and the exit codes of commands.

0: done; 1: the work failed; 2: the request was wrong; 130: Ctrl-C; 143: stopped by a signal, after
a checkpoint.
"""

from __future__ import annotations

import os

from superglue_sift.errors import RequestError, WorkError  # noqa: F401
from superglue_sift.errors import exit_code as run  # noqa: F401

STOPPED = 143
RESTARTS = "SG_RESTARTS"  # set by pipeline.launch: how often it has started the ranks again


def read_number(name: str, usual: int, least: int = 0) -> int:
    """A whole number in the environment, at least `least`. Raises RequestError."""
    text = os.environ.get(name) or str(usual)
    if not text.isdigit() or int(text) < least:
        raise RequestError(f"environment {name}={text!r}: must be a whole number from {least} on")
    return int(text)


def in_image() -> bool:
    """Whether this runs in one of the project's images, which have no make."""
    return "IMAGE_STACK" in os.environ


def spell_command(command: str, **options: str) -> str:
    """A command as the user types it: `make repro PRESET=ci`, in an image `docker run ... repro
    --preset ci`.
    """
    if in_image():
        words = ["docker run ...", command, *(f"--{key} {value}" for key, value in options.items())]
    else:
        words = ["make", command, *(f"{key.upper()}={value}" for key, value in options.items())]
    return " ".join(words)
