"""The errors a person is meant to read, and the one way a command ends."""

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

EXIT_FOLDER = "SG_EXIT_FOLDER"  # set by pipeline.launch: where each local rank leaves its exit code
AGENT_PID = "SG_AGENT_PID"  # set by pipeline.launch: the process that its ranks end with
STOPPED = 143  # stopped by a signal, after a checkpoint


def in_image() -> bool:
    """Does this run in one of the project's images, where there is no make?"""
    return "IMAGE_STACK" in os.environ


def typed(command: str, **options: str) -> str:
    """A command as a person gives it: `make repro PRESET=ci`, and in an image `docker run ... repro --preset ci`."""
    if in_image():
        words = ["docker run ...", command, *(f"--{key} {value}" for key, value in options.items())]
    else:
        words = ["make", command, *(f"{key.upper()}={value}" for key, value in options.items())]
    return " ".join(words)


def run(main: Main, argv: Optional[List[str]] = None) -> int:
    """Run a command's `main` and turn the errors above into their exit codes.

    Returns 0 done, 1 the work failed, 2 the request was wrong, 130 stopped by Ctrl-C, 143 stopped by a signal
    after a checkpoint.
    """
    folder = os.environ.get(EXIT_FOLDER)
    if not folder:
        return exit_code(main, argv)
    left = os.path.join(folder, os.environ.get("LOCAL_RANK", "0"))
    if os.path.exists(left):  # by the process that torchrun has replaced by this one
        os.unlink(left)
    code = 1  # of an unforeseen exception, which goes on its way
    try:
        code = exit_code(main, argv)
    except SystemExit as end:  # another rank says why
        code = end.code if isinstance(end.code, int) else 1
        raise
    finally:
        with open(left, "w") as file:
            file.write(str(code))
    # torchrun takes any code but 0 for a crash, and reports it as one: the launcher reads the file instead
    return 0 if code == STOPPED else code


def end_as_lost(line: str) -> NoReturn:
    """Say so in one line and end at once, as if this process had been killed: it can compute no further.

    It leaves no exit code in EXIT_FOLDER, so the launcher starts the run again from its newest checkpoint.
    """
    print(" ".join(line.split()), file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
