"""Report errors to the user, and return the exit codes of commands."""

from __future__ import annotations

import argparse
import errno
import importlib
import math
import numbers
import sys
import warnings
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
        raise RequestError(f"{message}; see --help")


def make_parser(module: str, about: Optional[str]) -> Parser:
    """Return a parser for `python -m MODULE`. The first line of `about` describes the command."""
    return Parser(f"python -m {module}", description=str(about).splitlines()[0])


def check_range(name: str, value: Any, least: float, most: float = math.inf) -> None:
    """Raise RequestError unless `value` is a number from `least` to `most`.

    If there is no `most`, it must be a whole number.
    """
    # Numbers without an upper limit are counts.
    counts = most == math.inf
    kind = numbers.Integral if counts else numbers.Real
    if isinstance(value, kind) and least <= value <= most:  # type: ignore[operator]
        return
    rule = f"a whole number, {least} or more" if counts else f"between {least} and {most}"
    raise RequestError(f"{name} {value}: must be {rule}")


def exit_code(main: Main, argv: Optional[List[str]] = None) -> int:
    """Run a command's `main`, print its errors to stderr, and return the exit code.

    It is 2 after a RequestError, 1 after a WorkError or an error of a file, and 130 after Ctrl-C.
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
        sys.stderr.close()  # the reader of stdout is gone
        return 0
    except OSError as error:
        # Users can fix errors of a file or a full disk. Other errors, such as those of a network or
        # a pipe, keep their traceback.
        if error.errno != errno.ENOSPC and error.filename is None:
            raise
        print(f"failed: {error.strerror}: {error.filename or 'the disk is full'}", file=sys.stderr)
        return 1


def import_extra(package: str, extra: str) -> Any:
    """Import an optional package, which an extra of the wheel brings.

    Raises:
        RequestError: If it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        fix = f"pip install 'superglue-sift[{extra}]'"
        raise RequestError(f"{package} is needed for this, and is not installed: {fix}") from None


def warn_deprecated(name: str, replacement: str) -> None:
    """Warn the caller of a public name of version 0.1.0, which a later version will not have."""
    warnings.warn(f"{name}: use {replacement}", DeprecationWarning, stacklevel=3)
