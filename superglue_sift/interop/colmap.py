"""Matches as a COLMAP database, the input of its mapper (pip install 'superglue-sift[colmap]').

    with ColmapDatabase("database.db", "photos") as database:
        database.add_photographs(["a.jpg", "b.jpg"])        # cameras and positions by GPS
        database.add("a.jpg", "b.jpg", features_a, features_b, result)

    pycolmap.incremental_mapping("database.db", "photos", "model")

COLMAP's own importer writes the photographs: their cameras, and their positions by GPS. COLMAP's
coordinates start at the corner of the first pixel, so 0.5 is added. It ignores the EXIF
orientation, so keypoints of photographs that were rotated upright are rotated back.

`StoredFeatures` is the other way round: the features that a database already holds are matched
(`superglue-match --colmap DATABASE`). Nothing is extracted again and no photograph is read.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sqlite3
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

import numpy as np

from superglue_sift.errors import RequestError, import_extra
from superglue_sift.features.extractors import kind_of
from superglue_sift.features.features import Features
from superglue_sift.features.images import inverse, to_upright, turn_size
from superglue_sift.features.sift import positions, root_sift_of
from superglue_sift.features.store import FeatureStore, Item
from superglue_sift.files import FileName, name_below
from superglue_sift.geometry import tracks, two_view, verification
from superglue_sift.match_result import MatchResult
from superglue_sift.progress import Progress

CENTRE = 0.5  # centre of the first pixel in COLMAP's coordinates
FOCAL = 1.2  # COLMAP's guess without EXIF is so many times the longer side
MIN_INLIERS = 15  # minimum for a verified pair, as in COLMAP's own matcher
CAMERAS = {None: "AUTO", "folder": "PER_FOLDER", "image": "PER_IMAGE"}  # COLMAP's words
ONLY_FATAL = 3  # level of COLMAP's log

MAX_FEATURES = 256  # images of a database whose features stay in memory
SIFT = (0, -1)  # types of descriptors: COLMAP's SIFT, or not stated by older versions
EXTRACT = "run colmap feature_extractor first"


class ColmapDatabase:
    """A COLMAP database that is filled pair by pair. It is a context manager."""

    def __init__(
        self, path: FileName, images: Optional[FileName] = None, camera_per: Optional[str] = None
    ) -> None:
        """path: a new file. images: folder of the photographs, for their EXIF data.

        camera_per: "folder" or "image". If None, photographs whose EXIF data name the same camera
        have one camera, the others one each, as in COLMAP's importer. Raises RequestError: pycolmap
        is not installed, or the file exists.
        """
        self._pycolmap = import_extra("pycolmap", "colmap")
        if Path(path).exists():
            raise RequestError(f"{path}: exists already; delete it or name another database")
        self._path = str(path)
        self._images = Path(images) if images else None
        self._mode = self._pycolmap.CameraMode.__members__[CAMERAS[camera_per]]
        self._database = self._pycolmap.Database.open(self._path)
        self._asked: Set[str] = set()  # photographs that COLMAP was asked to read
        self._known: Dict[str, Tuple[int, Any]] = {}  # image id and camera, by name

    def __enter__(self) -> ColmapDatabase:
        return self

    def __exit__(self, *_error: Any) -> None:
        self._database.close()

    def add_photographs(self, names: Sequence[str]) -> None:
        """Write photographs with their cameras and positions by GPS.

        All photographs of one camera must be in one call. Photographs that COLMAP cannot read are
        named on stderr.
        """
        self._asked.update(names)
        if self._images is None:
            return
        level = self._pycolmap.logging.minloglevel
        self._pycolmap.logging.minloglevel = ONLY_FATAL
        self._database.close()  # which the importer opens
        try:
            self._pycolmap.import_images(
                self._path, str(self._images), camera_mode=self._mode, image_names=list(names)
            )
        finally:
            self._database = self._pycolmap.Database.open(self._path)
            self._pycolmap.logging.minloglevel = level
        unread = [name for name in names if not self._database.exists_image(name)]
        if unread:
            more = f" and {len(unread) - 1} more" if unread[1:] else ""
            guess = f"the focal length in the database is a guess, {FOCAL} times the longer side"
            fix = "save as JPEG or PNG to use its EXIF"
            print(
                f"{unread[0]}{more}: COLMAP cannot read the file; {guess}; {fix}", file=sys.stderr
            )

    def add(
        self, name0: str, name1: str, features0: Features, features1: Features, result: MatchResult
    ) -> int:
        """Write the matches and the two-view geometry of two images; return the number of its
        inliers.

        names: paths of the files below the folder of the photographs, with "/". New images are
            added. If a pair was rejected (`MatchResult.accepted`), only its images are written. A
            pair that is already in the database is not written again.
        """
        image0 = self._image(name0, features0)
        image1 = self._image(name1, features1)
        if not result.accepted or self._database.exists_matches(image0[0], image1[0]):
            return 0
        matches = result.matches.astype(np.uint32)
        return write_pair(self._pycolmap, self._database, (image0, image1), matches)

    def _image(self, name: str, features: Features) -> Tuple[int, Any, np.ndarray]:
        """Return id, camera and positions (n, 2) float64 of an image. The first call writes its
        keypoints.
        """
        points = _points(features)
        # With its first pair, an image gets its keypoints, and a camera if it has none.
        if name not in self._known:
            if name not in self._asked and (self._images or Path()).joinpath(name).is_file():
                self.add_photographs([name])
            if not self._database.exists_image(name):
                self._write_image(name, turn_size(features.size, features.turned))
            image = self._database.read_image_with_name(name)
            self._write_keypoints(image.image_id, points, features)
            self._known[name] = image.image_id, self._database.read_camera(image.camera_id)
        return (*self._known[name], points.astype(np.float64))

    def _write_image(self, name: str, size: Tuple[int, int]) -> None:
        """Write an image without its file, with a guessed camera on a rig of its own."""
        create = self._pycolmap.Camera.create_from_model_name
        camera = create(0, "SIMPLE_RADIAL", FOCAL * max(size), *size)
        camera.camera_id = self._database.write_camera(camera)
        rig = self._pycolmap.Rig(rig_id=camera.camera_id)
        rig.add_ref_sensor(camera.sensor_id)
        self._database.write_rig(rig, use_rig_id=True)
        image = self._pycolmap.Image(name=name, camera_id=camera.camera_id)
        image.image_id = self._database.write_image(image)
        frame = self._pycolmap.Frame()
        frame.rig_id = camera.camera_id
        frame.add_data_id(image.data_id)
        self._database.write_frame(frame)

    def _write_keypoints(self, number: int, points: np.ndarray, features: Features) -> None:
        """Write positions (n, 2) of an image, and its descriptors if they are SIFT."""
        self._database.write_keypoints(number, points)
        if kind_of(features.records.dtype)[0] == "sift":
            # COLMAP keeps its own SIFT as RootSIFT in bytes.
            roots = root_sift_of(features.records["descriptor"])
            rows = np.minimum(np.rint(512.0 * roots), 255).astype(np.uint8)
            sift = self._pycolmap.FeatureExtractorType.__members__["SIFT"]
            described = self._pycolmap.FeatureDescriptors(sift, rows)
            self._database.write_descriptors(number, described)


def write_pair(
    pycolmap: Any, database: Any, images: Sequence[Tuple[int, Any, np.ndarray]], matches: np.ndarray
) -> int:
    """Write matches (K, 2) uint32 of two images, and their geometry if COLMAP verifies it.

    images: id, camera, and positions (n, 2) float64 of each. Returns the number of inliers.
    """
    (id0, camera0, points0), (id1, camera1, points1) = images
    geometry = pycolmap.estimate_two_view_geometry(camera0, points0, camera1, points1, matches)
    inliers = len(geometry.inlier_matches)
    # COLMAP's mapper would also use what its own test calls a watermark.
    watermark = pycolmap.TwoViewGeometryConfiguration.WATERMARK
    # Write both or none, since a pair with matches counts as done when a killed run is resumed.
    with pycolmap.DatabaseTransaction(database):
        database.write_matches(id0, id1, matches)
        if inliers >= MIN_INLIERS and geometry.config != watermark:
            database.write_two_view_geometry(id0, id1, geometry)
    return inliers


@contextlib.contextmanager
def database_of(
    path: Path,
    root: Path,
    photos: Sequence[Item],
    store: FeatureStore,
    refine: bool,
    camera_per: Optional[str] = None,
) -> Iterator[Callable[..., None]]:
    """A function that adds pairs of `photos` below `root` to a database, which is there at the end.

    refine: refine keypoints by the pixels of all their pairs (`tracks.refine_tracks`), and drop
    matches of scenes that then do not fit (`verification.agree_with_one_geometry`). Without this,
    four cameras of unknown focal length move by decimetres. camera_per: see `ColmapDatabase`.
    Raises RequestError for a file name that COLMAP cannot store.
    """
    for photo in photos:
        try:
            str(photo.image).encode()
        except UnicodeEncodeError:
            shown = ascii(str(photo.image))
            raise RequestError(f"{shown}: COLMAP needs names in UTF-8; rename the file") from None
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    keypoints: Dict[Any, np.ndarray] = {}
    pairs: List[Tuple[Any, Any, MatchResult]] = []
    name = {photo: name_below(str(photo.image), root) for photo in photos}

    def add(photo0: Any, photo1: Any, result: MatchResult) -> None:
        # Keep the keypoints of a photograph once, not for each of its pairs.
        shared0 = keypoints.setdefault(photo0, result.keypoints0)
        shared1 = keypoints.setdefault(photo1, result.keypoints1)
        pairs.append((photo0, photo1, replace(result, keypoints0=shared0, keypoints1=shared1)))

    with ColmapDatabase(partial, root, camera_per) as database:
        # Name the photographs that COLMAP cannot read before hours of work.
        database.add_photographs(list(name.values()))
        yield add
        moved = refine_keypoints(keypoints, pairs, store) if refine else keypoints
        # Write the pairs, with the keypoints where all pairs agree on them.
        for photo0, photo1, result in pairs:
            if refine and result.pair_score is not None:
                points0 = moved[photo0][result.matches[:, 0]]
                points1 = moved[photo1][result.matches[:, 1]]
                sizes = (result.size0, result.size1)
                fits = verification.agree_with_one_geometry(points0, points1, sizes)
                result = result.only(fits)
            features0, features1 = (store(photo).move(moved[photo]) for photo in (photo0, photo1))
            database.add(name[photo0], name[photo1], features0, features1, result)
    os.replace(partial, path)


def refine_keypoints(
    keypoints: Mapping[Any, np.ndarray],
    pairs: Sequence[Tuple[Any, Any, MatchResult]],
    store: FeatureStore,
) -> Dict[Any, np.ndarray]:
    """Refine the keypoints (N, 2) px of each photograph by the pixels of all its accepted pairs."""
    number = {photo: at for at, photo in enumerate(keypoints)}
    accepted = [pair for pair in pairs if len(pair[2].matches)]

    def refined() -> Iterator[Tuple[int, int, MatchResult]]:
        waiting = (
            (result, store.with_pixels(photo0), store.with_pixels(photo1))
            for photo0, photo1, result in accepted
        )
        done = store.matcher.refine_batch(waiting)
        shown = Progress(done, total=len(accepted), desc="refining", unit="pairs")
        for result, (photo0, photo1, _) in zip(shown, accepted):
            yield number[photo0], number[photo1], result

    return dict(zip(number, tracks.refine_tracks(list(keypoints.values()), refined())))


def _points(features: Features) -> np.ndarray:
    """Return the positions (n, 2) float32 in COLMAP's coordinates."""
    to_stored = to_upright(inverse(features.turned), features.size)
    points = two_view.transform(positions(features.records).astype(np.float64), to_stored)
    return points.astype(np.float32) + np.float32(CENTRE)


class StoredFeatures:
    """The features of an existing database, and the pairs that have matches. A context manager.

    Only pairs without matches are added, so that the same command goes on where it was stopped. It
    reads by sqlite3, which leaves databases of older versions as they are, and writes by pycolmap.
    photos: an Item for each image with features; its `image` is the path that the database states.
    """

    def __init__(self, path: Path, max_keypoints: int) -> None:
        """Open a database for reading. max_keypoints: maximum number per image, of the largest
        scales.

        Raises RequestError if it is no COLMAP database with SIFT features, or another program
        writes it.
        """
        self.path = path
        self.max_keypoints = max_keypoints
        self._pycolmap = import_extra("pycolmap", "colmap")
        self._writer: Any = None
        if not path.is_file():
            raise RequestError(f"{path}: no such database; {EXTRACT}")
        # names, sizes, and which images and pairs have features and matches
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
        """Return the features of an image, the largest first. Raises RequestError unless they are
        SIFT.
        """
        return self._read(photo.name)[0]

    def has_matches(self, photo0: Item, photo1: Item) -> bool:
        """Say whether the database has matches of this pair, or their geometry."""
        return self._pair_id(photo0, photo1) in self._matched

    def start_writing(self) -> None:
        """Open the database to `add`. Raises RequestError if another program writes it."""
        with self._explain(), contextlib.closing(sqlite3.connect(self.path, timeout=1)) as held:
            held.execute("BEGIN IMMEDIATE")
            held.rollback()
        self._writer = self._pycolmap.Database.open(str(self.path))

    def add(self, photo0: Item, photo1: Item, result: MatchResult) -> None:
        """Write the matches of a pair, none if it was rejected, and their geometry if verified."""
        images: List[Tuple[int, Any, np.ndarray]] = []
        matches = result.matches.astype(np.uint32)
        for view, photo in enumerate((photo0, photo1)):
            row = self._images[photo.name]
            _, order, points = self._read(photo.name)
            matches[:, view] = order[matches[:, view]]
            camera = self._writer.read_camera(row["camera_id"])
            images.append((row["image_id"], camera, points))
        write_pair(self._pycolmap, self._writer, images, matches)
        self._matched.add(self._pair_id(photo0, photo1))

    def _pair_id(self, photo0: Item, photo1: Item) -> int:
        numbers = (self._images[photo.name]["image_id"] for photo in (photo0, photo1))
        return self._pycolmap.image_pair_to_pair_id(*numbers)

    def _read_image(self, name: str) -> Tuple[Features, np.ndarray, np.ndarray]:
        """Read the features of an image.

        Returns the features; their rows in the database; and the positions (n, 2) float64 of all
        rows, in COLMAP's coordinates.
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
        # the largest keypoints, whose rows in the database `order` keeps
        size = (image["width"], image["height"])
        features = Features.of_colmap(keypoints, descriptors, size)
        order = np.argsort(-features.records["scale"], kind="stable")[: self.max_keypoints]
        points = keypoints[:, :2].astype(np.float64)
        return features.select(order), order, points

    @contextlib.contextmanager
    def _explain(self) -> Iterator[None]:
        """Turn errors of the database into a RequestError with the fix."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            reason = str(error)
            if "locked" in reason:
                reason = "another program writes it; wait until that ends"
            elif "no such" in reason or "not a database" in reason:
                reason = "is not a database of COLMAP"
            raise RequestError(f"{self.path}: {reason}") from None
