"""Download of one large file over one connection, resumable and verified.

`NAME.part` grows at its end, so a killed download resumes at its length. Only a file with the right
MD5 is renamed to `NAME`, next to `NAME.json` (size, MD5); others are moved to `NAME.bad`.
The checksum protects against plain HTTP, against a file that changes between two requests, and
against a wrong server.
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
from pipeline.files import write_json
from superglue_sift.progress import Progress

MIRROR = "COCO_MIRROR"  # environment variable: base address to use instead of the official one
READ = 1 << 17  # most bytes per read of a connection
TIMEOUT = (10.0, 30.0)  # seconds to connect, seconds without a byte
TRIES = 5  # further tries after a failure without progress
PROGRESS = 1 << 16  # bytes that count as progress
BUSY = (408, 416, 425, 429, 500, 502, 503, 504)  # HTTP codes after which a retry may help

sleep = time.sleep  # a test replaces it


class Interrupted(Exception):
    """The transfer failed, and trying again does not help."""


class Remote:
    """A file of `size` bytes at `url`; several threads may use it, and connections are reused.

    urllib3 tries again when there is no connection or the server is busy; a body that breaks off is
    continued here.
    """

    def __init__(self, url: str, size: int) -> None:
        import requests
        from requests.adapters import HTTPAdapter
        from urllib3 import Retry

        self.url = url
        self.size = size
        self._http = requests.Session()
        self._http.headers["Accept-Encoding"] = "identity"
        retry = Retry(
            TRIES, backoff_factor=0.5, backoff_max=30, status_forcelist=BUSY, retry_after_max=60
        )
        for scheme in ("http://", "https://"):
            self._http.mount(scheme, HTTPAdapter(max_retries=retry))

    def close(self) -> None:
        self._http.close()

    def read(self, start: int, end: Optional[int] = None) -> Iterator[bytes]:
        """The bytes [start, end) as they arrive; end None: to the end of the file.

        A server without ranges can serve a file to its end; the bytes before `start` are dropped.

        Raises Interrupted for an answer that no retry changes, or after `TRIES` bodies without
        progress.
        """
        import requests
        import urllib3

        failures = 0
        last = self.size if end is None else end
        while start < last:
            begun = start
            problem = "the connection was closed"
            try:
                for piece in self._answer(start, last, end is not None):
                    start += len(piece)
                    yield piece
            except requests.exceptions.RetryError as error:
                raise Interrupted(str(error.args[0].reason)) from None
            except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
                problem = f"{type(error).__name__}: {error}"
            if start < last:
                failures = 0 if start - begun >= PROGRESS else failures + 1
                if failures > TRIES:
                    raise Interrupted(f"{problem}, {last - start} bytes before the end")
                sleep(min(2.0**failures / 2 - 0.5, 30.0))

    def _answer(self, start: int, last: int, part: bool) -> Iterator[bytes]:
        """The bytes of one request for [start, last), perhaps fewer."""
        headers = {"Range": f"bytes={start}-{last - 1 if part else ''}"} if start or part else {}
        with self._http.get(self.url, headers=headers, stream=True, timeout=TIMEOUT) as answer:
            skipped = start if self._is_whole(answer, start, part) else 0
            # Else the last bytes before a broken connection are lost
            answer.raw.enforce_content_length = False
            while start < last:
                piece = answer.raw.read1(READ)
                if not piece:
                    return
                useful = piece[skipped : skipped + last - start]
                skipped = max(skipped - len(piece), 0)
                start += len(useful)
                yield useful

    def _is_whole(self, answer: Any, start: int, part: bool) -> bool:
        """True for the whole file, False for its part from `start` on. Raises for anything else."""
        if answer.status_code not in (200, 206):
            raise Interrupted(f"HTTP {answer.status_code}")
        if answer.status_code == 200 and part:
            raise Interrupted("answers a request for a part with the whole file")
        size = answer.headers.get("Content-Length", "")
        if answer.status_code == 206:
            text = answer.headers.get("Content-Range", "")
            match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", text.strip())
            if not match or int(match[1]) != start:
                raise OSError(f"asked from byte {start}, got '{text}'")
            size = match[2]
        if size.isdigit() and int(size) != self.size:
            raise OSError(f"the file has {size} bytes there, {self.size} are expected")
        return answer.status_code == 200


def download(urls: List[str], target: Path, md5: str, size: int) -> None:
    """Download the file to `target`, and show the progress.

    Args:
        urls: addresses of the same file, the best first; the next one is tried if one fails.
        md5, size: published checksum, and length in bytes.

    Raises WorkError if all addresses fail, the checksum is wrong or the disk is too small.
    `NAME.part` is kept.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    try:
        with part.open("ab") as file:
            if file.tell() > size:
                file.seek(0)  # of another file
                file.truncate()
            _require_space(part, size - file.tell())
            _append(file, urls, size, target.name)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise WorkError(
            f"{part}: cannot be written: {error.strerror}; the bytes so far are kept"
        ) from None
    found = md5_of(part)
    if found != md5:
        bad = target.with_name(target.name + ".bad")
        os.replace(part, bad)
        raise WorkError(
            f"{target.name}: wrong MD5 {found}, expected {md5}; moved to {bad}; "
            f"`dvc repro fetch` downloads it from scratch, {MIRROR} chooses another address"
        )
    os.replace(part, target)
    write_note(target, {"md5": md5}, target.parent)


def _require_space(part: Path, missing: int) -> None:
    free = shutil.disk_usage(part.parent).free
    if missing > free:
        raise WorkError(
            f"{part.name}: needs {missing / 1e9:.1f} GB, {free / 1e9:.1f} GB are free in"
            f" {part.parent}; make room or choose a smaller preset"
        )


def _append(file: BinaryIO, urls: List[str], size: int, name: str) -> None:
    """Append to the file up to `size`, from the first address that works."""
    problems = []
    shown = {"unit": "B", "unit_scale": True, "desc": f"downloading {name}"}
    with Progress(total=size, initial=file.tell(), **shown) as bar:
        for url in urls:
            problem = _copy(file, Remote(url, size), bar)
            if not problem:
                return
            problems.append(f"{url}: {problem}")
    raise WorkError(
        f"{name}: download failed ({'; '.join(problems)}); {file.tell()} bytes are kept, "
        f"run again to resume, or set {MIRROR} to another address"
    )


def _copy(file: BinaryIO, remote: Remote, bar: Progress) -> str:
    """Append what is missing. Returns why it broke off, or ""."""
    with contextlib.closing(remote):
        try:
            for piece in remote.read(file.tell()):
                file.write(piece)
                bar.update(len(piece))
        except Interrupted as error:
            return str(error)
    return ""


def verify(target: Path, md5: str, notes: Path) -> Optional[Dict[str, Any]]:
    """Size and MD5 of a local archive, from its note in the folder `notes` or by hashing it; None
    without an archive.

    Raises RequestError if the MD5 is wrong.
    """
    if not target.is_file():
        return None
    known = read_note(target, notes)
    if known.get("md5") == md5:
        return known
    found = md5_of(target)
    if found != md5:
        raise RequestError(
            f"{target}: wrong MD5 {found}, expected {md5}; delete it to download it from scratch"
        )
    return write_note(target, {"md5": md5}, notes)


def read_note(target: Path, notes: Path) -> Dict[str, Any]:
    """The content of `notes/NAME.json` about the file `target`; {} if it is missing, damaged, or
    of another size or time.
    """
    note = notes / f"{target.name}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(note.read_text(encoding="utf-8"))
        stat = target.stat()
        if (known["size"], note.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns):
            return known
    return {}


def write_note(target: Path, facts: Mapping[str, Any], notes: Path) -> Dict[str, Any]:
    """Write size and facts to `notes/NAME.json`, with the time of the file. Returns them."""
    note = notes / f"{target.name}.json"
    stat = target.stat()
    content = {"size": stat.st_size, **facts}
    write_json(note, content)
    os.utime(note, ns=(stat.st_mtime_ns, stat.st_mtime_ns))
    return content


def md5_of(path: Path) -> str:
    """The MD5, which COCO's mirrors publish, in hexadecimal digits."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()
