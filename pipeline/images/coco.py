"""COCO's archives: addresses, sizes, checksums, which part serves which split, and each of them as it is at hand.

The official host serves plain HTTP and its HTTPS name does not match; the same objects have a TLS address,
which is tried first. Only MD5 sums were ever published; `fetch` records the SHA-256 on arrival.
"""

from __future__ import annotations

import functools
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence

from pipeline.files import write_atomic
from pipeline.images import archive, download, partial
from pipeline.images.containers import Container, open_container, zip_container

TLS = "https://s3.amazonaws.com/images.cocodataset.org/zips"
PLAIN = "http://images.cocodataset.org/zips"
WORTH_A_PART = 0.5  # of the whole archive's bytes; above it, the whole is downloaded

# Shows a download: bytes so far, of how many, of what.
Bytes = Callable[[Iterator[int], Optional[int], str], None]
# Shows a loop: its items, `total` and `desc`.
Tick = Callable[..., Iterable]


@dataclass(frozen=True)
class Archive:
    """One zip. size: bytes."""

    file: str
    md5: str
    images: int
    size: int

    def urls(self, mirror: str = "") -> List[str]:
        """Where to get it, the best address first; a mirror replaces the official ones."""
        bases = [mirror.rstrip("/")] if mirror else [TLS, PLAIN]
        return [f"{base}/{self.file}" for base in bases]


TRAIN2014 = Archive("train2014.zip", "0da8c0bd3d6becc4dcb32757491aca88", 82_783, 13_510_573_713)
VAL2014 = Archive("val2014.zip", "a3d79f5ed8d289b7a7554ce06a5782b3", 40_504, 6_645_013_297)
TRAIN2017 = Archive("train2017.zip", "cced6f7f71b7629ddf16f17bbcfab6b2", 118_287, 19_336_861_798)
VAL2017 = Archive("val2017.zip", "442b8da7639aecaf257c1dceb8ba8c80", 5_000, 815_585_330)

HELD_OUT = 5_000  # images of val2014 that are held out (the size of val2017); the others stay unused


@dataclass(frozen=True)
class Source:
    """train: archive of the training images; held_out: of the others, None: a part of `train` is held out."""

    train: Archive
    held_out: Optional[Archive]


SOURCES: Dict[str, Source] = {
    "coco2014": Source(TRAIN2014, VAL2014),
    "coco2017": Source(TRAIN2017, VAL2017),
    "coco2017-val": Source(VAL2017, None),
}


class Holding:
    """An archive given by the person, here from before, or still to be downloaded.

    names: of the images in the archive; `ensure(names)` makes these of them readable.

    given: a folder with the zips, a folder with them unpacked, or the zip itself, "" for none.
    some: only a part of the images will be asked for, so look at the remote directory before a download.
    """

    def __init__(self, each: Archive, archives: Path, given: str, mirror: str, some: bool) -> None:
        self._each, self._mirror = each, mirror
        self._archives = archives
        self._path = archives / each.file
        self._remote: Optional[partial.RemoteZip] = None
        self._members: Dict[str, zipfile.ZipInfo] = {}
        self._container = self._given(Path(given)) if given else self._here()
        if self._container is None and some:
            self._remote = partial.RemoteZip(each.urls(mirror), each.size)
            self._members = {member.filename: member for member in self._directory()}

    def whole(self, show: Bytes) -> None:
        """Download the whole archive unless it is here or only a part of it is wanted."""
        if self._container is None and self._remote is None:
            self._download(show)

    @property
    def names(self) -> List[str]:
        return self._container.names if self._container else sorted(self._members)

    def ensure(self, names: Sequence[str], show: Bytes, tick: Tick) -> Container:
        """A container with at least these images."""
        if self._container is not None:
            return self._container
        assert self._remote is not None
        members = [self._members[name] for name in sorted(names)]
        total = sum(member.compress_size for member in self._members.values())
        if sum(member.compress_size for member in members) > WORTH_A_PART * total:
            return self._download(show)
        target = self._path.with_name(f"{self._path.stem}.part-of.zip")
        desc = f"{len(members)} images of {self._each.file}"
        shown = functools.partial(tick, total=len(members), desc=desc)
        facts = partial.fetch_zip(self._remote, members, target, shown)
        self._remote.close()
        return zip_container(target, **facts)

    def _here(self) -> Optional[Container]:
        known = download.verified(self._path, self._each.md5)
        return zip_container(self._path, **known) if known else None

    def _given(self, path: Path) -> Container:
        """What the person has: checked against the published MD5 when it is the zip."""
        for zipped in (path, path / self._each.file):
            if zipped.is_file():
                known = download.verified(zipped, self._each.md5, self._archives)
                return zip_container(zipped, **(known or {}))
        unpacked = path / Path(self._each.file).stem
        names = open_container(unpacked).names if unpacked.is_dir() else open_container(path).names
        prefix = f"{unpacked.name}/" if unpacked.is_dir() else ""
        return Container(path, "folder", [prefix + name for name in names])

    def _download(self, show: Bytes) -> Container:
        each = self._each
        sizes = download.download(each.urls(self._mirror), self._path, each.md5, each.size)
        show(sizes, each.size, each.file)
        self._container = self._here()
        assert self._container is not None
        return self._container

    def _directory(self) -> List[zipfile.ZipInfo]:
        """The remote directory, kept beside the archives: COCO's is ten megabytes and never changes."""
        assert self._remote is not None
        path = self._archives / f"{self._path.name}.directory.json"
        fields = ("filename", "header_offset", "compress_size", "file_size", "CRC", "compress_type")
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))
            return archive.checked([_member(dict(zip(fields, row))) for row in rows], path)
        except (OSError, ValueError, TypeError, KeyError):
            members = self._remote.directory()
        write_atomic(path, json.dumps([[getattr(member, name) for name in fields] for member in members]))
        return members


def _member(values: Dict[str, Any]) -> zipfile.ZipInfo:
    member = zipfile.ZipInfo(values["filename"])
    for name, value in values.items():
        setattr(member, name, value)
    return member
