"""The two errors a person is meant to read, and the exit code of each."""

from __future__ import annotations

import errno
import sys
from typing import Callable, List, Optional

Main = Callable[[Optional[List[str]]], int]


class RequestError(Exception):
    """The request was wrong: a missing file, a misspelt key, a value out of range.

    The message is one line that names the file or key and the fix. Commands end with exit code 2
    and this line on stderr, without a traceback.
    """


class WorkError(Exception):
    """The request was right and the work failed all the same (too many unreadable images, a full disk).

    Commands end with exit code 1 and this one line on stderr, without a traceback.
    """


def exit_code(main: Main, argv: Optional[List[str]] = None) -> int:
    """Run a command's `main` and turn the errors above into its exit code, each with one line on stderr.

    Returns what `main` returns (0 done), 1 the work failed, 2 the request was wrong, 130 stopped by Ctrl-C.
    """
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
