"""Uploads to a tracking server: timeouts by size, each file sent once, permanent errors."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path
from typing import Callable, Dict, Iterator, Set, Tuple

from pipeline.tracking.shipper import PermanentError

TIMEOUT, RETRIES = "MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
BYTES_PER_SECOND = 50_000  # slowest network on which the first try succeeds; each further try doubles the time
MAX_DOUBLINGS = 6
MAX_TRIES = 8  # of a file that fails, except by timeout, although the server answers
TEMPORARY = (401, 408, 425, 429)  # client errors of HTTP after which to try again


class Uploads:
    """The uploads of one process. answers: a small request to the server, which raises if it does not answer."""

    def __init__(self, answers: Callable[[], object]) -> None:
        self._answers = answers
        self._sent: Set[Tuple[str, int, int]] = set()
        self._tries: Dict[str, int] = {}

    def file(self, path: Path, place: str, send: Callable[[], object]) -> None:
        """Send a file to `place`, unless this process has already sent the same version there."""
        about = path.stat()
        key = (f"{place}/{path.name}", about.st_size, about.st_mtime_ns)
        if key not in self._sent:
            self.attempt(key[0], about.st_size, send)
            self._sent.add(key)

    def attempt(self, name: str, size: int, send: Callable[[], object]) -> None:
        """Call `send`, with a timeout for requests of `size` bytes. Raises PermanentError if it can never succeed.

        That is, if the server says so, or if it fails again and again while other requests succeed. Other errors of
        `send` are re-raised.
        """
        tries = self._tries.get(name, 0)
        try:
            with patience(size, tries):
                send()
        except Exception as error:  # of MLflow, HTTP, or the client of an object store
            self._tries[name] = tries + 1
            status = getattr(getattr(error, "response", None), "status_code", None) or 0
            refused = 400 <= status < 500 and status not in TEMPORARY
            if refused or (tries + 1 >= MAX_TRIES and not _timed_out(error) and self._alive()):
                raise PermanentError(f"{name} ({size / 1e6:.1f} MB): {error}") from error
            raise

    def _alive(self) -> bool:
        try:
            self._answers()
        except Exception:  # the cause is not this file
            return False
        return True


@contextlib.contextmanager
def patience(size: int, tries: int = 0) -> Iterator[None]:
    """Within, MLflow's requests have a timeout for `size` bytes and are not repeated."""
    before = {name: os.environ.get(name) for name in (TIMEOUT, RETRIES)}
    seconds = float(before[TIMEOUT] or 5) + seconds_for(size) * 2 ** min(tries, MAX_DOUBLINGS)
    os.environ.update({TIMEOUT: str(math.ceil(seconds)), RETRIES: "0"})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def seconds_for(size: int) -> float:
    """Seconds that an upload of `size` bytes may take."""
    return size / BYTES_PER_SECOND


def files_below(path: Path) -> Iterator[Tuple[Path, str]]:
    """A file, or all files of a folder, each with its folder relative to `path` ("" at the top)."""
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if file.is_file():
            inside = "" if file == path else file.parent.relative_to(path).as_posix()
            yield file, "" if inside == "." else inside


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files of a folder; 0 if there is none."""
    return sum(file.stat().st_size for file, _ in files_below(path))


def _timed_out(error: Exception) -> bool:
    return any(word in str(error).lower() for word in ("timed out", "timeout"))
