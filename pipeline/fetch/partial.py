"""Some images of a remote zip, by Range requests for its directory and for single members.

They are written to a small zip, each checked against the CRC-32 in the directory, since the
published MD5 is that of the whole archive.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, Iterator, List, Sequence

from pipeline.errors import WorkError
from pipeline.fetch import containers
from pipeline.fetch.download import MIRROR, Interrupted, Remote, read_note, write_note
from pipeline.image_sets.sources import unpack
from superglue_sift.features.images import BadImage
from superglue_sift.progress import Progress

CONNECTIONS = 8  # hides the latency of many small requests


class RemoteZip(io.RawIOBase):
    """A remote zip of `size` bytes as a file for `zipfile`, from the first address that serves
    ranges.

    Its methods raise WorkError if no address does.
    """

    def __init__(self, urls: Sequence[str], size: int) -> None:
        super().__init__()
        self._addresses = [Remote(url, size) for url in urls]
        self._url = urls[0]
        self._size = size
        self._at = 0
        self._ends: Dict[int, int] = {}  # of each member, by its start

    def close(self) -> None:
        for address in self._addresses:
            address.close()
        super().close()

    def directory(self) -> List[zipfile.ZipInfo]:
        """The images in the archive, checked as in a local one; COCO's directory has 10 MB."""
        try:
            archive = zipfile.ZipFile(self)
            found = archive.infolist()
            starts = sorted(member.header_offset for member in found)
            # what follows each member: the next one, or the directory
            self._ends = dict(zip(starts, [*starts[1:], archive.start_dir]))
            return containers.check_members(found, self._url)
        except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
            raise WorkError(f"{self._url}: its directory cannot be read: {error}") from None

    def fetch(self, members: Sequence[zipfile.ZipInfo]) -> Iterator[bytes]:
        """The bytes of these images, in order, over several connections."""
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            yield from pool.map(self._image, members)

    def _image(self, member: zipfile.ZipInfo) -> bytes:
        start = member.header_offset
        data = self._range(start, self._ends[start])
        entry = containers.member_entry(member, data, self._url)
        begin = entry.offset - start
        try:
            return unpack(data[begin : begin + entry.packed], entry)
        except BadImage:
            raise WorkError(
                f"{self._url}: '{member.filename}' arrived with a wrong CRC-32; run again"
            ) from None

    def _range(self, start: int, end: int) -> bytes:
        """The bytes [start, end), up to the end of the file; an address that fails is not used
        again.
        """
        problems = []
        for address in self._addresses:
            try:
                return b"".join(address.read(start, min(end, self._size)))
            except Interrupted as error:
                problems.append(f"{address.url}: {error}")
                self._addresses = [other for other in self._addresses if other is not address] or [
                    address
                ]
        raise WorkError(
            f"the archive cannot be read ({'; '.join(problems)}); run again, set {MIRROR}, or"
            " fetch.limit to 0"
        )

    # --- methods that `zipfile` calls

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(offset + (0, self._at, self._size)[whence], 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._range(self._at, self._at + len(buffer)) if self._at < self._size else b""
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def fetch_zip(remote: RemoteZip, members: Sequence[zipfile.ZipInfo], target: Path) -> Any:
    """Write a zip of these members to `target`, unless it exists. Returns its facts."""
    rows = [[member.filename, member.file_size, member.CRC] for member in members]
    wanted = hashlib.sha256(json.dumps(rows).encode("utf-8", "surrogateescape")).hexdigest()
    known = read_note(target, target.parent)
    if known.get("members") == wanted:
        return known
    temporary = target.with_name(target.name + ".part")
    shown = {"desc": f"images for {target.name}", "total": len(members), "unit": "image"}
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as out:
        for member, data in zip(members, Progress(remote.fetch(members), **shown)):
            out.writestr(zipfile.ZipInfo(member.filename), data)
    os.replace(temporary, target)
    facts = {"partial": "CRC-32 of each image checked, MD5 of the whole not", "members": wanted}
    return write_note(target, facts, target.parent)
