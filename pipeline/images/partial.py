"""Some images of a remote zip, without downloading the whole: its directory and single members by Range
requests.

They arrive as a small zip of their own. Each is checked against the CRC-32 of the directory; the published
MD5 is that of the whole archive and cannot be checked, which source.json says.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import struct
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, List, Optional, Sequence

from pipeline.errors import WorkError
from pipeline.files import write_atomic
from pipeline.images import archive, transfer
from pipeline.images.download import digests
from pipeline.images.manifest import DEFLATED
from pipeline.images.partfile import read_json
from pipeline.images.transfer import Interrupted, NoRanges, Refused, Remote, Stubborn

CONNECTIONS = 8
_SLACK = 128  # bytes: a member's own header may be longer than the directory says


class RemoteZip:
    """A zip behind one of some addresses. WorkError when none of them serves parts of it."""

    def __init__(self, urls: Sequence[str], size: Optional[int] = None) -> None:
        self._http = transfer.session()
        self._remote = self._find(urls, size)
        self.members: List[zipfile.ZipInfo] = []

    def _find(self, urls: Sequence[str], size: Optional[int]) -> Remote:
        problems = []
        for url in urls:
            try:
                remote = Stubborn(lambda: 0)(lambda url=url: transfer.look(self._http, url, size))
                if remote.ranges and remote.size:
                    return remote
                problems.append(f"{url}: serves no parts of files")
            except (Interrupted, Refused) as error:
                problems.append(f"{url}: {error}")
        raise WorkError(f"no part of the archive can be had ({'; '.join(problems)}); set fetch.limit to 0")

    def close(self) -> None:
        self._http.close()

    def directory(self) -> List[zipfile.ZipInfo]:
        """The images in the archive, checked as those of a local one; some requests at its end."""
        try:
            with zipfile.ZipFile(_RemoteFile(self._read, self._remote.size or 0)) as opened:
                members = opened.infolist()
        except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
            raise WorkError(f"{self._remote.url}: its directory cannot be read: {error}") from None
        return archive.checked(members, self._remote.url)

    def fetch(self, members: Sequence[zipfile.ZipInfo]) -> Iterator[bytes]:
        """The bytes of these images, in their order, over several connections."""
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            waiting = []
            for member in members:
                waiting.append(pool.submit(self._image, member))
                if len(waiting) > 4 * CONNECTIONS:
                    yield waiting.pop(0).result()
            for each in waiting:
                yield each.result()

    def _image(self, member: zipfile.ZipInfo) -> bytes:
        start = member.header_offset
        guess = 30 + len(member.orig_filename.encode()) + len(member.extra) + member.compress_size + _SLACK
        data = self._read(start, min(start + guess, self._remote.size or 0))
        lengths = struct.unpack_from("<2H", data, 26) if data[:4] == b"PK\x03\x04" else None
        if lengths is None:
            raise WorkError(f"{self._remote.url}: no data where its directory puts '{member.filename}'")
        begin = 30 + sum(lengths)
        end = begin + member.compress_size
        if end > len(data):
            data += self._read(start + len(data), start + end)
        packed = data[begin:end]
        image = zlib.decompress(packed, -15) if member.compress_type == DEFLATED else packed
        if len(image) != member.file_size or zlib.crc32(image) != member.CRC:
            raise WorkError(f"{self._remote.url}: '{member.filename}' arrived with a wrong CRC-32; run again")
        return image

    def _read(self, start: int, end: int) -> bytes:
        """The bytes [start, end); WorkError when they cannot be had."""
        got = bytearray()

        def step() -> None:
            for piece in transfer.span(self._http, self._remote, start + len(got), end):
                got.extend(piece)
            if len(got) < end - start:
                raise Interrupted(f"closed after {len(got)} of {end - start} bytes")

        try:
            Stubborn(lambda: len(got))(step)
        except (Interrupted, Refused, NoRanges) as error:
            raise WorkError(f"{self._remote.url}: {error}; run again, or set fetch.mirror") from None
        return bytes(got)


class _RemoteFile(io.RawIOBase):
    """What `zipfile` needs of a file: seek, tell and read. The end is fetched once: the directory begins
    there."""

    def __init__(self, fetch: Callable[[int, int], bytes], size: int) -> None:
        super().__init__()
        self._fetch, self._size, self._at = fetch, size, 0
        self._tail_start = max(size - (1 << 16) - 256, 0)
        self._tail = b""

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(offset + (0, self._at, self._size)[whence], 0)
        return self._at

    def read(self, count: int = -1) -> bytes:
        end = self._size if count is None or count < 0 else min(self._at + count, self._size)
        start, self._at = self._at, max(end, self._at)
        if start >= end:
            return b""
        if start < self._tail_start:
            return self._fetch(start, end)
        self._tail = self._tail or self._fetch(self._tail_start, self._size)
        return self._tail[start - self._tail_start : end - self._tail_start]


def bring(
    remote: RemoteZip,
    members: Sequence[zipfile.ZipInfo],
    target: Path,
    tick: Callable[[Iterable], Iterable] = iter,
) -> Any:
    """Write a zip of these members to `target`, or find it there from before; returns its facts."""
    note = target.with_name(target.name + ".json")
    rows = [[member.filename, member.file_size, member.CRC] for member in members]
    wanted = hashlib.sha256(json.dumps(rows).encode("utf-8", "surrogateescape")).hexdigest()
    known = read_json(note)
    if known.get("members") == wanted and target.exists() and target.stat().st_size == known.get("size"):
        return known
    temporary = target.with_name(target.name + ".part")
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as out:
        for member, data in zip(members, tick(remote.fetch(members))):
            out.writestr(zipfile.ZipInfo(member.filename), data)
    os.replace(temporary, target)
    facts = {
        **digests(target),
        "partial": "CRC-32 of each image checked, MD5 of the whole not",
        "members": wanted,
    }
    write_atomic(note, json.dumps(facts, indent=1) + "\n")
    return facts
