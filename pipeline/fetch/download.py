"""One big file over one connection, resumed after anything, checked before it takes its name.

`NAME.part` grows at its end: its length is what is here, whatever was killed. Only a file whose MD5 is right becomes
`NAME`, with `NAME.json` beside it (size, MD5, SHA-256); a wrong one is moved to `NAME.bad`. The checksum is the
protection: an address may be plain HTTP, may have changed the file between two requests, may lie.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterator, List, Mapping, Optional

from pipeline.errors import RequestError, WorkError
from pipeline.files import write_atomic

MIRROR = "COCO_MIRROR"  # environment variable: base address to use instead of the official one
READ = 1 << 17  # bytes taken from a connection at once, at most
TIMEOUT = (10.0, 30.0)  # seconds to connect, seconds without a byte
SLOWEST = 2048  # bytes per second below which a connection is given up
PATIENCE = 20.0  # seconds over which that is judged
TRIES = 5  # failures in a row without progress
PROGRESS = 1 << 16  # bytes that count as progress
GONE = (400, 401, 403, 404, 405, 410, 451)  # HTTP's answers after which asking again does not help

sleep = time.sleep  # a test replaces it


class Interrupted(Exception):
    """The transfer stopped. wait: seconds the server asked us to wait; final: asking again does not help."""

    def __init__(self, reason: str, wait: float = 0.0, final: bool = False) -> None:
        super().__init__(reason)
        self.wait, self.final = wait, final


class Remote:
    """A file of `size` bytes at `url`; its connections are kept and reused, by as many threads as ask."""

    def __init__(self, url: str, size: int) -> None:
        import requests

        self.url, self.size = url, size
        self._http = requests.Session()
        self._http.headers["Accept-Encoding"] = "identity"

    def close(self) -> None:
        self._http.close()

    def read(self, start: int, end: Optional[int] = None) -> Iterator[bytes]:
        """The bytes [start, end), as they come, never more; end None: to the end of the file.

        A connection that breaks loses nothing that has arrived: the next request asks for the rest. A server without
        ranges serves a file to its end: what comes before `start` is dropped.

        Raises Interrupted after `TRIES` failures in a row without progress, or a final one.
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
                if error.final or failures > TRIES:
                    raise
                sleep(max(error.wait, min(2.0**failures / 2 - 0.5, 30.0)))

    def _answer(self, start: int, last: int, part: bool) -> Iterator[bytes]:
        """What one request for [start, last) gives, perhaps less; every error of the network is Interrupted."""
        import requests
        import urllib3

        headers = {"Range": f"bytes={start}-{last - 1 if part else ''}"} if start or part else {}
        try:
            with self._http.get(self.url, headers=headers, stream=True, timeout=TIMEOUT) as answer:
                whole = self._is_whole(answer, start, part)
                answer.raw.enforce_content_length = False  # else the last bytes before a cut are thrown away
                yield from _pieces(answer.raw, start if whole else 0, last - start)
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            raise Interrupted(f"{type(error).__name__}: {error}") from None

    def _is_whole(self, answer: Any, start: int, part: bool) -> bool:
        """Is it the whole file, rather than its part from `start` on? Interrupted where it is neither."""
        code, given = answer.status_code, answer.headers
        if code not in (200, 206):
            after = given.get("Retry-After", "")
            raise Interrupted(f"HTTP {code}", min(float(after), 60.0) if after.isdigit() else 0.0, final=code in GONE)
        if code == 200 and part:
            raise Interrupted("answers a request for a part with the whole file", final=True)
        size = given.get("Content-Length", "")
        if code == 206:
            text = given.get("Content-Range", "")
            found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", text.strip())
            if not found or int(found.group(1)) != start:
                raise Interrupted(f"asked from byte {start}, got '{text}'")
            size = found.group(2)
        if size.isdigit() and int(size) != self.size:
            raise Interrupted(f"the file has {size} bytes there, {self.size} are expected")
        return code == 200


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


def download(urls: List[str], target: Path, md5: str, size: int) -> Iterator[int]:
    """Bring the file to `target`, yielding the number of bytes here as it grows.

    Args:
        urls: addresses of the same file, the best first; the next one is tried when one does not serve.
        md5, size: published checksum, and length in bytes.

    Raises WorkError when no address serves, the checksum is wrong or the disk is too small. What has come stays.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    try:
        with part.open("ab") as file:
            if file.tell() > size:
                file.truncate(0)  # it was another file's
            _require_space(part, size - os.path.getsize(part))
            yield from _filled(file, urls, size, target.name)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise WorkError(f"{part}: cannot be written: {error.strerror}; what has come is kept") from None
    found = digests(part)
    if found["md5"] != md5:
        bad = target.with_name(target.name + ".bad")
        os.replace(part, bad)
        raise WorkError(
            f"{target.name}: wrong MD5 {found['md5']}, expected {md5}; moved to {bad}; "
            f"`dvc repro fetch` downloads it from scratch, {MIRROR} chooses another address"
        )
    os.replace(part, target)
    write_note(target, found)


def _require_space(part: Path, missing: int) -> None:
    free = shutil.disk_usage(part.parent).free
    if missing > free:
        raise WorkError(
            f"{part.name}: needs {missing / 1e9:.1f} GB, {free / 1e9:.1f} GB are free in {part.parent}; "
            "make room or choose a smaller preset"
        )


def _filled(file: BinaryIO, urls: List[str], size: int, name: str) -> Iterator[int]:
    """Fill the file up to `size` from the first address that serves; its length as it grows."""
    have = os.fstat(file.fileno()).st_size
    yield have
    problems = []
    for url in urls:
        remote = Remote(url, size)
        try:
            for piece in remote.read(have):
                file.write(piece)
                have += len(piece)
                yield have
            return
        except Interrupted as error:
            problems.append(f"{url}: {error}")
        finally:
            remote.close()
    raise WorkError(
        f"{name}: download failed ({'; '.join(problems)}); {have} bytes are kept, "
        f"run again to go on, or set {MIRROR} to another address"
    )


def verified(target: Path, md5: str, notes: Optional[Path] = None) -> Optional[Dict[str, Any]]:
    """What is known of an archive that is already here, hashing it when it is new to us; None when absent.

    notes: folder for what we learn about it, when its own cannot be written to. RequestError when its MD5 is wrong.
    """
    if not target.is_file():
        return None
    noted = (notes or target.parent) / target.name
    known = read_note(target, noted)
    if known.get("md5") == md5:
        return known
    found = digests(target)
    if found["md5"] != md5:
        raise RequestError(f"{target}: wrong MD5 {found['md5']}, expected {md5}; delete it to download it from scratch")
    write_note(target, found, noted)
    return found


def read_note(target: Path, noted: Optional[Path] = None) -> Dict[str, Any]:
    """What `NOTED.json` says about the file `target`; {} when it is missing, damaged, or of other bytes.

    A file of the noted size and of the note's own time is the same file; of another time, if its SHA-256 is the same.
    """
    note = _note(noted or target)
    try:
        known = json.loads(note.read_text(encoding="utf-8"))
        stat, time_ns = target.stat(), note.stat().st_mtime_ns
    except (OSError, ValueError):
        return {}
    if not isinstance(known, dict) or known.get("size") != stat.st_size:
        return {}
    if time_ns != stat.st_mtime_ns:
        if known.get("sha256") != digests(target)["sha256"]:
            return {}
        with contextlib.suppress(OSError):  # of somebody else's folder: it is hashed each time
            os.utime(note, ns=(stat.st_mtime_ns, stat.st_mtime_ns))
    return known


def write_note(target: Path, facts: Mapping[str, Any], noted: Optional[Path] = None) -> None:
    """Put the facts into `NOTED.json` (beside the file `target`), with the time of the file."""
    note = _note(noted or target)
    write_atomic(note, json.dumps(facts, indent=1) + "\n")
    time_ns = target.stat().st_mtime_ns
    os.utime(note, ns=(time_ns, time_ns))


def _note(target: Path) -> Path:
    return target.with_name(target.name + ".json")


def digests(path: Path) -> Dict[str, Any]:
    """Size, MD5 (what COCO published) and SHA-256 (what we trust afterwards) in one pass."""
    md5, sha256 = hashlib.md5(usedforsecurity=False), hashlib.sha256()
    with path.open("rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            md5.update(block)
            sha256.update(block)
    return {"size": os.path.getsize(path), "md5": md5.hexdigest(), "sha256": sha256.hexdigest()}
