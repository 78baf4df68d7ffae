"""The shards of one split: which there are, which of them are done, and the end of the work.

A shard is a fixed run of manifest rows, so its bytes depend on them and on the parameters alone. While work goes on
each finished shard has a note beside it; in the end the notes become store.json. A shard whose fingerprint (parameters,
rows, code, OpenCV) is not the one wanted now is thrown away, a whole one is never made twice.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Sequence

import cv2

from pipeline.errors import RequestError
from pipeline.features import store
from pipeline.features.store import ImageViews
from pipeline.files import write_atomic
from pipeline.image_sets.manifest import Entry
from pipeline.provenance.code import code_digest
from superglue_sift import extractors
from superglue_sift.images import BadImage

CODE = (
    "pipeline.keypoints.image",
    "pipeline.image_sets.decode",
    "pipeline.image_sets.dali_decoder",
    "pipeline.features.store",
)
# the manifest names the CRC-32 of the very bytes an image is made of, wherever they are read from
OUTSIDE = ("pipeline.image_sets.manifest", "pipeline.image_sets.sources")

# A kill loses at most the shard that each process works on.
SHARD_IMAGES = 64


@dataclass(frozen=True)
class Shard:
    """A piece of work. fingerprint: SHA-256 over all that its bytes depend on."""

    file: str
    entries: Sequence[Entry]
    fingerprint: str


def plan(entries: Sequence[Entry], settings: Any) -> List[Shard]:
    """Cut the rows of a split (sorted, as the manifest gives them) into shards."""
    common = {
        "settings": settings.model_dump(),
        "code": code_digest(CODE, OUTSIDE),
        "opencv": cv2.__version__,
        "extractor": extractors.load(settings.extractor).code,
    }
    pieces = [entries[start : start + SHARD_IMAGES] for start in range(0, len(entries), SHARD_IMAGES)]
    shards = []
    for index, piece in enumerate(pieces):
        rows = [[entry.name, entry.size, entry.crc32] for entry in piece]
        text = json.dumps({**common, "entries": rows}, sort_keys=True)
        fingerprint = hashlib.sha256(text.encode("utf-8")).hexdigest()
        shards.append(Shard(store.shard_name(index), piece, fingerprint))
    return shards


class Folder:
    """The folder of one split while it is being filled. `shards`: the plan."""

    def __init__(self, path: Path, shards: Sequence[Shard]) -> None:
        self.path, self.shards = path, list(shards)

    def open(self, mine: Sequence[Shard]) -> List[Shard]:
        """Keep what is whole, throw away what does not fit; returns those of `mine` still to be made."""
        self.path.mkdir(parents=True, exist_ok=True)
        rows = self._known_rows()
        missing = []
        for shard in mine:
            row = rows.get(shard.file)
            if row is not None and self._fits(shard, row):
                self._note(shard, row)
            else:
                self._note_path(shard).unlink(missing_ok=True)
                (self.path / shard.file).unlink(missing_ok=True)
                missing.append(shard)
        return missing

    def discard_strangers(self) -> None:
        """Remove what the plan does not know: shards of other parameters, halves left by a kill."""
        known = {shard.file for shard in self.shards} | {self._note_path(shard).name for shard in self.shards}
        for path in self.path.iterdir() if self.path.is_dir() else ():
            if path.name not in known and path.name != store.INDEX and not path.is_dir():
                path.unlink()

    def write(self, shard: Shard, results: Iterable[Any]) -> None:
        """Write one shard from its results (ImageViews or BadImage, in the order of its entries)."""
        found = list(results)
        bad = [[each.name, each.reason] for each in found if isinstance(each, BadImage)]
        row = store.write_shard(self.path / shard.file, [each for each in found if isinstance(each, ImageViews)])
        self._note(shard, {**row, "bad": bad, "fingerprint": shard.fingerprint})

    def rows(self) -> List[Optional[Dict[str, Any]]]:
        """The row of every planned shard, None for one that is not done."""
        found = self._known_rows()
        rows = [found.get(shard.file, {}) for shard in self.shards]
        return [row if row.get("fingerprint") == each.fingerprint else None for each, row in zip(self.shards, rows)]

    def close(self, rows: Sequence[Dict[str, Any]], settings: Any) -> None:
        """Write store.json and drop the notes."""
        extractor = extractors.load(settings.extractor)
        named = [{**row, "photographs": _photographs(shard, row)} for shard, row in zip(self.shards, rows)]
        content = store.index(named, settings.views_per_image, (settings.width, settings.height), extractor)
        write_atomic(self.path / store.INDEX, json.dumps(content, indent=1) + "\n")
        for shard in self.shards:
            self._note_path(shard).unlink(missing_ok=True)

    def _known_rows(self) -> Dict[str, Dict[str, Any]]:
        """Rows by file name, from a finished store and from notes; what cannot be read is not known."""
        try:
            rows = {row["file"]: row for row in store.read_index(self.path)["shards"]}
        except RequestError:
            rows = {}
        for shard in self.shards:
            try:
                rows[shard.file] = json.loads(self._note_path(shard).read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
        return rows

    def _fits(self, shard: Shard, row: Dict[str, Any]) -> bool:
        """Is the shard what is wanted now, and whole? Hashed where it was written to since store.json was."""
        try:
            finished = (self.path / store.INDEX).stat().st_mtime_ns
            hashed = (self.path / shard.file).stat().st_mtime_ns > finished
        except OSError:
            hashed = True
        try:
            if row["fingerprint"] != shard.fingerprint:
                return False
            store.check_shard(self.path, row, hashed)
        except (RequestError, KeyError, TypeError):
            return False
        return True

    def _note(self, shard: Shard, row: Dict[str, Any]) -> None:
        write_atomic(self._note_path(shard), json.dumps(row))

    def _note_path(self, shard: Shard) -> Path:
        return (self.path / shard.file).with_suffix(".json")


def _photographs(shard: Shard, row: Dict[str, Any]) -> List[str]:
    """What stands for each image of a row, wherever it is met again (`Entry.photograph`)."""
    found = {each.name: each.photograph for each in shard.entries}
    return [found[name] for name in row["images"]]
