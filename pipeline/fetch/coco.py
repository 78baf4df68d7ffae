"""List COCO's images, and download its archives, or single images of them.

A remote archive is read in parts, from the first address that answers. A whole archive grows as
`NAME.part`, so a killed download resumes where it was. Only a file with the right MD5 is renamed to
`NAME`. The checksum protects against plain HTTP, against a file that changes between two requests,
and against a wrong server.

With `fetch.limit`, single images are downloaded, many at a time. Each is checked against the CRC-32
in the directory of the archive, since the published MD5 is that of the whole archive.

The certificate of the official host does not match its name, so another address of the same files,
which has TLS, is tried first.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Collection, Dict, Iterator, List, NamedTuple, Sequence, Tuple

import requests
from requests.adapters import HTTPAdapter

from pipeline.errors import RequestError, WorkError
from pipeline.fetch import dataset
from pipeline.fetch.dataset import SAMPLE, Container, Entry
from pipeline.params import FetchParams
from pipeline.workers import prefetch
from superglue_sift.features.images import BadImage
from superglue_sift.files import MIB, compute_file_digest, replace_file, resolve_link
from superglue_sift.progress import Progress

TLS = "https://s3.amazonaws.com/images.cocodataset.org/zips"
PLAIN = "http://images.cocodataset.org/zips"
MIRROR = "COCO_MIRROR"  # Environment variable: base address to use instead of the official one
BLOCK = MIB  # Bytes of a block of a download
IMAGES_AT_ONCE = 32  # Images of a remote archive that are requested at once
HEADER_BYTES = 1 << 10  # More than the header in front of an image takes
DIRECTORY_BYTES = 200  # More than an image takes in the directory of an archive
CONNECT_S = 10.0  # Seconds to connect
SILENCE_S = 30.0  # Seconds without a byte, after which a connection counts as broken
TRIES = 6  # Failures in a row, after which an address is given up. The waits between are 57 s

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


def list_images(settings: FetchParams, archives: Path) -> Tuple[List[Entry], Dict[str, Container]]:
    """List and split the images of COCO, and download those that are missing.

    With `fetch.limit` only the images of the splits are downloaded, otherwise whole archives.

    Args:
        settings: the section `fetch`.
        archives: folder of the downloads.

    Returns:
        The entries of all images, and the containers by their key in source.json.

    Raises:
        RequestError: If `fetch.path` does not hold the archives, or not all of their images.
        WorkError: If a download fails.
    """
    containers: Dict[str, Container] = {}
    remote_archives: Dict[str, RemoteArchive] = {}  # Those of which a limit needs only a part
    names: Dict[str, List[str]] = {}
    for key, archive in zip(("train", "val"), SOURCES[settings.source]):
        target = archives / archive.file
        if settings.path or target.is_file():
            containers[key] = _open_local(archive, Path(settings.path or archives))
        elif settings.limit:
            remote_archives[key] = RemoteArchive(archive)
        else:
            containers[key] = RemoteArchive(archive).download(target)
        if key in containers:
            names[key] = containers[key].names
        else:
            names[key] = list(remote_archives[key].read_directory())
        if not settings.limit and len(names[key]) != archive.images:
            raise RequestError(
                f"{containers[key].path}: {len(names[key])} images of {Path(archive.file).stem},"
                f" which has {archive.images}; complete it, or set fetch.limit"
            )
    held_out = None
    if "val" in names:
        fraction = min(1.0, HELD_OUT_IMAGES / len(names["val"]))
        held_out = dataset.hold_out(names["val"], fraction, dataset.SEED)[1]
    splits = dataset.split_names(names["train"], settings, {}, held_out)
    wanted = {name for split in splits.values() for name in split}
    for key, remote in remote_archives.items():
        containers[key] = remote.download_images(wanted, archives)
    return dataset.make_entries(splits, containers), containers


def _open_local(archive: Archive, path: Path) -> Container:
    """Open an archive that is at `path` or in it: the zip, or the folder that it unpacks to.

    Its images have the names that they have in the zip, which decide the splits.
    """
    stem = Path(archive.file).stem
    folders = (path, path / "images")
    if path.name in (archive.file, stem):
        folders = (path.parent,)
    for folder in folders:
        if (folder / archive.file).is_file():
            return dataset.open_zip(folder / archive.file)
        if (folder / stem).is_dir():
            names = dataset.open_container(folder / stem).names
            return Container(folder, [f"{stem}/{name}" for name in names])
    raise RequestError(f"fetch.path = {path}: has no {archive.file}, and no folder {stem}")


# --- remote archives


class RemoteArchive:
    """An archive on a server. It is read in parts, from the first of its addresses that answers.

    Attributes:
        archive: what is published about it.
        members: its images by name, after `read_directory`.
    """

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self.members: Dict[str, zipfile.ZipInfo] = {}
        mirror = os.environ.get(MIRROR, "").rstrip("/")  # Replaces the official addresses
        self._urls = [f"{base}/{archive.file}" for base in ([mirror] if mirror else [TLS, PLAIN])]
        self._session = requests.Session()
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(pool_maxsize=IMAGES_AT_ONCE))

    def read_directory(self) -> Dict[str, zipfile.ZipInfo]:
        """Read the images of the archive, by name, from its directory on the server.

        Raises:
            WorkError: If no address serves parts of the archive.
        """
        # The directory is at the end. zipfile reads it from a file with a hole before it.
        start = max(0, self.archive.size - (1 << 16) - self.archive.images * DIRECTORY_BYTES)
        with tempfile.TemporaryFile() as stream:
            stream.seek(start)
            stream.writelines(self._read(start, self.archive.size))
            self.members = dataset.select_image_members(zipfile.ZipFile(stream).infolist())
        return self.members

    def download_images(self, names: Collection[str], folder: Path) -> Container:
        """Download the images that are among `names` into a zip in `folder`, unless it exists.

        Raises:
            WorkError: If no address serves them, or if a CRC-32 is wrong.
        """
        target = resolve_link(folder / f"{Path(self.archive.file).stem}.part-of.zip")
        members = [member for name, member in self.members.items() if name in names]
        if target.is_file():
            container = dataset.open_zip(target)
            present = [member.CRC for member in (container.members or {}).values()]
            if present == [member.CRC for member in members]:
                return container
        temporary = target.with_name(target.name + ".part")
        target.parent.mkdir(parents=True, exist_ok=True)
        progress_options = {"total": len(members), "desc": target.name, "unit": "image"}
        images = prefetch(self._download_image, members, 2 * IMAGES_AT_ONCE, IMAGES_AT_ONCE)
        with contextlib.closing(images), zipfile.ZipFile(temporary, "w") as out:
            for member, data in zip(members, Progress(images, **progress_options)):
                out.writestr(zipfile.ZipInfo(member.filename), data)
        replace_file(temporary, target)
        return dataset.open_zip(target)

    def _download_image(self, member: zipfile.ZipInfo) -> bytes:
        """Download an image and check its CRC-32."""
        # The length of the header in front of the image is not known yet.
        start = member.header_offset
        end = min(start + HEADER_BYTES + member.compress_size, self.archive.size)
        data = b"".join(self._read(start, end))
        entry = dataset.make_member_entry(member, data)
        try:
            return dataset.unpack_and_check(data[entry.offset - start :][: entry.packed], entry)
        except BadImage as error:
            raise WorkError(f"{self._urls[0]}: {error}; run again") from None

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
            for block in self._read(stream.tell(), size):
                stream.write(block)
                bar.update(len(block))
        md5 = compute_file_digest(part_path, "md5")
        if md5 != self.archive.md5:
            part_path.unlink()
            raise WorkError(
                f"{target.name}: wrong MD5 {md5}, expected {self.archive.md5}; run again, or set"
                f" {MIRROR} to another address"
            )
        replace_file(part_path, target)
        return dataset.open_zip(target)

    def _read(self, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes from `start` to `end` of the archive, in blocks.

        After a failure it resumes where it was. An address is given up after `TRIES` failures in a
        row.

        Raises:
            WorkError: If all addresses fail.
        """
        urls = self._urls
        failures = 0
        while start < end:
            try:
                # urllib3's Retry would not repeat a body that is cut off.
                with self._session.get(
                    urls[0],
                    headers={"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"},
                    stream=True,
                    timeout=(CONNECT_S, SILENCE_S),
                ) as reply:
                    reply.raise_for_status()
                    if reply.status_code != 206:
                        raise requests.HTTPError("the server sends no parts of files")
                    for block in reply.iter_content(BLOCK):
                        yield block
                        start += len(block)
                        failures = 0
                if start < end:
                    raise requests.ConnectionError("the server sent too few bytes")
            except requests.RequestException as error:
                failures += 1
                problem = f"{urls[0]}: {error}"
                if failures == 1:
                    others = [f"then {url}" for url in urls[1:]]
                    plan = ", ".join([f"trying {TRIES - 1} more times", *others])
                    Progress.write(f"{problem}; {plan}", file=sys.stderr)
                if failures < TRIES:
                    sleep(2.0**failures - 1.0)
                    continue
                urls = urls[1:]
                failures = 0
                if not urls:
                    raise WorkError(
                        f"{problem}; what arrived is kept: run again, or set {MIRROR} to another"
                        " address"
                    ) from None
                self._urls = urls  # Later calls begin with the next address
