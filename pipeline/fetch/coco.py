"""Read the images of COCO's archives, which may be local or remote.

fsspec reads a remote archive in parts, from the first address that answers. A whole archive grows
as `NAME.part`, so a killed download resumes at its length. Only a file with the right MD5 is
renamed to `NAME`. A file with another MD5 is moved to `NAME.bad`. The checksum protects against
plain HTTP, against a file that changes between two requests, and against a wrong server.

With `fetch.limit`, single images are read, many at a time. Each is checked against the CRC-32 in
the archive's directory, since the published MD5 is the MD5 of the whole archive.

The official host's certificate does not match its name, so the TLS address of the same objects is
tried first.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
import zipfile
from functools import cached_property
from pathlib import Path
from typing import (
    Any,
    Callable,
    Collection,
    Dict,
    Iterator,
    List,
    NamedTuple,
    Sequence,
    Tuple,
    Union,
)

from pipeline.errors import RequestError, WorkError
from pipeline.fetch import dataset
from pipeline.fetch.dataset import SAMPLE, Container, Splits
from pipeline.params import FetchParams
from superglue_sift.features.images import BadImage
from superglue_sift.files import replace_file, resolve_link
from superglue_sift.progress import Progress

TLS = "https://s3.amazonaws.com/images.cocodataset.org/zips"
PLAIN = "http://images.cocodataset.org/zips"
MIRROR = "COCO_MIRROR"  # environment variable: base address to use instead of the official one
BLOCK = 1 << 22  # bytes of a request; a kill or a broken connection loses at most these
IMAGES_AT_ONCE = 32  # images of a remote archive that are requested at once
EXTRA_BYTES = 1 << 10  # more bytes than the extra field between a member's name and its data has
CONNECT_S = 10.0  # seconds to connect
SILENCE_S = 30.0  # seconds without a byte, after which a connection is broken
TRIES = 5  # further tries after a failure

sleep = time.sleep  # a test replaces it


class Archive(NamedTuple):
    """One zip of `size` bytes with `images` photographs, and its published MD5."""

    file: str
    md5: str
    images: int
    size: int


TRAIN2014 = Archive("train2014.zip", "0da8c0bd3d6becc4dcb32757491aca88", 82_783, 13_510_573_713)
VAL2014 = Archive("val2014.zip", "a3d79f5ed8d289b7a7554ce06a5782b3", 40_504, 6_645_013_297)
TRAIN2017 = Archive("train2017.zip", "cced6f7f71b7629ddf16f17bbcfab6b2", 118_287, 19_336_861_798)
VAL2017 = Archive("val2017.zip", "442b8da7639aecaf257c1dceb8ba8c80", 5_000, 815_585_330)

# Number of images of val2014 that are held out, as many as val2017 has. The others are not used.
HELD_OUT_IMAGES = 5_000
# The archive of the training images, and the archive of the held-out images if that is another.
SOURCES: Dict[str, Sequence[Archive]] = {
    "coco2014": (TRAIN2014, VAL2014),
    "coco2017": (TRAIN2017, VAL2017),
    "coco2017-val": (VAL2017,),
}


def estimate_download(source: str, limit: int = 0) -> Tuple[int, int]:
    """Return the bytes to download from a source, and the number of its photographs.

    The number is 0 if it is not known before the fetch.
    """
    archives = SOURCES.get(source, ())
    # With a limit only a part of a remote archive is downloaded. If there is one archive, it holds
    # the training and the held-out images.
    wanted = limit * (2 if len(archives) == 1 else 1)
    size = sum(each.size * (min(1.0, wanted / each.images) if limit else 1.0) for each in archives)
    count = sum(map(len, SAMPLE.values())) if source == "sample" else 0
    if archives:
        count = archives[0].images + HELD_OUT_IMAGES * (len(archives) - 1)
    # The limit is one for training and one for held-out images.
    return round(size), min(count, 2 * limit) if limit else count


def download_and_split(
    settings: FetchParams, archives: Path
) -> Tuple[Splits, Dict[str, Container]]:
    """Split the images of the source, and download those that are missing into `archives`.

    Returns:
        The names by split, and the containers. A whole archive is downloaded without `fetch.limit`,
        else only its chosen images.
    """
    wanted = dict(zip(("train", "val"), SOURCES[settings.source]))
    stems = " and ".join(Path(archive.file).stem for archive in wanted.values())
    incomplete = RequestError(
        f"fetch.path = {settings.path}: must hold {stems}, as .zip or as folders"
    )
    if "val" in wanted and Path(settings.path).is_file():
        raise incomplete
    # Open an archive that is there; without a limit download it, else read it in parts.
    sources: Dict[str, Union[Container, RemoteArchive]] = {}
    for key, archive in wanted.items():
        target = archives / archive.file
        if settings.path or target.is_file():
            sources[key] = _open_local_archive(archive, Path(settings.path or archives))
        else:
            remote = RemoteArchive(archive)
            sources[key] = remote if settings.limit else remote.download(target)
    # The names decide the split.
    train = sources["train"].names
    held_out = None
    if "val" in sources:
        names = sources["val"].names
        if not set(names).isdisjoint(train):
            raise incomplete
        held_out = dataset.hold_out(names, min(1.0, HELD_OUT_IMAGES / len(names)), dataset.SEED)[1]
    chosen = dataset.split_names(train, settings, {}, held_out)
    # Copy the chosen images of a remote archive into a zip.
    names = {name for split in chosen.values() for name in split}
    held = {
        key: source.download_images(names, archives)
        if isinstance(source, RemoteArchive)
        else source
        for key, source in sources.items()
    }
    return chosen, held


def _open_local_archive(archive: Archive, path: Path) -> Container:
    """Open a local archive, which is a zip or the folder that it unpacks to."""
    for zipped in (path, path / archive.file):
        if zipped.is_file():
            # Each image is checked against its CRC-32 when it is read.
            if zipped.stat().st_size != archive.size:
                raise RequestError(f"{zipped}: must have {archive.size} bytes; download it again")
            return dataset.open_zip(zipped, size=archive.size)
    stem = Path(archive.file).stem
    if not (path / stem).is_dir():
        return dataset.open_container(path)
    names = dataset.open_container(path / stem).names
    return Container(path, [f"{stem}/{name}" for name in names])


# --- remote archives


class RemoteArchive:
    """An archive at the first of its addresses that serves parts of it.

    Raises:
        WorkError: If no address serves them.
    """

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        mirror = os.environ.get(MIRROR, "").rstrip("/")  # it replaces the official addresses
        self._urls = [f"{base}/{archive.file}" for base in ([mirror] if mirror else [TLS, PLAIN])]

    @property
    def names(self) -> List[str]:
        return list(self._members)

    @cached_property
    def _members(self) -> Dict[str, zipfile.ZipInfo]:
        """Read the directory of the archive: its images by name."""

        def read(files: Any, url: str) -> List[zipfile.ZipInfo]:
            # zipfile reads the last bytes, which say where the directory is, and the directory.
            with files.open(url, size=self.archive.size, block_size=1 << 16) as stream:
                try:
                    return zipfile.ZipFile(stream).infolist()
                except (zipfile.BadZipFile, NotImplementedError) as error:
                    raise WorkError(f"{url}: its directory cannot be read: {error}") from None

        members = dataset.select_and_check_members(self._try_addresses(read), self.archive.file)
        return {member.filename: member for member in members}

    def download_images(self, names: Collection[str], folder: Path) -> Container:
        """Write a zip of its images that are among `names` to `folder`, unless it exists."""
        target = resolve_link(folder / f"{Path(self.archive.file).stem}.part-of.zip")
        members = [member for name, member in self._members.items() if name in names]
        wanted = [(member.filename, member.CRC) for member in members]
        checked = {"partial": "CRC-32 of each image checked, MD5 of the whole not"}
        if target.is_file():
            known = dataset.open_zip(target, **checked)
            if [(name, each.CRC) for name, each in (known.members or {}).items()] == wanted:
                return known
        temporary = target.with_name(target.name + ".part")
        target.parent.mkdir(parents=True, exist_ok=True)
        shown = {"desc": f"images for {target.name}", "total": len(members), "unit": "image"}
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as out:
            for member, data in zip(members, Progress(self._download_and_check(members), **shown)):
                out.writestr(zipfile.ZipInfo(member.filename), data)
        replace_file(temporary, target)
        return dataset.open_zip(target, **checked)

    def _download_and_check(self, members: Sequence[zipfile.ZipInfo]) -> Iterator[bytes]:
        """Yield the bytes of these images, in order. Raises WorkError for a wrong CRC-32."""
        for first in range(0, len(members), IMAGES_AT_ONCE):
            group = members[first : first + IMAGES_AT_ONCE]
            for member, data in zip(group, self._download_members(group)):
                # The local header says where the data begin.
                entry = dataset.make_member_entry(member, data, self.archive.file)
                begin = entry.offset - member.header_offset
                try:
                    yield dataset.unpack_and_check(data[begin : begin + entry.packed], entry)
                except BadImage:
                    raise WorkError(
                        f"{self._urls[0]}: '{member.filename}' arrived with a wrong CRC-32; run"
                        " again"
                    ) from None

    def _download_members(self, members: Sequence[zipfile.ZipInfo]) -> List[bytes]:
        """Read these members with their headers. What has arrived is not requested again."""
        done: Dict[int, bytes] = {}  # by the place of the header
        # The length of a local header is not known yet, so some bytes more are read.
        sizes = {
            m.header_offset: dataset.HEADER + 4 * len(m.filename) + EXTRA_BYTES + m.compress_size
            for m in members
        }

        def read(files: Any, url: str) -> None:
            starts = [start for start in sizes if start not in done]
            ends = [min(start + sizes[start], self.archive.size) for start in starts]
            answers = files.cat_ranges([url] * len(starts), starts, ends, on_error="return")
            done.update((s, data) for s, data in zip(starts, answers) if isinstance(data, bytes))
            if len(done) < len(members):
                raise next(answer for answer in answers if isinstance(answer, Exception))

        self._try_addresses(read)
        return [done[start] for start in sizes]

    def download(self, target: Path) -> Container:
        """Download the archive to `target`, and show the progress. Return its container.

        Raises:
            WorkError: If the MD5 is wrong. If the download fails, `NAME.part` is kept.
        """
        target = resolve_link(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + ".part")
        size = self.archive.size
        shown = {"unit": "B", "unit_scale": True, "desc": f"downloading {target.name}"}
        # Append one block after the other to what a killed download has left.
        with part.open("ab") as file, Progress(total=size, initial=file.tell(), **shown) as bar:
            while file.tell() < size:
                block = self._download_block(file.tell(), min(file.tell() + BLOCK, size))
                file.write(block)
                file.flush()
                bar.update(len(block))
            os.fsync(file.fileno())
        # Only the published bytes get the name.
        found = compute_md5(part)
        if found != self.archive.md5:
            bad = target.with_name(target.name + ".bad")
            os.replace(part, bad)
            raise WorkError(
                f"{target.name}: wrong MD5 {found}, expected {self.archive.md5}; moved to {bad}; "
                f"`dvc repro fetch` downloads it from scratch, {MIRROR} chooses another address"
            )
        replace_file(part, target)
        return dataset.open_zip(target, size=size)

    def _download_block(self, start: int, end: int) -> bytes:
        """Read the bytes from `start` to `end`."""

        def read(files: Any, url: str) -> bytes:
            # A stream requires of the server that it serves parts of a file.
            size = self.archive.size
            with files.open(url, size=size, block_size=BLOCK, cache_type="none") as stream:
                stream.seek(start)
                block = stream.read(end - start)
            if len(block) < end - start:
                raise OSError(f"{len(block)} of {end - start} bytes from byte {start}")
            return block

        return self._try_addresses(read)

    def _try_addresses(self, action: Callable[[Any, str], Any]) -> Any:
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
            # Wait longer after each failure.
            for failures in range(1, TRIES + 2):
                try:
                    return action(files, url)
                except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
                    problem = f"{type(error).__name__}: {error}"
                    sleep(min(2.0**failures / 2 - 0.5, 30.0))
            problems.append(f"{url}: {problem}")
            # The address that failed becomes the last one.
            self._urls = [*self._urls[1:], url]
        raise WorkError(
            f"{self.archive.file} cannot be downloaded ({'; '.join(problems)}); what arrived is"
            f" kept: run again, or set {MIRROR} to another address"
        )


def compute_md5(path: Path) -> str:
    """Return the MD5, which COCO's mirrors publish, in hexadecimal digits."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()
