"""The two errors that are shown to users, and their exit codes."""

from __future__ import annotations

import errno
import sys
from typing import Callable, List, Optional

Main = Callable[[Optional[List[str]]], int]


class RequestError(Exception):
    """A wrong request (exit code 2): one line that names the file, key or value, and the fix."""


class WorkError(Exception):
    """A correct request that failed (exit code 1): one line with the reason."""


def exit_code(main: Main, argv: Optional[List[str]] = None) -> int:
    """Run a command's `main` and return its exit code, or that of an error above, printed to stderr; 130: Ctrl-C."""
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
        sys.stderr.close()  # the reader of stdout is gone
        return 0
    except OSError as error:
        # errors of a file or a full disk, which users can fix; others (a network, a pipe) keep their traceback
        if error.errno != errno.ENOSPC and error.filename is None:
            raise
        print(f"failed: {error.strerror}: {error.filename or 'the disk is full'}", file=sys.stderr)
        return 1
