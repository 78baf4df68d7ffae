"""One HTTP request of a download, and all the ways it can go wrong.

A request asks for a span of a file and hands the bytes on as they come, so that a connection that breaks
loses nothing that has arrived. Whatever stops it is one of three errors: Interrupted (try again), Refused
(this address will not serve), NoRanges (the server sends the whole file whatever is asked).
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, Optional

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
    """This address does not have the file, or another one under its name."""


class NoRanges(Exception):
    """The server answered a request for a part with the whole."""


@dataclass(frozen=True)
class Remote:
    """What an address says of its file. size: bytes, None unknown; etag: "" when there is no strong one."""

    url: str
    size: Optional[int]
    etag: str
    ranges: bool


def session() -> Any:
    """Connections that are kept and reused, by as many threads as a download has."""
    import requests

    made = requests.Session()
    made.headers.update({"Accept-Encoding": "identity"})
    made.mount("https://", requests.adapters.HTTPAdapter(pool_maxsize=32))
    made.mount("http://", requests.adapters.HTTPAdapter(pool_maxsize=32))
    return made


def look(http: Any, url: str, size: Optional[int] = None) -> Remote:
    """Ask with HEAD, which costs no body; a server that does not know HEAD tells us nothing, and that is
    fine.

    size: what is known of the file's length; another one is Interrupted.
    """
    with _errors():
        answer = http.head(url, timeout=TIMEOUT, allow_redirects=True)
    if answer.status_code in (405, 501):
        return Remote(url, size, "", False)
    _require(answer, (200,))
    ranges = answer.headers.get("Accept-Ranges", "").lower() == "bytes"
    return Remote(url, _size(answer, 0, size), _etag(answer), ranges)


def span(
    http: Any,
    remote: Remote,
    start: int,
    end: Optional[int],
    skip: bool = False,
    learn: Callable[[int], None] = lambda size: None,
) -> Iterator[bytes]:
    """The bytes [start, end) of the file, as they arrive; end None: to its end.

    learn: told the size of the whole file when the answer gives it, before the first byte.

    skip: when the server has no ranges, read the whole file and drop what comes before `start`; otherwise
    that is NoRanges. Never gives more bytes than asked for, whatever the server sends.
    """
    headers: Dict[str, str] = {}
    if start or end is not None:
        headers["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
        if remote.etag:
            headers["If-Range"] = remote.etag
    with _errors(), http.get(remote.url, headers=headers, stream=True, timeout=TIMEOUT) as answer:
        _require(answer, (200, 206))
        whole = answer.status_code == 200
        if whole and headers and not skip and not (start == 0 and end == remote.size):
            raise NoRanges(f"{remote.url} answers a request for a part with the whole file")
        size = _size(answer, start, remote.size)
        if size is not None:
            learn(size)
        answer.raw.enforce_content_length = False  # else the last bytes before a cut are thrown away
        last = size if end is None else end
        yield from _pieces(answer.raw, start if whole else 0, None if last is None else last - start)


def _pieces(raw: Any, dropped: int, wanted: Optional[int]) -> Iterator[bytes]:
    """What the connection gives, less the first `dropped` bytes, up to `wanted`; watches its speed."""
    begun, came = time.monotonic(), 0
    while wanted is None or wanted > 0:
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
        dropped, piece = dropped - cut, piece[cut:]
        piece = piece if wanted is None else piece[:wanted]
        wanted = None if wanted is None else wanted - len(piece)
        if piece:
            yield piece


def _size(answer: Any, start: int, size: Optional[int]) -> Optional[int]:
    """Size of the whole file as this answer tells it (None: it does not); it must be the one we know."""
    if answer.status_code == 200:
        told = answer.headers.get("Content-Length", "")
    else:
        text = answer.headers.get("Content-Range", "")
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", text.strip())
        if not found or int(found.group(1)) != start:
            raise Interrupted(f"asked from byte {start}, got '{text}'")
        told = found.group(2)
    if not told.isdigit():
        return size
    if size is not None and int(told) != size:
        raise Interrupted(f"the file has {told} bytes there, {size} are expected")
    return int(told)


def _require(answer: Any, allowed: Any) -> None:
    code = answer.status_code
    if code in allowed:
        return
    if code in (400, 401, 403, 404, 405, 410, 451):
        raise Refused(f"HTTP {code}")
    after = answer.headers.get("Retry-After", "")
    raise Interrupted(f"HTTP {code}", wait=min(float(after), 60.0) if after.isdigit() else 0.0)


def _etag(answer: Any) -> str:
    etag = answer.headers.get("ETag", "")
    return "" if etag.startswith("W/") else etag  # a weak one may not stand in If-Range


class _errors:
    """Every network error of the libraries below is Interrupted."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: Any, error: Any, _trace: Any) -> None:
        import requests
        import urllib3

        if isinstance(error, (requests.RequestException, urllib3.exceptions.HTTPError, OSError)):
            raise Interrupted(f"{type(error).__name__}: {error}") from None


class Stubborn:
    """Tries again with back-off until a step has failed `TRIES` times in a row without progress.

    `position()` tells how many bytes have come so far. Call it with the step; `Interrupted` is what it
    catches.
    """

    def __init__(self, position: Callable[[], int]) -> None:
        self._position = position
        self._failures = 0

    def __call__(self, step: Callable[[], Any]) -> Any:
        while True:
            before = self._position()
            try:
                return step()
            except Interrupted as error:
                gained = self._position() - before
                self._failures = 0 if gained >= PROGRESS else self._failures + 1
                if self._failures > TRIES:
                    raise
                sleep(max(error.wait, min(2.0**self._failures / 2 - 0.5, 30.0)))
