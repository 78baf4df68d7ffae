"""Download COCO's archives, or single images of them, and split their images.

A remote archive is read in parts, from the first address that answers. A whole archive grows as
`NAME.part`, so a killed download resumes where it was. Only a file with the right MD5 is renamed to
`NAME`. A file with another MD5 is moved to `NAME.bad`. The checksum protects against plain HTTP,
against a file that changes between two requests, and against a wrong server.

With `fetch.limit`, single images are downloaded, many at a time. Each is checked against the CRC-32
in the directory of the archive, since the published MD5 is that of the whole archive.

The certificate of the official host does not match its name, so another address of the same files,
which has TLS, is tried first.
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
MIRROR = "COCO_MIRROR"  # Environment variable: base address to use instead of the official one
BLOCK = 1 << 22  # Bytes of a request. A kill or a broken connection loses at most these
IMAGES_AT_ONCE = 32  # Images of a remote archive that are requested at once
EXTRA_BYTES = 1 << 10  # More bytes than the extra field between a member's name and its data has
CONNECT_S = 10.0  # Seconds to connect
SILENCE_S = 30.0  # Seconds without a byte, after which a connection counts as broken
TRIES = 5  # Further tries after a failure

sleep = time.sleep  # A test replaces it


class Archive(NamedTuple):
    """One of COCO's archives, as it is published.

    Attributes:
        file: file name of the zip.
        md5: its MD5.
        images: number of its photographs.
        size: its size in bytes.
    """

    file: str
    md5: str
    images: int
    size: int


TRAIN2014 = Archive("train2014.zip", "0da8c0bd3d6becc4dcb32757491aca88", 82_783, 13_510_573_713)
VAL2014 = Archive("val2014.zip", "a3d79f5ed8d289b7a7554ce06a5782b3", 40_504, 6_645_013_297)
TRAIN2017 = Archive("train2017.zip", "cced6f7f71b7629ddf16f17bbcfab6b2", 118_287, 19_336_861_798)
VAL2017 = Archive("val2017.zip", "442b8da7639aecaf257c1dceb8ba8c80", 5_000, 815_585_330)

# Number of images of val2014 that are held out, as many as val2017 has. The rest is not used.
HELD_OUT_IMAGES = 5_000
# The archive of the training images, then that of the held-out images if it is a separate one.
SOURCES: Dict[str, Sequence[Archive]] = {
    "coco2014": (TRAIN2014, VAL2014),
    "coco2017": (TRAIN2017, VAL2017),
    "coco2017-val": (VAL2017,),
}


def estimate_download(source: str, limit: int = 0) -> Tuple[int, int]:
    """Return the bytes to download for a source, and the number of its photographs.

    The number is 0 if it is not known before the fetch.

    Args:
        source: the key `fetch.source`.
        limit: the key `fetch.limit`. If it is 0, there is no limit.
    """
    archives = SOURCES.get(source, ())
    # With a limit only a part of a remote archive is downloaded. If there is one archive, it holds
    # the training and the held-out images.
    image_count = limit * (2 if len(archives) == 1 else 1)
    size = sum(
        archive.size * (min(1.0, image_count / archive.images) if limit else 1.0)
        for archive in archives
    )
    count = sum(map(len, SAMPLE.values())) if source == "sample" else 0
    if archives:
        count = archives[0].images + HELD_OUT_IMAGES * (len(archives) - 1)
    # The limit is one for training and one for held-out images.
    return round(size), min(count, 2 * limit) if limit else count


def download_and_split(
    settings: FetchParams, archives: Path
) -> Tuple[Splits, Dict[str, Container]]:
    """Split the images of COCO, and download those that are missing.

    With `fetch.limit` only the images of the splits are downloaded, otherwise whole archives.

    Args:
        settings: the section `fetch`.
        archives: folder of the downloads.

    Returns:
        The names of the images by split, and the containers by their key in source.json.

    Raises:
        RequestError: If `fetch.path` does not hold the archives.
        WorkError: If a download fails.
    """
    archive_of_key = dict(zip(("train", "val"), SOURCES[settings.source]))
    folder_names = " and ".join(Path(archive.file).stem for archive in archive_of_key.values())
    incomplete_error = RequestError(
        f"fetch.path = {settings.path}: must hold {folder_names}, as .zip or as folders"
    )
    if "val" in archive_of_key and Path(settings.path).is_file():
        raise incomplete_error
    # Open an archive that is there. Download a missing one, unless a limit needs only a part of it.
    sources: Dict[str, Union[Container, RemoteArchive]] = {}
    for key, archive in archive_of_key.items():
        target = archives / archive.file
        if settings.path or target.is_file():
            sources[key] = _open_local_archive(archive, Path(settings.path or archives))
        else:
            remote = RemoteArchive(archive)
            sources[key] = remote if settings.limit else remote.download(target)
    train = sources["train"].names
    held_out = None
    if "val" in sources:
        names = sources["val"].names
        if not set(names).isdisjoint(train):
            raise incomplete_error
        held_out = dataset.hold_out(names, min(1.0, HELD_OUT_IMAGES / len(names)), dataset.SEED)[1]
    splits = dataset.split_names(train, settings, {}, held_out)
    names = {name for split in splits.values() for name in split}
    containers = {
        key: source.download_images(names, archives)
        if isinstance(source, RemoteArchive)
        else source
        for key, source in sources.items()
    }
    return splits, containers


def _open_local_archive(archive: Archive, path: Path) -> Container:
    """Open a local archive, which is a zip or the folder that it unpacks to."""
    for zip_path in (path, path / archive.file):
        if zip_path.is_file():
            # Each image is checked against its CRC-32 when it is read.
            if zip_path.stat().st_size != archive.size:
                raise RequestError(f"{zip_path}: must have {archive.size} bytes; download it again")
            return dataset.open_zip(zip_path, size=archive.size)
    stem = Path(archive.file).stem
    if not (path / stem).is_dir():
        return dataset.open_container(path)
    names = dataset.open_container(path / stem).names
    return Container(path, [f"{stem}/{name}" for name in names])


# --- remote archives


class RemoteArchive:
    """An archive on a server. It is read in parts, from the first of its addresses that answers.

    Attributes:
        archive: what is published about it.
        names: the names of its images. They are read from the server once. Raises WorkError if no
            address serves parts of the archive.
    """

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        mirror = os.environ.get(MIRROR, "").rstrip("/")  # Replaces the official addresses
        self._urls = [f"{base}/{archive.file}" for base in ([mirror] if mirror else [TLS, PLAIN])]

    @property
    def names(self) -> List[str]:
        return list(self._members_on_server)

    @cached_property
    def _members_on_server(self) -> Dict[str, zipfile.ZipInfo]:
        """Read the images of the archive, by name, from its directory on the server."""

        def read(files: Any, url: str) -> List[zipfile.ZipInfo]:
            # The last bytes say where the directory is, so zipfile reads these two parts only.
            with files.open(url, size=self.archive.size, block_size=1 << 16) as stream:
                try:
                    return zipfile.ZipFile(stream).infolist()
                except (zipfile.BadZipFile, NotImplementedError) as error:
                    raise WorkError(f"{url}: its directory cannot be read: {error}") from None

        members = dataset.select_and_check_members(self._try_addresses(read), self.archive.file)
        return {member.filename: member for member in members}

    def download_images(self, names: Collection[str], folder: Path) -> Container:
        """Download the images that are among `names` into a zip in `folder`, unless it exists.

        Raises:
            WorkError: If no address serves them, or if a CRC-32 is wrong.
        """
        target = resolve_link(folder / f"{Path(self.archive.file).stem}.part-of.zip")
        members = [member for name, member in self._members_on_server.items() if name in names]
        crcs = [(member.filename, member.CRC) for member in members]
        facts = {"partial": "CRC-32 of each image checked, MD5 of the whole not"}
        if target.is_file():
            container = dataset.open_zip(target, **facts)
            if [(name, member.CRC) for name, member in (container.members or {}).items()] == crcs:
                return container
        temporary = target.with_name(target.name + ".part")
        target.parent.mkdir(parents=True, exist_ok=True)
        progress_options = {
            "desc": f"images for {target.name}",
            "total": len(members),
            "unit": "image",
        }
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as out:
            for member, data in zip(
                members, Progress(self._download_and_check(members), **progress_options)
            ):
                out.writestr(zipfile.ZipInfo(member.filename), data)
        replace_file(temporary, target)
        return dataset.open_zip(target, **facts)

    def _download_and_check(self, members: Sequence[zipfile.ZipInfo]) -> Iterator[bytes]:
        """Yield the bytes of these images, in order.

        Raises:
            WorkError: If a CRC-32 is wrong.
        """
        for first in range(0, len(members), IMAGES_AT_ONCE):
            group = members[first : first + IMAGES_AT_ONCE]
            for member, data in zip(group, self._download_members(group)):
                # The header in front of the data says where they begin.
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
        """Download these members with their headers. What has arrived is not requested again."""
        downloaded: Dict[int, bytes] = {}  # By the offset of the header
        # The length of a header is not known yet, so more bytes are read than may be needed.
        sizes = {
            member.header_offset: dataset.HEADER
            + 4 * len(member.filename)
            + EXTRA_BYTES
            + member.compress_size
            for member in members
        }

        def read(files: Any, url: str) -> None:
            starts = [start for start in sizes if start not in downloaded]
            ends = [min(start + sizes[start], self.archive.size) for start in starts]
            results = files.cat_ranges([url] * len(starts), starts, ends, on_error="return")
            downloaded.update(
                (start, data) for start, data in zip(starts, results) if isinstance(data, bytes)
            )
            if len(downloaded) < len(members):
                raise next(result for result in results if isinstance(result, Exception))

        self._try_addresses(read)
        return [downloaded[start] for start in sizes]

    def download(self, target: Path) -> Container:
        """Download the whole archive to `target`, and show the progress. Return its container.

        Raises:
            WorkError: If the download fails, or if the MD5 is wrong. After a failure, `NAME.part`
                stays.
        """
        target = resolve_link(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        part_path = target.with_name(target.name + ".part")
        size = self.archive.size
        progress_options = {"unit": "B", "unit_scale": True, "desc": f"downloading {target.name}"}
        # The file may begin with what a killed download has left.
        with (
            part_path.open("ab") as stream,
            Progress(total=size, initial=stream.tell(), **progress_options) as bar,
        ):
            while stream.tell() < size:
                block = self._download_block(stream.tell(), min(stream.tell() + BLOCK, size))
                stream.write(block)
                stream.flush()
                bar.update(len(block))
            os.fsync(stream.fileno())
        # Only the published bytes get the final name.
        md5 = compute_md5(part_path)
        if md5 != self.archive.md5:
            bad_path = target.with_name(target.name + ".bad")
            os.replace(part_path, bad_path)
            raise WorkError(
                f"{target.name}: wrong MD5 {md5}, expected {self.archive.md5}; moved to"
                f" {bad_path}; `dvc repro fetch` downloads it from scratch, {MIRROR} chooses"
                " another address"
            )
        replace_file(part_path, target)
        return dataset.open_zip(target, size=size)

    def _download_block(self, start: int, end: int) -> bytes:
        """Download the bytes from `start` to `end` of the archive."""

        def read(files: Any, url: str) -> bytes:
            # A stream of fsspec fails if the server cannot serve parts of a file.
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

        Later calls begin with that address.

        Args:
            action: gets the file system of fsspec and the address.

        Raises:
            WorkError: If all addresses fail.
        """
        import aiohttp
        import fsspec

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
        options = {"timeout": timeout, "trust_env": True}
        files = fsspec.filesystem("http", client_kwargs=options)
        problems = []
        for url in list(self._urls):
            problem = ""
            for failures in range(1, TRIES + 2):
                try:
                    return action(files, url)
                except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
                    problem = f"{type(error).__name__}: {error}"
                    sleep(min(2.0**failures / 2 - 0.5, 30.0))
            problems.append(f"{url}: {problem}")
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
