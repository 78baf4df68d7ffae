"""Errors for the user, and the exit codes of commands."""

from __future__ import annotations

import os
import sys
from typing import List, NoReturn, Optional

from superglue_sift.errors import Main, RequestError, WorkError, exit_code

__all__ = [
    "AGENT_PID",
    "EXIT_FOLDER",
    "STOPPED",
    "RequestError",
    "WorkError",
    "end_as_lost",
    "in_image",
    "run",
    "typed",
]

EXIT_FOLDER = "SG_EXIT_FOLDER"  # set by pipeline.launch: folder for the exit code of each local rank
AGENT_PID = "SG_AGENT_PID"  # set by pipeline.launch: the process with which its ranks end
STOPPED = 143  # stopped by a signal, after a checkpoint


def in_image() -> bool:
    """Whether this runs in one of the project's images, which have no make."""
    return "IMAGE_STACK" in os.environ


def typed(command: str, **options: str) -> str:
    """A command as the user types it: `make repro PRESET=ci`, in an image `docker run ... repro --preset ci`."""
    if in_image():
        words = ["docker run ...", command, *(f"--{key} {value}" for key, value in options.items())]
    else:
        words = ["make", command, *(f"{key.upper()}={value}" for key, value in options.items())]
    return " ".join(words)


def run(main: Main, argv: Optional[List[str]] = None) -> int:
    """Run a command's `main`. Returns its exit code.

    0: done; 1: the work failed; 2: the request was wrong; 130: Ctrl-C; 143: stopped by a signal after a checkpoint.
    """
    folder = os.environ.get(EXIT_FOLDER)
    if not folder:
        return exit_code(main, argv)
    left = os.path.join(folder, os.environ.get("LOCAL_RANK", "0"))
    if os.path.exists(left):  # by a process that torchrun restarted
        os.unlink(left)
    code = 1  # of an unexpected exception, which propagates
    try:
        code = exit_code(main, argv)
    except SystemExit as end:  # another rank reports the reason
        code = end.code if isinstance(end.code, int) else 1
        raise
    finally:
        with open(left, "w") as file:
            file.write(str(code))
    # torchrun reports any other code than 0 as a crash; the launcher reads the file instead
    return 0 if code == STOPPED else code


def end_as_lost(line: str) -> NoReturn:
    """Print a line and end at once, as a lost rank.

    It leaves no exit code in EXIT_FOLDER, so the launcher restarts the run from its newest checkpoint.
    """
    print(" ".join(line.split()), file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
