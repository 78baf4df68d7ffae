"""Around the work: errors for the user and exit codes, files that are written whole, and threads.

Imports neither torch nor numpy, so that a command can set how threads wait before it loads them.
"""

from __future__ import annotations

import csv
import errno
import hashlib
import importlib
import io
import math
import numbers
import os
import sys
import tempfile
import threading
import tokenize
import zlib
from pathlib import Path
from typing import Any, Callable, Iterable, List, MutableMapping, Optional, Union
from zipfile import BadZipFile

FileName = Union[str, Path]
Main = Callable[[Optional[List[str]]], int]
# Raised by a damaged `.npz`, whose bits can also ask for another compression or a password
DAMAGED = (
    *(OSError, ValueError, KeyError, EOFError, RuntimeError, BadZipFile, zlib.error),
    *(SyntaxError, tokenize.TokenError),  # numpy parses the headers
)
# Of GNU's and Intel's OpenMP
WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS")  # threads of OpenBLAS


class RequestError(Exception):
    """A wrong request (exit code 2): one line that names the file, key or value, and the fix."""


class WorkError(Exception):
    """A correct request that failed (exit code 1): one line with the reason."""


def check_range(name: str, value: Any, least: float, most: float = math.inf) -> None:
    """Raise RequestError unless `value` is a number from `least` to `most`, whole if there is no
    `most`.
    """
    counts = most == math.inf
    kind = numbers.Integral if counts else numbers.Real
    if isinstance(value, kind) and least <= value <= most:  # type: ignore[operator]
        return
    rule = f"a whole number, {least} or more" if counts else f"between {least} and {most}"
    raise RequestError(f"{name} {value}: must be {rule}")


def exit_code(main: Main, argv: Optional[List[str]] = None) -> int:
    """Run a command's `main`; return its exit code, or that of an error, printed to stderr.

    130: Ctrl-C.
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
        # errors of a file or a full disk, which users can fix; others (a network, a pipe) keep
        # their traceback
        if error.errno != errno.ENOSPC and error.filename is None:
            raise
        print(f"failed: {error.strerror}: {error.filename or 'the disk is full'}", file=sys.stderr)
        return 1


def import_extra(package: str, extra: str) -> Any:
    """Import an optional package, of an extra of the wheel. Raises RequestError without it."""
    try:
        return importlib.import_module(package)
    except ImportError:
        fix = f"pip install 'superglue-sift[{extra}]'"
        raise RequestError(f"{package} is needed for this, and is not installed: {fix}") from None


def run(module: str) -> int:
    """Run the `main` of a module with threads that wait passively; returns the exit code."""
    wait_passively()  # before torch is loaded
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # names of files that are not UTF-8
    return exit_code(importlib.import_module(module).main)


def wait_passively(variables: Optional[MutableMapping[str, str]] = None) -> None:
    """Let idle threads sleep: in this process, or in one that is started with the environment
    `variables`.

    By default OpenMP, which torch uses, spins while it waits. On a busy machine this takes cores
    from the work: four pairs of a scene with two threads on two cores took 7.4 s of processor time,
    and 3.9 s when threads sleep. OpenBLAS, by which numpy and scipy solve small systems, also spins
    and gets one thread: aligning 2,500 matches takes 0.36 s of processor time instead of 0.62.
    Variables that are already set, in each of both groups, are kept.
    """
    variables = os.environ if variables is None else variables
    if not any(name in variables for name in WAIT_VARIABLES):
        variables["OMP_WAIT_POLICY"] = "passive"
    if not any(name in variables for name in THREAD_VARIABLES):
        variables["OPENBLAS_NUM_THREADS"] = "1"


def usable_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def write_atomic(path: FileName, content: Union[str, bytes]) -> None:
    """Write `content` to `path`, and create its folder. After a kill, the old or the new file is
    there, complete.

    Text is stored as UTF-8 (surrogateescape, for file names that are not UTF-8). Raises OSError
    that names `path`, such as for a full disk.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    # unique per thread: two threads may write the same path, such as features of a photograph and
    # its copy
    temporary = path.with_name(f".{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the rename, too, must survive a power loss
    finally:
        os.close(directory)


def check_writable(path: FileName, named: Optional[FileName] = None) -> None:
    """Raise RequestError if `path` could not be written, before long work whose result it is.
    Writes nothing.

    named: the file or folder that the user gave and the message names; None: `path`.
    """
    folder = Path(path).absolute().parent
    try:
        if Path(path).is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        while not folder.exists():
            folder = folder.parent
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RequestError(
            f"{named or path}: cannot be written: {error.strerror}; name another"
        ) from None


def write_csv(path: FileName, rows: Iterable[Iterable[Any]]) -> None:
    """Write a table atomically; the first row is the header."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_atomic(path, text.getvalue())


def file_sha256(path: FileName) -> str:
    """Hex SHA-256 of a file. Raises OSError."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()
