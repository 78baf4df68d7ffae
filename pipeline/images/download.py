"""Download of one big file: several connections, resumed after anything, checked before it takes its name.

Only a file whose MD5 is right becomes `NAME`, with `NAME.json` beside it (size, MD5, SHA-256); a wrong one
is moved to `NAME.bad`. The checksum is the protection: an address may be plain HTTP, may change its ETag,
may lie.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

from pipeline.errors import RequestError, WorkError
from pipeline.files import write_atomic
from pipeline.images import transfer
from pipeline.images.partfile import PartFile, read_json
from pipeline.images.transfer import Interrupted, NoRanges, Refused, Remote, Stubborn

CONNECTIONS = 4
_LOOK_EVERY = 0.2  # seconds between two reports of progress
_CHUNK = 1 << 20


def download(
    urls: List[str], target: Path, md5: str, size: Optional[int] = None, connections: int = CONNECTIONS
) -> Iterator[int]:
    """Bring the file to `target`, yielding the number of bytes here as it grows.

    Args:
        urls: addresses of the same file, the best first; the next one is tried when one does not serve.
        md5: published checksum. size: published length, None unknown.

    Raises WorkError when no address serves, the checksum is wrong or the disk is too small. What has come
    stays.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = PartFile(target)
    problems = []
    try:
        for url in urls:
            yield part.here()
            try:
                yield from _from(url, part, size, connections)
                break
            except (Interrupted, Refused, NoRanges) as error:
                problems.append(f"{url}: {error}")
        else:
            raise WorkError(
                f"{target.name}: download failed ({'; '.join(problems)}); {part.here()} bytes are kept, "
                "run again to go on, or set fetch.mirror to another address"
            )
    except OSError as error:
        raise WorkError(f"{part.path}: cannot be written: {error.strerror}; what has come is kept") from None
    finally:
        part.close()
    yield part.here()
    _settle(part, target, md5)


class _Address:
    """One address, what it last said of its file, and its connections."""

    def __init__(self, url: str, size: Optional[int]) -> None:
        self._url, self._size = url, size
        self.http = transfer.session()
        self.stale = False  # a transfer broke: ask again, the ETag may be another one
        self.remote = Remote(url, size, "", False)

    def look(self) -> None:
        self.remote = transfer.look(self.http, self._url, self._size)
        self.stale = False


def _from(url: str, part: PartFile, size: Optional[int], connections: int) -> Iterator[int]:
    """Fill the part file from one address."""
    address = _Address(url, size)
    try:
        Stubborn(part.here)(address.look)
        if address.remote.size is not None:
            part.set_size(address.remote.size)
        if address.remote.ranges and len(part.gaps()) > 1:
            try:
                yield from _watched(part, lambda stop: _parallel(address, part, connections, stop))
            except NoRanges:
                pass  # it does not keep to what it says: one connection, then
        if not part.complete():
            yield from _watched(part, lambda stop: _sequential(address, part, stop))
    finally:
        address.http.close()


def _watched(part: PartFile, work: Any) -> Iterator[int]:
    """Run `work(stop)` in a thread and report the bytes here meanwhile; its error is raised here."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work, stop)
        try:
            while not wait_for([future], _LOOK_EVERY).done:
                yield part.here()
        finally:
            stop.set()  # also when the reader of our progress goes away (Ctrl-C)
        future.result()


def _parallel(address: _Address, part: PartFile, connections: int, stop: threading.Event) -> None:
    """Fill the gaps over several connections."""
    gaps: queue.SimpleQueue = queue.SimpleQueue()
    for gap in part.gaps():
        gaps.put(gap)

    def connection() -> None:
        try:
            while not stop.is_set():
                _fill(address, part, *gaps.get_nowait(), stop)
        except queue.Empty:
            return
        except Exception:
            stop.set()  # the others end too, and keep what they have
            raise

    with ThreadPoolExecutor(connections) as pool:
        for future in [pool.submit(connection) for _ in range(connections)]:
            future.result()


def _fill(address: _Address, part: PartFile, start: int, end: int, stop: threading.Event) -> None:
    at = [start]

    def step() -> None:
        _take(address, part, at, end, stop)
        if at[0] < end and not stop.is_set():
            raise Interrupted(f"closed {end - at[0]} bytes before the end of a block")

    Stubborn(lambda: at[0])(step)


def _sequential(address: _Address, part: PartFile, stop: threading.Event) -> None:
    """One connection, from the first gap to the end; also for servers without ranges or lengths."""
    at = [0]

    def step() -> None:
        at[0] = part.prefix()
        _take(address, part, at, None, stop)
        if part.size is None and not stop.is_set():
            part.set_size(at[0])  # the server told no length: the end of its answer is the end of the file
        if not part.complete() and not stop.is_set():
            raise Interrupted(f"closed after {at[0]} of {part.size} bytes")

    if not part.complete():
        Stubborn(part.here)(step)


def _take(
    address: _Address, part: PartFile, at: List[int], end: Optional[int], stop: threading.Event
) -> None:
    """One request from `at[0]` on. A changed ETag is taken as it comes: the checksum decides in the end."""
    try:
        if address.stale:
            address.look()
        remote = address.remote
        skip = end is None and not (remote.etag and remote.ranges)
        for piece in transfer.span(address.http, remote, at[0], end, skip, part.set_size):
            part.write(at[0], piece)
            at[0] += len(piece)
            if stop.is_set():
                return
    except Interrupted:
        address.stale = True
        raise
    except NoRanges:
        if not address.remote.etag:
            raise
        address.remote = replace(address.remote, etag="")  # without If-Range it may still know ranges
        _take(address, part, at, end, stop)


def _settle(part: PartFile, target: Path, md5: str) -> None:
    """Check the arrived file and give it its name; WorkError and quarantine when the checksum is wrong."""
    found = digests(part.path)
    if found["md5"] != md5:
        bad = target.with_name(target.name + ".bad")
        part.finish(bad)
        raise WorkError(
            f"{target.name}: wrong MD5 {found['md5']}, expected {md5}; moved to {bad}; "
            "`dvc repro fetch` downloads it anew, fetch.mirror chooses another address"
        )
    part.finish(target)
    _note(target, found)


def verified(target: Path, md5: str, notes: Optional[Path] = None) -> Optional[Dict[str, Any]]:
    """What is known of an archive that is already here, hashing it when it is new to us; None when absent.

    notes: folder for what we learn about it, when its own cannot be written to.
    """
    if not target.is_file():
        return None
    note = (notes or target.parent) / (target.name + ".json")
    known = read_json(note)
    if known.get("md5") == md5 and known.get("size") == target.stat().st_size:
        return known
    found = digests(target)
    if found["md5"] != md5:
        raise RequestError(
            f"{target}: wrong MD5 {found['md5']}, expected {md5}; delete it to download it anew"
        )
    write_atomic(note, json.dumps(found, indent=1) + "\n")
    return found


def _note(target: Path, found: Dict[str, Any]) -> None:
    write_atomic(target.with_name(target.name + ".json"), json.dumps(found, indent=1) + "\n")


def digests(path: Path) -> Dict[str, Any]:
    """Size, MD5 (what COCO published) and SHA-256 (what we trust afterwards) in one pass."""
    md5, sha256 = hashlib.md5(usedforsecurity=False), hashlib.sha256()
    with path.open("rb") as stream:
        for block in iter(lambda: stream.read(_CHUNK), b""):
            md5.update(block)
            sha256.update(block)
    return {"size": os.path.getsize(path), "md5": md5.hexdigest(), "sha256": sha256.hexdigest()}
