"""The one error a person is meant to read, and the one way a command ends."""

from __future__ import annotations

import errno
import os
import sys
from typing import Callable, Optional, Sequence

from superglue_sift.errors import RequestError

__all__ = ["EXIT_FOLDER", "STOPPED", "RequestError", "WorkError", "run"]


class WorkError(Exception):
    """The request was right and the work failed all the same (too many unreadable images, a full disk).

    Commands end with exit code 1 and this one line on stderr, without a traceback.
    """


EXIT_FOLDER = "SG_EXIT_FOLDER"  # set by pipeline.launch: where each local rank leaves its exit code
STOPPED = 143  # stopped by a signal, after a checkpoint


def run(main: Callable[[Optional[Sequence[str]]], int], argv: Optional[Sequence[str]] = None) -> int:
    """Run a command's `main` and turn the errors above into their exit codes.

    Returns 0 done, 1 the work failed, 2 the request was wrong, 130 stopped by Ctrl-C, 143 stopped by a signal
    after a checkpoint.
    """
    folder = os.environ.get(EXIT_FOLDER)
    if not folder:
        return _guarded(main, argv)
    left = os.path.join(folder, os.environ.get("LOCAL_RANK", "0"))
    if os.path.exists(left):  # by the process that torchrun has replaced by this one
        os.unlink(left)
    code = 1  # of an unforeseen exception, which goes on its way
    try:
        code = _guarded(main, argv)
    finally:
        with open(left, "w") as file:
            file.write(str(code))
    # torchrun takes any code but 0 for a crash, and reports it as one: the launcher reads the file instead
    return 0 if code == STOPPED else code


def _guarded(main: Callable[[Optional[Sequence[str]]], int], argv: Optional[Sequence[str]]) -> int:
    try:
        return main(argv)
    except RequestError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except WorkError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output went away: nothing to tell and nobody to tell it to
        return 0
    except OSError as error:
        # of a file or the disk, which a person can mend; anything else (a network, a pipe) shows where it happened
        if error.errno != errno.ENOSPC and error.filename is None:
            raise
        print(f"failed: {error.strerror}: {error.filename or 'the disk is full'}", file=sys.stderr)
        return 1
