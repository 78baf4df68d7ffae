"""The bytes of a file behind an address, through all the ways a request can go wrong.

Bytes are handed on as they come, so that a connection that breaks loses nothing that has arrived, and the next request
asks for the rest. An address fails in two ways: Interrupted (it might serve another time) and Refused (it will not).
"""

from __future__ import annotations

import contextlib
import re
import time
from typing import Any, Iterator, Mapping, Optional

READ = 1 << 17  # bytes taken from a connection at once, at most
TIMEOUT = (10.0, 30.0)  # seconds to connect, seconds without a byte
SLOWEST = 2048  # bytes per second below which a connection is given up
PATIENCE = 20.0  # seconds over which that is judged
TRIES = 5  # failures in a row without progress
PROGRESS = 1 << 16  # bytes that count as progress

sleep = time.sleep  # a test replaces it


class Interrupted(Exception):
    """The transfer stopped; asking again may help. `wait`: seconds the server asked us to wait."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


class Refused(Exception):
    """This address does not have the file, or does not serve it as it has to."""


class Remote:
    """A file of `size` bytes at `url`; its connections are kept and reused, by as many threads as ask."""

    def __init__(self, url: str, size: int) -> None:
        import requests
        from requests.adapters import HTTPAdapter

        self.url, self.size = url, size
        self._http = requests.Session()
        self._http.headers["Accept-Encoding"] = "identity"
        for scheme in ("http://", "https://"):
            self._http.mount(scheme, HTTPAdapter(pool_maxsize=32))

    def close(self) -> None:
        self._http.close()

    def read(self, start: int, end: Optional[int] = None) -> Iterator[bytes]:
        """The bytes [start, end), as they come, never more; end None: to the end of the file.

        A server without ranges serves the latter: what comes before `start` is dropped.

        Raises Interrupted after `TRIES` failures in a row without progress, Refused.
        """
        failures, last = 0, self.size if end is None else end
        while start < last:
            begun = start
            try:
                for piece in self._answer(start, last, end is not None):
                    start += len(piece)
                    yield piece
                if start < last:
                    raise Interrupted(f"closed {last - start} bytes before the end")
            except Interrupted as error:
                failures = 0 if start - begun >= PROGRESS else failures + 1
                if failures > TRIES:
                    raise
                sleep(max(error.wait, min(2.0**failures / 2 - 0.5, 30.0)))

    def _answer(self, start: int, last: int, part: bool) -> Iterator[bytes]:
        """What one request for [start, last) gives, perhaps less."""
        headers = {"Range": f"bytes={start}-{last - 1 if part else ''}"} if start or part else {}
        with _network_errors(), self._http.get(self.url, headers=headers, stream=True, timeout=TIMEOUT) as answer:
            _require_success(answer)
            whole = answer.status_code == 200
            if whole and part:
                raise Refused("answers a request for a part with the whole file")
            self._check_size(answer.headers, start, whole)
            answer.raw.enforce_content_length = False  # else the last bytes before a cut are thrown away
            yield from _pieces(answer.raw, start if whole else 0, last - start)

    def _check_size(self, headers: Mapping[str, str], start: int, whole: bool) -> None:
        """Raises Interrupted where an answer does not begin at `start`, or names another size of the file."""
        size = headers.get("Content-Length", "")
        if not whole:
            text = headers.get("Content-Range", "")
            found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", text.strip())
            if not found or int(found.group(1)) != start:
                raise Interrupted(f"asked from byte {start}, got '{text}'")
            size = found.group(2)
        if size.isdigit() and int(size) != self.size:
            raise Interrupted(f"the file has {size} bytes there, {self.size} are expected")


def _pieces(raw: Any, dropped: int, wanted: int) -> Iterator[bytes]:
    """What the connection gives, less the first `dropped` bytes, up to `wanted`; watches its speed."""
    begun, came = time.monotonic(), 0
    while wanted > 0:
        piece = raw.read1(READ)
        if not piece:
            return
        came += len(piece)
        now = time.monotonic()
        if now - begun > PATIENCE:
            if came < SLOWEST * (now - begun):
                raise Interrupted(f"too slow: {came} bytes in {now - begun:.0f} s")
            begun, came = now, 0
        cut = min(dropped, len(piece))
        dropped, piece = dropped - cut, piece[cut : cut + wanted]
        wanted -= len(piece)
        if piece:
            yield piece


def _require_success(answer: Any) -> None:
    code = answer.status_code
    if code in (200, 206):
        return
    if code in (400, 401, 403, 404, 405, 410, 451):
        raise Refused(f"HTTP {code}")
    after = answer.headers.get("Retry-After", "")
    raise Interrupted(f"HTTP {code}", wait=min(float(after), 60.0) if after.isdigit() else 0.0)


@contextlib.contextmanager
def _network_errors() -> Iterator[None]:
    """Every error of the network and of the libraries below is Interrupted."""
    import requests
    import urllib3

    try:
        yield
    except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
        raise Interrupted(f"{type(error).__name__}: {error}") from None
