"""Download of one big file: resumed by Range, checked before it takes its name.

`NAME.part` grows until it is whole, `NAME.part.json` remembers the ETag it belongs to; only a file whose
MD5 is right becomes `NAME`, with `NAME.json` beside it (size, MD5, SHA-256). A wrong one is moved to
`NAME.bad`.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Dict, Iterator, List, Optional

from pipeline.errors import RequestError, WorkError
from pipeline.images.manifest import write_atomic

CHUNK = 1 << 20
READ = 1 << 16
TRIES = 5
TIMEOUT = (10, 60)  # seconds to connect, seconds without a byte


def download(urls: List[str], target: Path, md5: str) -> Iterator[int]:
    """Bring the file to `target`, yielding (bytes here, bytes in all) as it grows; nothing when it is there.

    Raises WorkError when no address gives it or the checksum is wrong.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    problem = "no address given"
    for attempt in range(TRIES * len(urls)):
        url = urls[attempt % len(urls)]
        try:
            yield from _continue(url, _part(target))
            break
        except _Interrupted as error:
            problem = f"{url}: {error}"
            time.sleep(min(2.0 ** (attempt // len(urls)) - 1, 30))
    else:
        kept = _part(target).stat().st_size if _part(target).exists() else 0
        raise WorkError(
            f"{target.name}: download failed ({problem}); {kept} bytes are kept, run again to go on, "
            "or set fetch.mirror to another address"
        )
    settle(target, md5)


class _Interrupted(Exception):
    """The transfer stopped; what has arrived is kept."""


def _part(target: Path) -> Path:
    return target.with_name(target.name + ".part")


def _continue(url: str, part: Path) -> Iterator[int]:
    import requests
    import urllib3

    known = _read_json(part.with_name(part.name + ".json"))
    have = part.stat().st_size if part.exists() and known else 0
    if known and have == known.get("size"):
        return
    headers = {"Accept-Encoding": "identity"}
    if have:
        headers.update({"Range": f"bytes={have}-", "If-Range": known["etag"]})
    try:
        with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as answer:
            if answer.status_code not in (200, 206):
                raise _Interrupted(f"HTTP {answer.status_code}")
            resumed = answer.status_code == 206 and have
            have = have if resumed else 0
            length = int(answer.headers.get("Content-Length", 0))
            note = {"etag": answer.headers.get("ETag", ""), "size": have + length if length else None}
            if not note["etag"] or note["etag"].startswith("W/"):
                note["etag"] = answer.headers.get("Last-Modified", "")
            write_atomic(part.with_name(part.name + ".json"), json.dumps(note))
            with part.open("ab" if resumed else "wb") as stream:
                answer.raw.enforce_content_length = False  # else the last bytes before a cut are thrown away
                for piece in iter(lambda: answer.raw.read(READ), b""):
                    stream.write(piece)
                    have += len(piece)
                    yield have
    except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
        raise _Interrupted(f"{type(error).__name__}: {error}") from None
    if note["size"] not in (None, have):
        raise _Interrupted(f"stopped at {have} of {note['size']} bytes")


def settle(target: Path, md5: str) -> Dict[str, object]:
    """Check the arrived file and give it its name; WorkError and quarantine when the checksum is wrong."""
    part = _part(target)
    found = digests(part)
    if found["md5"] != md5:
        bad = target.with_name(target.name + ".bad")
        os.replace(part, bad)
        part.with_name(part.name + ".json").unlink(missing_ok=True)
        raise WorkError(
            f"{target.name}: wrong MD5 {found['md5']}, expected {md5}; moved to {bad}; "
            "run again to download it anew"
        )
    os.replace(part, target)
    part.with_name(part.name + ".json").unlink(missing_ok=True)
    write_atomic(target.with_name(target.name + ".json"), json.dumps(found, indent=1) + "\n")
    return found


def verified(target: Path, md5: str) -> Optional[Dict[str, object]]:
    """What is known of an archive that is already here, hashing it when it is new to us; None when absent."""
    if not target.is_file():
        return None
    note = _read_json(target.with_name(target.name + ".json"))
    if note.get("md5") == md5 and note.get("size") == target.stat().st_size:
        return note
    found = digests(target)
    if found["md5"] != md5:
        raise RequestError(
            f"{target}: wrong MD5 {found['md5']}, expected {md5}; delete it to download it anew"
        )
    write_atomic(target.with_name(target.name + ".json"), json.dumps(found, indent=1) + "\n")
    return found


def digests(path: Path) -> Dict[str, object]:
    """Size, MD5 (what COCO published) and SHA-256 (what we trust afterwards) in one pass."""
    md5, sha256 = hashlib.md5(usedforsecurity=False), hashlib.sha256()
    with path.open("rb") as stream:
        for block in iter(lambda: stream.read(CHUNK), b""):
            md5.update(block)
            sha256.update(block)
    return {"size": path.stat().st_size, "md5": md5.hexdigest(), "sha256": sha256.hexdigest()}


def _read_json(path: Path) -> Dict[str, object]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
