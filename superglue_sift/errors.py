"""The two errors a person is meant to read, and the exit code of each."""

from __future__ import annotations

import errno
import sys
from typing import Callable, List, Optional

Main = Callable[[Optional[List[str]]], int]


class RequestError(Exception):
    """The request was wrong (exit code 2): one line that names the file, key or value out of range, and the fix."""


class WorkError(Exception):
    """The request was right and the work failed all the same (exit code 1): one line that says why."""


def exit_code(main: Main, argv: Optional[List[str]] = None) -> int:
    """Run a command's `main`; its exit code, and of the errors above theirs with one line on stderr; 130: Ctrl-C."""
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
        # of a file or the disk, which a person can fix; anything else (a network, a pipe) shows where it happened
        if error.errno != errno.ENOSPC and error.filename is None:
            raise
        print(f"failed: {error.strerror}: {error.filename or 'the disk is full'}", file=sys.stderr)
        return 1
