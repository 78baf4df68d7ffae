"""Files on their way to a tracking server: waited for by their size, sent once, given up where they are refused."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path
from typing import Callable, Dict, Iterator, Set, Tuple

from pipeline.tracking.shipper import PermanentError

TIMEOUT, RETRIES = "MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
BYTES_PER_SECOND = 50_000  # of a network that a file need not be sent over twice; each try after that has double time
MOST_DOUBLINGS = 6
MOST_TRIES = 8  # of a file that fails, other than by time, although the server answers
FOR_NOW = (401, 408, 425, 429)  # of HTTP's errors of the client: to be tried again


class Uploads:
    """What one process has sent. answers: does the server answer a small question? It may raise."""

    def __init__(self, answers: Callable[[], object]) -> None:
        self._answers = answers
        self._sent: Set[Tuple[str, int, int]] = set()
        self._tries: Dict[str, int] = {}

    def file(self, path: Path, place: str, send: Callable[[], object]) -> None:
        """Send a file to `place` unless this process has sent it there, as it is, before."""
        about = path.stat()
        key = (f"{place}/{path.name}", about.st_size, about.st_mtime_ns)
        if key not in self._sent:
            self.attempt(key[0], about.st_size, send)
            self._sent.add(key)

    def attempt(self, name: str, size: int, send: Callable[[], object]) -> None:
        """Send something of at most `size` bytes a request. Raises PermanentError where it will never be taken.

        That is what the server says, or shows by failing time and again while it answers all else. Other errors of
        `send` are raised as they are.
        """
        tries = self._tries.get(name, 0)
        try:
            with patience(size, tries):
                send()
        except Exception as error:  # MLflow's, of HTTP, or of a client of some object store
            self._tries[name] = tries + 1
            status = getattr(getattr(error, "response", None), "status_code", None) or 0
            refused = 400 <= status < 500 and status not in FOR_NOW
            if refused or (tries + 1 >= MOST_TRIES and not _timed_out(error) and self._alive()):
                raise PermanentError(f"{name} ({size / 1e6:.1f} MB): {error}") from error
            raise

    def _alive(self) -> bool:
        try:
            self._answers()
        except Exception:  # whatever is wrong, it is not this file
            return False
        return True


@contextlib.contextmanager
def patience(size: int, tries: int = 0) -> Iterator[None]:
    """MLflow's requests wait long enough for an answer to `size` bytes, and are not repeated."""
    before = {name: os.environ.get(name) for name in (TIMEOUT, RETRIES)}
    seconds = float(before[TIMEOUT] or 5) + seconds_for(size) * 2 ** min(tries, MOST_DOUBLINGS)
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
    """How long so many bytes may take."""
    return size / BYTES_PER_SECOND


def files_below(path: Path) -> Iterator[Tuple[Path, str]]:
    """A file, or all of a folder, each with the folder it lies in below `path`, "" at the top."""
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if file.is_file():
            inside = "" if file == path else file.parent.relative_to(path).as_posix()
            yield file, "" if inside == "." else inside


def size_of(path: Path) -> int:
    """Bytes of a file, or of all of a folder; 0 where there is none."""
    return sum(file.stat().st_size for file, _ in files_below(path))


def _timed_out(error: Exception) -> bool:
    return any(word in str(error).lower() for word in ("timed out", "timeout"))
