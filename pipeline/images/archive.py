"""Zip archives read in place: where each image stands in the file, without unpacking one of them."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import List, Optional, Sequence

from pipeline.errors import RequestError
from pipeline.images.manifest import DEFLATED, STORED, Entry
from superglue_sift.images import EXTENSIONS

_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
HEADER = _LOCAL_HEADER.size  # bytes before a member's name
MAX_RATIO = 100  # uncompressed to compressed size of one image; JPEG in a zip stays near 1
MAX_IMAGE_BYTES = 512 * 1024 * 1024


def image_members(path: Path) -> List[zipfile.ZipInfo]:
    """The images listed in the archive's directory; RequestError names what makes an archive unfit."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise RequestError(f"{path}: not a whole zip archive ({error}); delete it and run again") from None
    return checked(members, path)


def checked(members: Sequence[zipfile.ZipInfo], path: object) -> List[zipfile.ZipInfo]:
    """The images among the members, sorted by name; RequestError names one that is not to be trusted."""
    images = [member for member in members if member.filename.lower().endswith(EXTENSIONS)]
    seen = set()
    for member in images:
        problem = _unsafe(member) or ("is in it twice" if member.filename in seen else None)
        if problem:
            raise RequestError(f"{path}: refused, its member '{member.filename}' {problem}")
        seen.add(member.filename)
    if not images:
        raise RequestError(f"{path}: holds no images ({len(members)} other members)")
    return sorted(images, key=lambda member: member.filename)


def _unsafe(member: zipfile.ZipInfo) -> Optional[str]:
    """Why a member may not be used, or None. Nothing is unpacked, yet a hostile name must not spread."""
    name = member.filename
    if name.startswith(("/", "\\")) or ":" in name.split("/")[0] or ".." in name.split("/"):
        return "points outside the archive"
    if (member.external_attr >> 16) & 0o170000 == 0o120000:
        return "is a symbolic link"
    if member.compress_type not in (STORED, DEFLATED) or member.flag_bits & 1:
        return "is encrypted or packed in a way we do not read (stored and deflate are read)"
    if member.file_size > MAX_IMAGE_BYTES or member.file_size > MAX_RATIO * max(member.compress_size, 1024):
        return f"would grow from {member.compress_size} to {member.file_size} bytes"
    return None


def zip_entries(path: Path, members: Sequence[zipfile.ZipInfo], split: str, container: str) -> List[Entry]:
    """Entries of these members of the archive; reads each one's local header for its true offset."""
    entries = []
    with path.open("rb") as stream:
        for member in members:
            stream.seek(member.header_offset)
            offset = member.header_offset + header_length(stream.read(HEADER), member, path)
            name, crc = member.filename, f"{member.CRC:08x}"
            place = (offset, member.compress_size, member.compress_type)
            entries.append(Entry(name, split, container, name, member.file_size, crc, *place))
    return entries


def header_length(header: bytes, member: zipfile.ZipInfo, path: object) -> int:
    """Bytes from where a member begins to its data, by its own header; RequestError where there is none."""
    if len(header) < HEADER or header[:4] != b"PK\x03\x04":
        raise RequestError(f"{path}: refused, no data where its directory puts '{member.filename}'")
    *_, name_length, extra_length = _LOCAL_HEADER.unpack_from(header)
    return HEADER + name_length + extra_length
