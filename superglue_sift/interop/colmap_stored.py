"""Match the features that a COLMAP database already holds: `superglue-match --colmap DATABASE`.

    with StoredFeatures("database.db") as stored:
        waiting = [pair for pair in pairs_of(stored.photos) if not stored.has_matches(*pair)]
        ...
        stored.add(*pair, result)

Nothing is extracted again and no photograph is read. Only pairs without matches are added, so the
same command resumes. It reads by sqlite3, which leaves databases of older versions as they are, and
writes by pycolmap.
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3
from pathlib import Path
from typing import Any, Iterator, List, Tuple

import numpy as np

from superglue_sift.errors import RequestError, import_extra
from superglue_sift.features.features import Features
from superglue_sift.features.store import Item
from superglue_sift.interop.colmap import write_pair
from superglue_sift.match_result import MatchResult

MAX_FEATURES = 256  # images whose features stay in memory
SIFT = (0, -1)  # types of descriptors: COLMAP's SIFT, or not stated by older versions
EXTRACT = "run colmap feature_extractor first"


class StoredFeatures:
    """The features of a database, and the pairs that have matches. A context manager.

    photos: an Item for each image with features; its `image` is the path that the database states.
    """

    def __init__(self, path: Path, max_keypoints: int) -> None:
        """max_keypoints: of an image, those of the largest scales.

        Raises RequestError: no COLMAP database with SIFT features, or another program writes it.
        """
        self.path = path
        self.max_keypoints = max_keypoints
        self._pycolmap = import_extra("pycolmap", "colmap")
        self._writer: Any = None
        if not path.is_file():
            raise RequestError(f"{path}: no such database; {EXTRACT}")
        self._reader = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        self._reader.row_factory = sqlite3.Row
        with self._explain():
            rows = self._reader.execute(
                "SELECT image_id, name, width, height, camera_id FROM images JOIN cameras"
                " USING (camera_id) ORDER BY name"
            ).fetchall()
            described = "SELECT image_id FROM keypoints JOIN descriptors USING (image_id)"
            found = {number for (number,) in self._reader.execute(described)}
            pairs = "SELECT pair_id FROM matches UNION SELECT pair_id FROM two_view_geometries"
            self._matched = {number for (number,) in self._reader.execute(pairs)}
        self.without = [row["name"] for row in rows if row["image_id"] not in found]
        self._images = {row["name"]: row for row in rows if row["image_id"] in found}
        if not self._images:
            raise RequestError(f"{path}: has no features; {EXTRACT}")
        self.photos = [Item(name, Path(name)) for name in self._images]
        self._read = functools.lru_cache(MAX_FEATURES)(self._read_image)

    def __enter__(self) -> StoredFeatures:
        return self

    def __exit__(self, *_error: Any) -> None:
        self._reader.close()
        if self._writer is not None:
            self._writer.close()

    def __call__(self, photo: Item) -> Features:
        """The features of an image, the largest first. Raises RequestError for other than SIFT."""
        return self._read(photo.name)[0]

    def has_matches(self, photo0: Item, photo1: Item) -> bool:
        """Whether the database has matches of this pair, or their geometry."""
        return self._pair_id(photo0, photo1) in self._matched

    def start_writing(self) -> None:
        """Open the database to `add`. Raises RequestError if another program writes it."""
        with self._explain(), contextlib.closing(sqlite3.connect(self.path, timeout=1)) as held:
            held.execute("BEGIN IMMEDIATE")
            held.rollback()
        self._writer = self._pycolmap.Database.open(str(self.path))

    def add(self, photo0: Item, photo1: Item, result: MatchResult) -> None:
        """Write the matches of a pair, none if it was rejected, and their geometry if verified."""
        sides: List[Tuple[int, Any, np.ndarray]] = []
        kept = result.matches.astype(np.uint32)
        for side, photo in enumerate((photo0, photo1)):
            row = self._images[photo.name]
            _, order, points = self._read(photo.name)
            kept[:, side] = order[kept[:, side]]
            camera = self._writer.read_camera(row["camera_id"])
            sides.append((row["image_id"], camera, points))
        write_pair(self._pycolmap, self._writer, sides, kept)
        self._matched.add(self._pair_id(photo0, photo1))

    def _pair_id(self, photo0: Item, photo1: Item) -> int:
        numbers = (self._images[photo.name]["image_id"] for photo in (photo0, photo1))
        return self._pycolmap.image_pair_to_pair_id(*numbers)

    def _read_image(self, name: str) -> Tuple[Features, np.ndarray, np.ndarray]:
        """Features, their rows in the database, and the positions (n, 2) float64 of all its rows in
        COLMAP's coordinates.
        """
        image = self._images[name]
        columns = "k.cols AS columns, k.data AS points, d.*"
        found = self._reader.execute(
            f"SELECT {columns} FROM keypoints k JOIN descriptors d USING (image_id)"
            " WHERE image_id = ?",
            (image["image_id"],),
        )
        row = dict(found.fetchone())
        kind = row.get("type", SIFT[1])  # not in older versions
        if kind not in SIFT or (row["cols"] != 128 and row["data"]):
            named = self._pycolmap.FeatureExtractorType(kind).name
            given = f"descriptors of {named} with {row['cols']} bytes"
            raise RequestError(f"{self.path}: {name} has {given}; the network matches SIFT")
        keypoints = np.frombuffer(row["points"] or b"", np.float32).reshape(-1, row["columns"] or 4)
        if keypoints.shape[1] < 4:
            raise RequestError(f"{self.path}: {name} has keypoints without scale and orientation")
        descriptors = np.frombuffer(row["data"] or b"", np.uint8).reshape(-1, 128)
        size = (image["width"], image["height"])
        features = Features.of_colmap(keypoints, descriptors, size)
        order = np.argsort(-features.records["scale"], kind="stable")[: self.max_keypoints]
        points = keypoints[:, :2].astype(np.float64)
        return features.select(order), order, points

    @contextlib.contextmanager
    def _explain(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            reason = str(error)
            if "locked" in reason:
                reason = "another program writes it; wait until that ends"
            elif "no such" in reason or "not a database" in reason:
                reason = "is not a database of COLMAP"
            raise RequestError(f"{self.path}: {reason}") from None
