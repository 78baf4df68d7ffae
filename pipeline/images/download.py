"""Download of one big file over one connection, resumed after anything, checked before it takes its name.

`NAME.part` grows at its end: its length is what is here, whatever was killed. Only a file whose MD5 is right becomes
`NAME`, with `NAME.json` beside it (size, MD5, SHA-256); a wrong one is moved to `NAME.bad`. The checksum is the
protection: an address may be plain HTTP, may have changed the file between two requests, may lie.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterator, List, Optional

from pipeline.errors import RequestError, WorkError
from pipeline.files import write_atomic
from pipeline.images.transfer import Interrupted, Refused, Remote

_CHUNK = 1 << 20


def download(urls: List[str], target: Path, md5: str, size: int) -> Iterator[int]:
    """Bring the file to `target`, yielding the number of bytes here as it grows.

    Args:
        urls: addresses of the same file, the best first; the next one is tried when one does not serve.
        md5, size: published checksum, and length in bytes.

    Raises WorkError when no address serves, the checksum is wrong or the disk is too small. What has come
    stays.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    try:
        with part.open("ab") as file:
            if file.tell() > size:
                file.truncate(0)  # it was another file's
            _require_space(part, size - os.path.getsize(part))
            yield from _filled(file, urls, size, target.name)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise WorkError(f"{part}: cannot be written: {error.strerror}; what has come is kept") from None
    _settle(part, target, md5)


def _filled(file: BinaryIO, urls: List[str], size: int, name: str) -> Iterator[int]:
    """Fill the file up to `size` from the first address that serves; its length as it grows."""
    have = os.fstat(file.fileno()).st_size
    yield have
    problems = []
    for url in urls:
        remote = Remote(url, size)
        try:
            for piece in remote.read(have):
                file.write(piece)
                have += len(piece)
                yield have
            return
        except (Interrupted, Refused) as error:
            problems.append(f"{url}: {error}")
        finally:
            remote.close()
    raise WorkError(
        f"{name}: download failed ({'; '.join(problems)}); {have} bytes are kept, "
        "run again to go on, or set fetch.mirror to another address"
    )


def _require_space(part: Path, missing: int) -> None:
    free = os.statvfs(part.parent)
    if missing > free.f_bavail * free.f_frsize:
        raise WorkError(
            f"{part.name}: needs {missing / 1e9:.1f} GB, {free.f_bavail * free.f_frsize / 1e9:.1f} GB are "
            f"free in {part.parent}; make room or choose a smaller preset"
        )


def _settle(part: Path, target: Path, md5: str) -> None:
    """Check the arrived file and give it its name; WorkError and quarantine when the checksum is wrong."""
    found = digests(part)
    if found["md5"] != md5:
        bad = target.with_name(target.name + ".bad")
        os.replace(part, bad)
        raise WorkError(
            f"{target.name}: wrong MD5 {found['md5']}, expected {md5}; moved to {bad}; "
            "`dvc repro fetch` downloads it from scratch, fetch.mirror chooses another address"
        )
    os.replace(part, target)
    write_note(target, found)


def verified(target: Path, md5: str, notes: Optional[Path] = None) -> Optional[Dict[str, Any]]:
    """What is known of an archive that is already here, hashing it when it is new to us; None when absent.

    notes: folder for what we learn about it, when its own cannot be written to.
    """
    if not target.is_file():
        return None
    noted = (notes or target.parent) / target.name
    known = read_note(noted)
    if known.get("md5") == md5 and known.get("size") == target.stat().st_size:
        return known
    found = digests(target)
    if found["md5"] != md5:
        raise RequestError(f"{target}: wrong MD5 {found['md5']}, expected {md5}; delete it to download it from scratch")
    write_note(noted, found)
    return found


def read_note(target: Path) -> Dict[str, Any]:
    """What `NAME.json` says about the file `NAME`; {} when it is missing or damaged."""
    try:
        value = json.loads(_note(target).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_note(target: Path, facts: Dict[str, Any]) -> None:
    """Put the facts into `NAME.json` beside the file `NAME`."""
    write_atomic(_note(target), json.dumps(facts, indent=1) + "\n")


def _note(target: Path) -> Path:
    return target.with_name(target.name + ".json")


def digests(path: Path) -> Dict[str, Any]:
    """Size, MD5 (what COCO published) and SHA-256 (what we trust afterwards) in one pass."""
    md5, sha256 = hashlib.md5(usedforsecurity=False), hashlib.sha256()
    with path.open("rb") as stream:
        for block in iter(lambda: stream.read(_CHUNK), b""):
            md5.update(block)
            sha256.update(block)
    return {"size": os.path.getsize(path), "md5": md5.hexdigest(), "sha256": sha256.hexdigest()}
