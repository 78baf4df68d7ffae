"""Report errors to the user, and run commands with their exit codes."""

from __future__ import annotations

import argparse
import errno
import importlib
import math
import numbers
import sys
from typing import Any, Callable, List, NoReturn, Optional

Main = Callable[[Optional[List[str]]], int]


class RequestError(Exception):
    """The request of the user is wrong (exit code 2).

    The message is one line that names the file, key or value, and the fix.
    """


class WorkError(Exception):
    """A correct request failed (exit code 1). The message is one line with the reason."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the list of all options."""

    def error(self, message: str) -> NoReturn:
        """Raise RequestError with the message of argparse."""
        raise RequestError(f"{message}; see {self.prog} --help")


def make_parser(module: str, about: Optional[str]) -> Parser:
    """Create a parser for `python -m MODULE`.

    Args:
        module: MODULE.
        about: a docstring, whose first line describes the command.
    """
    return Parser(f"python -m {module}", description=str(about).splitlines()[0])


def check_range(name: str, value: Any, least: float, most: float = math.inf) -> None:
    """Check a number that the user chose.

    Args:
        name: what the error calls the number, such as "--k".
        value: the number.
        least: the minimum.
        most: the maximum. Without it, the number is a count, and must be a whole number.

    Raises:
        RequestError: If the value is out of range, or no number.
    """
    is_count = most == math.inf
    kind = numbers.Integral if is_count else numbers.Real
    if isinstance(value, kind) and least <= value <= most:  # type: ignore[operator]
        return
    rule = f"a whole number, {least} or more" if is_count else f"between {least} and {most}"
    raise RequestError(f"{name} {value}: must be {rule}")


def run_main(main: Main, argv: Optional[List[str]] = None) -> int:
    """Run the `main` of a command, print its errors to stderr, and return the exit code.

    The code is 2 after a RequestError, 1 after a WorkError or an error of a file, and 130 after
    Ctrl-C.

    Args:
        main: takes the words of the command, and returns an exit code.
        argv: the words. If None, they are those of this process.
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
        # The reader of stdout has ended, as `head` does, and nothing more can be printed.
        sys.stderr.close()
        return 0
    except OSError as error:
        # Users can fix errors of a file or a full disk. Errors of a network or a pipe keep their
        # traceback.
        if error.errno != errno.ENOSPC and error.filename is None:
            raise
        print(f"failed: {error.strerror}: {error.filename or 'the disk is full'}", file=sys.stderr)
        return 1


def import_extra(package: str, extra: str) -> Any:
    """Import an optional package.

    Args:
        package: the name of the package.
        extra: the extra of the wheel that installs it.

    Raises:
        RequestError: If it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        fix = f"pip install 'superglue-sift[{extra}]'"
        raise RequestError(f"{package} is needed for this, and is not installed: {fix}") from None
