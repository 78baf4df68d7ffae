"""Matches as a COLMAP database, the input of its mapper (pip install 'superglue-sift[colmap]').

    with ColmapDatabase("database.db", "photos") as database:
        database.add("a.jpg", "b.jpg", features_a, features_b, result)

    pycolmap.incremental_mapping("database.db", "photos", "model")

COLMAP's coordinates start at the corner of the first pixel, so 0.5 is added. It ignores the EXIF
orientation, so keypoints of photographs that were rotated upright are rotated back.
"""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from superglue_sift.errors import RequestError, import_extra
from superglue_sift.features.extractors import kind_of
from superglue_sift.features.features import Features
from superglue_sift.features.images import inverse, to_upright, turn_size
from superglue_sift.features.sift import positions, root_sift_of
from superglue_sift.features.store import FeatureStore, Item
from superglue_sift.files import FileName
from superglue_sift.geometry import tracks, two_view, verification
from superglue_sift.match_result import MatchResult
from superglue_sift.progress import Progress

CENTRE = 0.5  # of the first pixel, in COLMAP's coordinates
FOCAL = 1.2  # times the longer side: COLMAP's guess without EXIF
MIN_INLIERS = 15  # of a verified pair, as in COLMAP's own matcher


class ColmapDatabase:
    """A COLMAP database that is filled pair by pair; a context manager."""

    def __init__(self, path: FileName, images: Optional[FileName] = None) -> None:
        """path: a new file. images: folder of the photographs, whose EXIF has the focal length.

        Each photograph gets a camera of its own, COLMAP's SIMPLE_RADIAL. Raises RequestError:
        pycolmap is not installed, or the file exists.
        """
        pycolmap = import_extra("pycolmap", "colmap")
        if Path(path).exists():
            raise RequestError(f"{path}: exists already; delete it or name another database")
        self._pycolmap = pycolmap
        self._images = Path(images) if images else None
        self._database = pycolmap.Database.open(str(path))
        self._known: Dict[str, Tuple[int, Any]] = {}  # image id and camera
        self._inferred: Dict[str, Any] = {}  # cameras by EXIF; None: a guess

    def __enter__(self) -> ColmapDatabase:
        return self

    def __exit__(self, *_error: Any) -> None:
        self._database.close()

    def infer_cameras(self, names: Iterable[str]) -> None:
        """Read the focal lengths of photographs; name those on stderr that COLMAP cannot read."""
        unread = []
        images = self._images
        if images is None:
            return
        for name in names:
            path = images / name
            self._inferred[name] = None
            try:
                if path.is_file():
                    self._inferred[name] = self._pycolmap.infer_camera_from_image(str(path))
            except (ValueError, RuntimeError):  # a format that COLMAP does not read
                unread.append(name)
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
        """Write the matches and the two-view geometry of two images; returns the number of its
        inliers.

        names: of files below the folder of the photographs. New images are added. Of a rejected
        pair (`MatchResult.accepted`) nothing else is written, and of one already there nothing.
        """
        side0 = self._image(name0, features0)
        side1 = self._image(name1, features1)
        if not result.accepted or self._database.exists_matches(side0[0], side1[0]):
            return 0
        matches = result.matches.astype(np.uint32)
        return write_pair(self._pycolmap, self._database, (side0, side1), matches)

    def _image(self, name: str, features: Features) -> Tuple[int, Any, np.ndarray]:
        """Id, camera and positions of an image; writes new images with their keypoints."""
        points = _points(features)
        if name not in self._known:
            if name not in self._inferred:
                self.infer_cameras([name])
            camera = self._inferred.get(name)
            if camera is None:
                size = turn_size(features.size, features.turned)
                create = self._pycolmap.Camera.create_from_model_name
                camera = create(0, "SIMPLE_RADIAL", FOCAL * max(size), *size)
            self._write_camera(camera)
            image = self._pycolmap.Image(name=name, camera_id=camera.camera_id)
            image.image_id = self._database.write_image(image)
            frame = self._pycolmap.Frame()
            frame.rig_id = camera.camera_id
            frame.add_data_id(image.data_id)
            self._database.write_frame(frame)
            self._database.write_keypoints(image.image_id, points)
            if kind_of(features.records.dtype)[0] == "sift":
                # RootSIFT in bytes, as COLMAP keeps its own SIFT
                roots = root_sift_of(features.records["descriptor"])
                rows = np.minimum(np.rint(512.0 * roots), 255).astype(np.uint8)
                sift = self._pycolmap.FeatureExtractorType.__members__["SIFT"]
                self._database.write_descriptors(
                    image.image_id, self._pycolmap.FeatureDescriptors(sift, rows)
                )
            self._known[name] = image.image_id, camera
        return (*self._known[name], points.astype(np.float64))

    def _write_camera(self, camera: Any) -> None:
        """Write a camera on a rig of its own, with the same id."""
        camera.camera_id = self._database.write_camera(camera)
        rig = self._pycolmap.Rig(rig_id=camera.camera_id)
        rig.add_ref_sensor(camera.sensor_id)
        self._database.write_rig(rig, use_rig_id=True)


def write_pair(
    pycolmap: Any, database: Any, sides: Sequence[Tuple[int, Any, np.ndarray]], matches: np.ndarray
) -> int:
    """Write matches (K, 2) uint32 of two images, and their geometry if COLMAP verifies it.

    sides: id, camera, and positions (n, 2) float64 of each. Returns the number of inliers.
    """
    (id0, camera0, points0), (id1, camera1, points1) = sides
    geometry = pycolmap.estimate_two_view_geometry(camera0, points0, camera1, points1, matches)
    inliers = len(geometry.inlier_matches)
    # its mapper would also use what its own test calls a watermark
    watermark = pycolmap.TwoViewGeometryConfiguration.WATERMARK
    # both or none: a pair with matches counts as done when a killed run is resumed
    with pycolmap.DatabaseTransaction(database):
        database.write_matches(id0, id1, matches)
        if inliers >= MIN_INLIERS and geometry.config != watermark:
            database.write_two_view_geometry(id0, id1, geometry)
    return inliers


@contextlib.contextmanager
def database_of(
    path: Path, root: Path, photos: Sequence[Item], store: FeatureStore, refine: bool
) -> Iterator[Callable[..., None]]:
    """A function that adds pairs of `photos` below `root` to a database, created at the end.

    refine: align keypoints by the pixels of all their pairs (`tracks.refine_tracks`), and drop
    matches of scenes that then do not fit (`verification.agree_with_one_geometry`). Without this,
    four cameras of unknown focal length move by decimetres.
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
    name = {photo: os.path.relpath(str(photo.image), root) for photo in photos}

    def add(photo0: Any, photo1: Any, result: MatchResult) -> None:
        # keep the keypoints of a photograph once, not for each of its pairs
        shared0 = keypoints.setdefault(photo0, result.keypoints0)
        shared1 = keypoints.setdefault(photo1, result.keypoints1)
        pairs.append((photo0, photo1, replace(result, keypoints0=shared0, keypoints1=shared1)))

    with ColmapDatabase(partial, root) as database:
        database.infer_cameras(name.values())  # before hours of work, names what it cannot read
        yield add
        moved = exact_keypoints(keypoints, pairs, store) if refine else keypoints
        for photo0, photo1, result in pairs:
            if refine and result.pair_score is not None:
                points0 = moved[photo0][result.matches[:, 0]]
                points1 = moved[photo1][result.matches[:, 1]]
                sizes = (result.size0, result.size1)
                fits = verification.agree_with_one_geometry(points0, points1, sizes)
                result = result.only(fits)
            side0, side1 = (store(photo).move(moved[photo]) for photo in (photo0, photo1))
            database.add(name[photo0], name[photo1], side0, side1, result)
    os.replace(partial, path)


def exact_keypoints(
    keypoints: Mapping[Any, np.ndarray],
    pairs: Sequence[Tuple[Any, Any, MatchResult]],
    store: FeatureStore,
) -> Dict[Any, np.ndarray]:
    """Keypoints (N, 2) of each photograph, aligned by the pixels of all its accepted pairs."""
    number = {photo: at for at, photo in enumerate(keypoints)}
    accepted = [pair for pair in pairs if len(pair[2].matches)]

    def align() -> Iterator[Tuple[int, int, MatchResult]]:
        waiting = (
            (result, store.with_pixels(photo0), store.with_pixels(photo1))
            for photo0, photo1, result in accepted
        )
        done = store.matcher.refine_batch(waiting)
        shown = Progress(done, total=len(accepted), desc="aligning", unit="pairs")
        for result, (photo0, photo1, _) in zip(shown, accepted):
            yield number[photo0], number[photo1], result

    return dict(zip(number, tracks.refine_tracks(list(keypoints.values()), align())))


def _points(features: Features) -> np.ndarray:
    """(n, 2) float32 positions in COLMAP's coordinates."""
    to_stored = to_upright(inverse(features.turned), features.size)
    points = two_view.transform(positions(features.records).astype(np.float64), to_stored)
    return points.astype(np.float32) + np.float32(CENTRE)
