"""COCO's archives: addresses, sizes, checksums, splits, and access to a local or remote archive.

The official host's certificate does not match its name, so the TLS address of the same objects is
tried first.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

from pipeline.fetch import download, partial
from pipeline.fetch.containers import Container, open_container, zip_container
from pipeline.image_sets.sources import SAMPLE

TLS = "https://s3.amazonaws.com/images.cocodataset.org/zips"
PLAIN = "http://images.cocodataset.org/zips"
MAX_PART = 0.5  # fraction of the archive's bytes above which all of it is downloaded


@dataclass(frozen=True)
class Archive:
    """One zip. size: bytes."""

    file: str
    md5: str
    images: int
    size: int

    def urls(self, mirror: str = "") -> List[str]:
        """Addresses, the best first; a mirror replaces the official ones."""
        bases = [mirror.rstrip("/")] if mirror else [TLS, PLAIN]
        return [f"{base}/{self.file}" for base in bases]


TRAIN2014 = Archive("train2014.zip", "0da8c0bd3d6becc4dcb32757491aca88", 82_783, 13_510_573_713)
VAL2014 = Archive("val2014.zip", "a3d79f5ed8d289b7a7554ce06a5782b3", 40_504, 6_645_013_297)
TRAIN2017 = Archive("train2017.zip", "cced6f7f71b7629ddf16f17bbcfab6b2", 118_287, 19_336_861_798)
VAL2017 = Archive("val2017.zip", "442b8da7639aecaf257c1dceb8ba8c80", 5_000, 815_585_330)

# Images of val2014 that are held out (as many as val2017 has); the others are not used
HELD_OUT = 5_000


# The archive of the training images, and that of the held-out ones, if these are no part of it
SOURCES: Dict[str, Sequence[Archive]] = {
    "coco2014": (TRAIN2014, VAL2014),
    "coco2017": (TRAIN2017, VAL2017),
    "coco2017-val": (VAL2017,),
}


def expect(source: str, limit: int = 0) -> Tuple[int, int]:
    """(bytes of the archives, photographs) of a source; 0 if unknown before it is fetched."""
    archives = SOURCES.get(source, ())
    # of an archive that is still remote, only a small part is downloaded; one alone holds the
    # training and the held-out images
    wanted = limit * (2 if len(archives) == 1 else 1)
    parts = [min(1.0, wanted / archive.images) if limit else 1.0 for archive in archives]
    size = sum(
        archive.size * (part if part <= MAX_PART else 1) for archive, part in zip(archives, parts)
    )
    count = sum(map(len, SAMPLE.values())) if source == "sample" else 0
    if archives:
        count = archives[0].images + HELD_OUT * (len(archives) - 1)
    # the limit holds for training and for held-out images
    return round(size), min(count, 2 * limit) if limit else count


class Holding:
    """An archive that the user gave, that was downloaded before, or that is still remote.

    given: a folder with the zips, a folder with them unpacked, or the zip itself; "" for none.
    some: only a part of the images is needed, so read the remote directory before a download.
    """

    def __init__(
        self, archive: Archive, archives: Path, given: str, mirror: str, some: bool
    ) -> None:
        self._archive = archive
        self._archives = archives
        self._path = archives / archive.file
        self._urls = archive.urls(mirror)
        self._remote: Optional[partial.RemoteZip] = None
        self._members: Dict[str, zipfile.ZipInfo] = {}
        self._container = self._open_given(Path(given)) if given else self._zip(self._path)
        if self._container is None and some:
            self._remote = partial.RemoteZip(self._urls, archive.size)
            self._members = {member.filename: member for member in self._remote.directory()}

    def whole(self) -> None:
        """Download the whole archive, unless it is local or only a part of it is needed."""
        if self._container is None and self._remote is None:
            self._download()

    @property
    def names(self) -> List[str]:
        return self._container.names if self._container else sorted(self._members)

    def ensure(self, names: Sequence[str]) -> Container:
        """A container with at least these images."""
        if self._container is not None:
            return self._container
        assert self._remote is not None
        members = [self._members[name] for name in sorted(names)]
        total = sum(member.compress_size for member in self._members.values())
        if sum(member.compress_size for member in members) > MAX_PART * total:
            return self._download()
        target = self._path.with_name(f"{self._path.stem}.part-of.zip")
        with self._remote:
            return zip_container(target, **partial.fetch_zip(self._remote, members, target))

    def _zip(self, path: Path) -> Optional[Container]:
        """The zip at `path`, checked against the published MD5; None if there is none."""
        known = download.verify(path, self._archive.md5, self._archives)
        return zip_container(path, **known) if known else None

    def _open_given(self, path: Path) -> Container:
        """The container that the user gave."""
        zipped = self._zip(path) or self._zip(path / self._archive.file)
        if zipped:
            return zipped
        stem = Path(self._archive.file).stem
        inside = (path / stem).is_dir()
        names = open_container(path / stem if inside else path).names
        return Container(path, [f"{stem}/{name}" if inside else name for name in names])

    def _download(self) -> Container:
        download.download(self._urls, self._path, self._archive.md5, self._archive.size)
        self._container = self._zip(self._path)
        assert self._container is not None
        return self._container
