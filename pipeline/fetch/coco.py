"""COCO's archives: addresses, sizes, checksums, and their images, from a local or a remote archive.

A whole archive is downloaded over one connection: `NAME.part` grows at its end, so a killed
download resumes at its length. Only a file with the right MD5 is renamed to `NAME`, next to
`NAME.json` (size, MD5). A file with another MD5 is moved to `NAME.bad`. The checksum protects
against plain HTTP, against a file that changes between two requests, and against a wrong server.

With a small `fetch.limit`, single images are read from the remote archive by fsspec, many at a
time. Each is checked against the CRC-32 in the archive's directory, since the published MD5 is the
MD5 of the whole archive.

The official host's certificate does not match its name, so the TLS address of the same objects is
tried first.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import shutil
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from pipeline.errors import RequestError, WorkError
from pipeline.fetch.dataset import (
    SAMPLE,
    Container,
    check_members,
    member_entry,
    open_container,
    unpack,
    zip_container,
)
from pipeline.files import write_json
from superglue_sift.features.images import BadImage
from superglue_sift.progress import Progress

TLS = "https://s3.amazonaws.com/images.cocodataset.org/zips"
PLAIN = "http://images.cocodataset.org/zips"
MIRROR = "COCO_MIRROR"  # environment variable: base address to use instead of the official one
MAX_PART = 0.5  # fraction of the archive's bytes above which all of it is downloaded
READ = 1 << 17  # largest number of bytes per read of a connection
CONNECT_S = 10.0  # seconds to connect
SILENCE_S = 30.0  # seconds without a byte, after which a connection is broken
TRIES = 5  # further tries after a failure without progress
PROGRESS = 1 << 16  # bytes that count as progress
BUSY = (408, 416, 425, 429, 500, 502, 503, 504)  # HTTP codes after which a retry may help
TOGETHER = 32  # images of a remote archive that are requested at once

sleep = time.sleep  # a test replaces it


@dataclass(frozen=True)
class Archive:
    """One zip of `size` bytes."""

    file: str
    md5: str
    images: int
    size: int

    def urls(self, mirror: str = "") -> List[str]:
        """Return the addresses, the best first. A mirror replaces the official ones."""
        bases = [mirror.rstrip("/")] if mirror else [TLS, PLAIN]
        return [f"{base}/{self.file}" for base in bases]


TRAIN2014 = Archive("train2014.zip", "0da8c0bd3d6becc4dcb32757491aca88", 82_783, 13_510_573_713)
VAL2014 = Archive("val2014.zip", "a3d79f5ed8d289b7a7554ce06a5782b3", 40_504, 6_645_013_297)
TRAIN2017 = Archive("train2017.zip", "cced6f7f71b7629ddf16f17bbcfab6b2", 118_287, 19_336_861_798)
VAL2017 = Archive("val2017.zip", "442b8da7639aecaf257c1dceb8ba8c80", 5_000, 815_585_330)

# Number of images of val2014 that are held out, as many as val2017 has. The others are not used.
HELD_OUT = 5_000


# The archive of the training images, and the archive of the held-out images if that is another
SOURCES: Dict[str, Sequence[Archive]] = {
    "coco2014": (TRAIN2014, VAL2014),
    "coco2017": (TRAIN2017, VAL2017),
    "coco2017-val": (VAL2017,),
}


def expect(source: str, limit: int = 0) -> Tuple[int, int]:
    """Return (bytes of the archives, photographs) of a source, 0 if unknown before the fetch."""
    archives = SOURCES.get(source, ())
    # With a limit only a part of a remote archive is downloaded. If there is one archive, it holds
    # the training and the held-out images.
    wanted = limit * (2 if len(archives) == 1 else 1)
    parts = [min(1.0, wanted / archive.images) if limit else 1.0 for archive in archives]
    size = sum(
        archive.size * (part if part <= MAX_PART else 1) for archive, part in zip(archives, parts)
    )
    count = sum(map(len, SAMPLE.values())) if source == "sample" else 0
    if archives:
        count = archives[0].images + HELD_OUT * (len(archives) - 1)
    # the limit is one for training and one for held-out images
    return round(size), min(count, 2 * limit) if limit else count


class Holding:
    """An archive that the user gave, that was downloaded before, or that is still remote.

    `given` is a folder of the zips or of what they unpack to, or the zip itself. It is "" if there
    is none. If `some`, only a part of the images is needed, so the remote directory is read before
    a download.
    """

    def __init__(
        self, archive: Archive, archives: Path, given: str, mirror: str, some: bool
    ) -> None:
        self._archive = archive
        self._archives = archives
        self._path = archives / archive.file
        self._urls = archive.urls(mirror)
        self._remote: Optional[RemoteZip] = None
        self._container = self._open_given(Path(given)) if given else self._zip(self._path)
        if self._container is None and some:
            self._remote = RemoteZip(self._urls, archive.size)

    def whole(self) -> None:
        """Download the whole archive, unless it is local or only a part of it is needed."""
        if self._container is None and self._remote is None:
            self._download()

    @property
    def names(self) -> List[str]:
        if self._container is not None:
            return self._container.names
        assert self._remote is not None
        return sorted(self._remote.members)

    def ensure(self, names: Sequence[str]) -> Container:
        """Return a container with at least these images. Download what is missing."""
        if self._container is not None:
            return self._container
        assert self._remote is not None
        members = [self._remote.members[name] for name in sorted(names)]
        total = sum(member.compress_size for member in self._remote.members.values())
        if sum(member.compress_size for member in members) > MAX_PART * total:
            return self._download()
        target = self._path.with_name(f"{self._path.stem}.part-of.zip")
        return zip_container(target, **self._remote.copy(members, target))

    def _zip(self, path: Path) -> Optional[Container]:
        """Open the zip at `path`, checked against the published MD5. Return None if there is no
        file."""
        known = verify(path, self._archive.md5, self._archives)
        return zip_container(path, **known) if known else None

    def _open_given(self, path: Path) -> Container:
        """Open the container that the user gave."""
        zipped = self._zip(path) or self._zip(path / self._archive.file)
        if zipped:
            return zipped
        stem = Path(self._archive.file).stem
        inside = (path / stem).is_dir()
        names = open_container(path / stem if inside else path).names
        return Container(path, [f"{stem}/{name}" if inside else name for name in names])

    def _download(self) -> Container:
        download(self._urls, self._path, self._archive.md5, self._archive.size)
        self._container = self._zip(self._path)
        assert self._container is not None
        return self._container


# --- single images of a remote archive


class RemoteZip:
    """A zip of `size` bytes at the first of `urls` that serves parts of it.

    `members` holds its images by name. Raises WorkError if no address serves them.
    """

    def __init__(self, urls: Sequence[str], size: int) -> None:
        self._urls = list(urls)
        self._size = size
        self.members: Dict[str, zipfile.ZipInfo] = {}
        self._ends: Dict[int, int] = {}  # where each member ends, by its start
        self._try_each(self._read_directory)

    def copy(self, members: Sequence[zipfile.ZipInfo], target: Path) -> Any:
        """Write a zip of these members to `target`, unless it exists. Return its facts."""
        rows = [[member.filename, member.file_size, member.CRC] for member in members]
        wanted = hashlib.sha256(json.dumps(rows).encode("utf-8", "surrogateescape")).hexdigest()
        known = read_note(target, target.parent)
        if known.get("members") == wanted:
            return known
        temporary = target.with_name(target.name + ".part")
        target.parent.mkdir(parents=True, exist_ok=True)
        shown = {"desc": f"images for {target.name}", "total": len(members), "unit": "image"}
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as out:
            for member, data in zip(members, Progress(self._images(members), **shown)):
                out.writestr(zipfile.ZipInfo(member.filename), data)
        os.replace(temporary, target)
        facts = {"partial": "CRC-32 of each image checked, MD5 of the whole not", "members": wanted}
        return write_note(target, facts, target.parent)

    def _images(self, members: Sequence[zipfile.ZipInfo]) -> Iterator[bytes]:
        """Yield the checked bytes of these images, in order. Raises WorkError for a wrong
        CRC-32."""
        for first in range(0, len(members), TOGETHER):
            group = members[first : first + TOGETHER]
            for member, data in zip(group, self._try_each(self._read_members(group))):
                entry = member_entry(member, data, self._urls[0])
                begin = entry.offset - member.header_offset
                try:
                    yield unpack(data[begin : begin + entry.packed], entry)
                except BadImage:
                    reason = f"'{member.filename}' arrived with a wrong CRC-32; run again"
                    raise WorkError(f"{self._urls[0]}: {reason}") from None

    def _read_directory(self, files: Any, url: str) -> None:
        # COCO's directory has 10 MB and is read at once
        with files.open(url, size=self._size, block_size=PROGRESS) as stream:
            try:
                archive = zipfile.ZipFile(stream)
                found = archive.infolist()
                images = check_members(found, url)
            except (zipfile.BadZipFile, NotImplementedError) as error:
                raise WorkError(f"{url}: its directory cannot be read: {error}") from None
        starts = sorted(member.header_offset for member in found)
        # after each member follows the next one, or the directory
        self._ends = dict(zip(starts, [*starts[1:], archive.start_dir]))
        self.members = {member.filename: member for member in images}

    def _read_members(
        self, members: Sequence[zipfile.ZipInfo]
    ) -> Callable[[Any, str], List[bytes]]:
        """Return a function that reads the bytes of these members.

        If it fails and is called again, it reads only what is missing.
        """
        done: Dict[int, bytes] = {}

        def read(files: Any, url: str) -> List[bytes]:
            starts = [m.header_offset for m in members if m.header_offset not in done]
            ends = [self._ends[start] for start in starts]
            answers = files.cat_ranges([url] * len(starts), starts, ends, on_error="return")
            whole = {s: a for s, e, a in zip(starts, ends, answers) if _length(a) == e - s}
            done.update(whole)
            if len(whole) < len(starts):
                broken = next(answer for answer in answers if isinstance(answer, Exception))
                raise OSError(f"{type(broken).__name__}: {broken}")
            return [done[member.header_offset] for member in members]

        return read

    def _try_each(self, action: Callable[[Any, str], Any]) -> Any:
        """Return the result of `action` with the first address that works.

        Addresses that failed are not used again. Raises WorkError if all fail.
        """
        import aiohttp
        import fsspec

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
        options = {"timeout": timeout, "trust_env": True}
        files = fsspec.filesystem("http", client_kwargs=options)
        problems = []
        for url in list(self._urls):
            problem = ""
            # wait longer after each failure
            for failures in range(1, TRIES + 2):
                try:
                    return action(files, url)
                except FileNotFoundError:
                    problem = "HTTP 404"
                    break
                except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
                    problem = f"{type(error).__name__}: {error}"
                    sleep(min(2.0**failures / 2 - 0.5, 30.0))
            problems.append(f"{url}: {problem}")
            # the address that failed becomes the last one
            self._urls = [*self._urls[1:], url]
        raise WorkError(
            f"the archive cannot be read ({'; '.join(problems)}); run again, set {MIRROR}, or"
            " fetch.limit to 0"
        )


def _length(answer: Any) -> int:
    return len(answer) if isinstance(answer, bytes) else -1


# --- whole archives


class Interrupted(Exception):
    """The transfer failed, and trying again does not help."""


def download(urls: List[str], target: Path, md5: str, size: int) -> None:
    """Download the file to `target`, and show the progress.

    Args:
        urls: addresses of the same file, the best first. If one fails, the next is tried.
        md5, size: published checksum, and length in bytes.

    Raises:
        WorkError: all addresses fail, the checksum is wrong or the disk is too small. The file
            `NAME.part` is kept.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    try:
        with part.open("ab") as file:
            if file.tell() > size:
                file.seek(0)  # it is a part of another file
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
    """Append to the file up to `size`, from the first address that works. Raises WorkError."""
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3 import Retry

    # urllib3 tries again if there is no connection or the server is busy
    retry = Retry(
        TRIES, backoff_factor=0.5, backoff_max=30, status_forcelist=BUSY, retry_after_max=60
    )
    problems = []
    shown = {"unit": "B", "unit_scale": True, "desc": f"downloading {name}"}
    with requests.Session() as http, Progress(total=size, initial=file.tell(), **shown) as bar:
        http.headers["Accept-Encoding"] = "identity"
        for scheme in ("http://", "https://"):
            http.mount(scheme, HTTPAdapter(max_retries=retry))
        for url in urls:
            problem = _copy(http, url, file, size, bar)
            if not problem:
                return
            problems.append(f"{url}: {problem}")
    raise WorkError(
        f"{name}: download failed ({'; '.join(problems)}); {file.tell()} bytes are kept, "
        f"run again to resume, or set {MIRROR} to another address"
    )


def _copy(http: Any, url: str, file: BinaryIO, size: int, bar: Progress) -> str:
    """Append what is missing. Return why the transfer broke off, or ""."""
    try:
        for piece in _read(http, url, file.tell(), size):
            file.write(piece)
            bar.update(len(piece))
    except Interrupted as error:
        return str(error)
    return ""


def _read(http: Any, url: str, start: int, size: int) -> Iterator[bytes]:
    """Yield the bytes from `start` to the end of a file of `size` bytes, as they arrive.

    If a body breaks off, the rest is requested. Raises Interrupted for an answer that no retry
    changes, or after `TRIES` bodies without progress.
    """
    import requests
    import urllib3

    failures = 0
    while start < size:
        begun = start
        problem = "the connection was closed"
        try:
            for piece in _answer(http, url, start, size):
                start += len(piece)
                yield piece
        except requests.exceptions.RetryError as error:
            raise Interrupted(str(error.args[0].reason)) from None
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            problem = f"{type(error).__name__}: {error}"
        # the body broke off: wait, and request the rest
        if start < size:
            failures = 0 if start - begun >= PROGRESS else failures + 1
            if failures > TRIES:
                raise Interrupted(f"{problem}, {size - start} bytes before the end")
            sleep(min(2.0**failures / 2 - 0.5, 30.0))


def _answer(http: Any, url: str, start: int, size: int) -> Iterator[bytes]:
    """Yield the bytes of one request, perhaps fewer than asked for.

    A server without ranges sends the file from its beginning. The bytes before `start` are dropped.
    """
    headers = {"Range": f"bytes={start}-"} if start else {}
    with http.get(url, headers=headers, stream=True, timeout=(CONNECT_S, SILENCE_S)) as answer:
        skipped = start if _is_whole(answer, start, size) else 0
        # With this check the last bytes before a broken connection would be lost
        answer.raw.enforce_content_length = False
        while start < size:
            piece = answer.raw.read1(READ)
            if not piece:
                return
            useful = piece[skipped : skipped + size - start]
            skipped = max(skipped - len(piece), 0)
            start += len(useful)
            yield useful


def _is_whole(answer: Any, start: int, size: int) -> bool:
    """Return True for the whole file, False for its part from `start` on.

    Raises Interrupted or OSError for any other answer.
    """
    if answer.status_code not in (200, 206):
        raise Interrupted(f"HTTP {answer.status_code}")
    stated = answer.headers.get("Content-Length", "")
    if answer.status_code == 206:
        text = answer.headers.get("Content-Range", "")
        match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", text.strip())
        if not match or int(match[1]) != start:
            raise OSError(f"asked from byte {start}, got '{text}'")
        stated = match[2]
    if stated.isdigit() and int(stated) != size:
        raise OSError(f"the file has {stated} bytes there, {size} are expected")
    return answer.status_code == 200


def verify(target: Path, md5: str, notes: Path) -> Optional[Dict[str, Any]]:
    """Return size and MD5 of a local archive, from its note in the folder `notes` or by hashing it.

    Returns None if there is no archive. Raises RequestError if the MD5 is wrong.
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
    """Return the content of `notes/NAME.json` about the file `target`.

    It is {} if the note is missing or damaged, or was written for another size or time.
    """
    note = notes / f"{target.name}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(note.read_text(encoding="utf-8"))
        stat = target.stat()
        if (known["size"], note.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns):
            return known
    return {}


def write_note(target: Path, facts: Mapping[str, Any], notes: Path) -> Dict[str, Any]:
    """Write size and facts to `notes/NAME.json`, with the time of the file. Return them."""
    note = notes / f"{target.name}.json"
    stat = target.stat()
    content = {"size": stat.st_size, **facts}
    write_json(note, content)
    os.utime(note, ns=(stat.st_mtime_ns, stat.st_mtime_ns))
    return content


def md5_of(path: Path) -> str:
    """Return the MD5, which COCO's mirrors publish, in hexadecimal digits."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()
