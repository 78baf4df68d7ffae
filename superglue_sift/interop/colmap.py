"""Write matches to a COLMAP database, which its mapper reads.

This needs `pip install 'superglue-sift[colmap]'`.

`create_database` fills a new database. COLMAP's own importer writes the photographs with their
cameras and their positions by GPS. COLMAP's coordinates start at the corner of the first pixel, so
0.5 is added. COLMAP ignores the EXIF orientation, so keypoints of photographs that were rotated
upright are rotated back.

`DatabaseFeatures` reads the features that a database already holds, and writes matches of them
(`superglue-match database DATABASE`). Nothing is extracted again, and no photograph is read.
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from superglue_sift.apps.store import FeatureStore, PhotoFile
from superglue_sift.errors import RequestError, import_extra
from superglue_sift.features.descriptors import to_root_sift
from superglue_sift.features.features import Features
from superglue_sift.features.images import invert_orientation, map_to_upright
from superglue_sift.files import name_below, replace_file, resolve_link
from superglue_sift.geometry import two_view
from superglue_sift.geometry.tracks import refine_tracks
from superglue_sift.geometry.verification import find_refined_inliers
from superglue_sift.match_result import MatchResult
from superglue_sift.progress import Progress
from superglue_sift.scene import RESIZE

CENTER = 0.5  # center of the first pixel in COLMAP's coordinates
MIN_INLIERS = 15  # minimum for a verified pair, as in COLMAP's own matcher
CAMERAS = {None: "AUTO", "folder": "PER_FOLDER", "image": "PER_IMAGE"}  # COLMAP's words
ONLY_ERRORS = 2  # level of COLMAP's log

MAX_CACHED_IMAGES = 256  # images of a database whose features stay in memory
SIFT_TYPES = (0, -1)  # types of descriptors: COLMAP's SIFT, or not stated by older versions
EXTRACT_FIRST = "match a database that colmap feature_extractor has filled"

# An image of a database: its number, its camera, and its keypoints (n, 2) float64 in COLMAP's
# coordinates
ImageEntry = Tuple[int, Any, np.ndarray]

# --- a new database


@contextlib.contextmanager
def create_database(
    path: Path,
    root: Path,
    photos: Sequence[PhotoFile],
    store: FeatureStore,
    refine: bool,
    camera_per: Optional[str] = None,
) -> Iterator[Callable[..., None]]:
    """Yield a function that adds a pair of `photos`. The database is written at the end.

    Args:
        path: the new database.
        root: folder of the photographs, below which they are named.
        photos: the photographs.
        store: their features, and the matcher.
        refine: refine keypoints by the pixels of all their pairs (`tracks.refine_tracks`), and drop
            matches of scenes that then do not fit (`find_refined_inliers`). Without it, cameras of
            unknown focal length were off by decimeters.
        camera_per: "folder" or "image": what has one camera. If None, photographs whose EXIF data
            name the same camera share one, and each of the others has its own, as in COLMAP's
            importer.

    Raises:
        RequestError: If COLMAP cannot read a photograph.
    """
    path = resolve_link(path)
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    names = {photo: name_below(photo.path, root) for photo in photos}
    keypoints: Dict[PhotoFile, np.ndarray] = {}
    pairs: List[Tuple[PhotoFile, PhotoFile, MatchResult]] = []

    def add_pair(photo0: PhotoFile, photo1: PhotoFile, result: MatchResult) -> None:
        # The keypoints of a photograph are kept once, not for each of its pairs.
        result = replace(
            result,
            keypoints0=keypoints.setdefault(photo0, result.keypoints0),
            keypoints1=keypoints.setdefault(photo1, result.keypoints1),
        )
        if len(result.matches):
            pairs.append((photo0, photo1, result))

    # An error about photographs that COLMAP cannot read comes before hours of work.
    _import_photographs(partial, root, list(names.values()), CAMERAS[camera_per])
    yield add_pair
    refined = refine_keypoints(keypoints, pairs, store) if refine else keypoints
    with _import_pycolmap().Database.open(str(partial)) as database:
        entries = {
            photo: _write_features(
                database, names[photo], store(photo)._replace(keypoints=positions)
            )
            for photo, positions in refined.items()
        }
        for photo0, photo1, result in pairs:
            entry0, entry1 = entries[photo0], entries[photo1]
            # A list may name a pair in both orders.
            if database.exists_matches(entry0[0], entry1[0]):
                continue
            if refine and result.pair_score is not None:
                # Keep the matches on whose refined positions all pairs agree.
                points0 = refined[photo0][result.matches[:, 0]]
                points1 = refined[photo1][result.matches[:, 1]]
                factors = _compute_limit_factor(result.size0), _compute_limit_factor(result.size1)
                result = result.select(find_refined_inliers(points0, points1, factors))
            if len(result.matches):
                _write_pair(database, entry0, entry1, result.matches)
    replace_file(partial, path)


def _import_pycolmap() -> Any:
    """Import pycolmap. Raises RequestError if it is not installed."""
    return import_extra("pycolmap", "colmap")


def _import_photographs(database: Path, root: Path, names: List[str], mode: str) -> None:
    """Write photographs with their cameras and positions by GPS, by COLMAP's importer.

    Args:
        database: the file, which is created.
        root: folder of the photographs.
        names: paths of the photographs below `root`.
        mode: how cameras are shared, in COLMAP's words.

    Raises:
        RequestError: If COLMAP cannot read a photograph.
    """
    pycolmap = _import_pycolmap()
    level = pycolmap.logging.minloglevel
    pycolmap.logging.minloglevel = ONLY_ERRORS
    pycolmap.Database.open(str(database)).close()  # The importer needs an existing file.
    camera_mode = pycolmap.CameraMode.__members__[mode]
    pycolmap.import_images(str(database), str(root), camera_mode=camera_mode, image_names=names)
    pycolmap.logging.minloglevel = level
    with pycolmap.Database.open(str(database)) as content:
        unread = [name for name in names if not content.exists_image(name)]
    if unread:
        count = f" and {len(unread) - 1} more" if unread[1:] else ""
        reason = "COLMAP's importer refuses it and gives the reason above"
        fix = "save images as JPEG or PNG, and those of one camera in one size"
        raise RequestError(f"{unread[0]}{count}: {reason}; {fix}")


def _write_features(database: Any, name: str, features: Features) -> ImageEntry:
    """Write the keypoints of an image, and its descriptors if they are SIFT; return its entry."""
    image = database.read_image_with_name(name)
    to_stored = map_to_upright(invert_orientation(features.turned), features.image_size)
    points = two_view.transform(features.keypoints.astype(np.float64), to_stored)
    # The center of the first pixel is (0, 0) here, and (0.5, 0.5) in COLMAP.
    points = points.astype(np.float32) + np.float32(CENTER)
    database.write_keypoints(image.image_id, points)
    if features.is_sift:
        # COLMAP keeps its own SIFT as RootSIFT in bytes.
        roots = to_root_sift(features.descriptors[:, 0])
        rows = np.minimum(np.rint(512.0 * roots), 255).astype(np.uint8)
        sift = _import_pycolmap().FeatureExtractorType.SIFT
        descriptors = _import_pycolmap().FeatureDescriptors(sift, rows)
        database.write_descriptors(image.image_id, descriptors)
    return image.image_id, database.read_camera(image.camera_id), points.astype(np.float64)


def _write_pair(database: Any, entry0: ImageEntry, entry1: ImageEntry, matches: np.ndarray) -> None:
    """Write matches (K, 2) of two images, and their geometry if COLMAP verifies it."""
    pycolmap = _import_pycolmap()
    id0, camera0, points0 = entry0
    id1, camera1, points1 = entry1
    matches = matches.astype(np.uint32)
    geometry = pycolmap.estimate_two_view_geometry(camera0, points0, camera1, points1, matches)
    # COLMAP's mapper would also use a geometry that COLMAP itself takes for a watermark.
    watermark = pycolmap.TwoViewGeometryConfiguration.WATERMARK
    # Both are written or none, since a resumed command skips pairs with matches.
    with pycolmap.DatabaseTransaction(database):
        database.write_matches(id0, id1, matches)
        if len(geometry.inlier_matches) >= MIN_INLIERS and geometry.config != watermark:
            database.write_two_view_geometry(id0, id1, geometry)


def refine_keypoints(
    keypoints: Mapping[PhotoFile, np.ndarray],
    pairs: Sequence[Tuple[PhotoFile, PhotoFile, MatchResult]],
    store: FeatureStore,
) -> Dict[PhotoFile, np.ndarray]:
    """Refine the keypoints of each photograph by the pixels of all its pairs.

    Args:
        keypoints: keypoints (N, 2) px of each photograph.
        pairs: both photographs and the matches of each pair.
        store: the features, and the matcher.

    Returns:
        The refined keypoints (N, 2) px of each photograph.
    """
    # `refine_tracks` numbers the photographs.
    numbers = {photo: number for number, photo in enumerate(keypoints)}
    matched_pairs = (
        (result, store.read_with_pixels(photo0), store.read_with_pixels(photo1))
        for photo0, photo1, result in pairs
    )
    factors = [_compute_limit_factor(store(photo).image_size) for photo in numbers]
    # After Ctrl-C, the closed generator starts no further pair.
    with contextlib.closing(store.matcher.refine_batch(matched_pairs)) as results:
        shown = Progress(results, total=len(pairs), desc="refining", unit="pairs")
        refined_pairs = (
            (numbers[photo0], numbers[photo1], result.matches, result.refined1, result.deviations)
            for result, (photo0, photo1, _) in zip(shown, pairs)
            if result.deviations is not None
        )
        refined = refine_tracks(list(keypoints.values()), refined_pairs, factors)
    return dict(zip(numbers, refined))


def _compute_limit_factor(size: two_view.Size) -> float:
    """Return px of a file of this size per px of the image for which limits were chosen."""
    return two_view.compute_reduction_factor(size, RESIZE)


# --- a database that exists


class DatabaseFeatures:
    """The features and matches of an existing database.

    It is a context manager that closes the database.

    Attributes:
        path: the database.
        max_keypoints: maximum number of keypoints per image.
        photos: the images with features. Their paths are those that the database states.
        left_out: the reason for each other image, by its name.
    """

    def __init__(self, path: Path, max_keypoints: int) -> None:
        """Open a database.

        Args:
            path: the database.
            max_keypoints: maximum number of keypoints per image, those of the largest scales.

        Raises:
            RequestError: If the file is no COLMAP database, if no image has features that can be
                matched, or if another program writes it.
        """
        self.path = path
        self.max_keypoints = max_keypoints
        pycolmap = _import_pycolmap()
        if not path.is_file():
            raise RequestError(f"{path}: no such database; {EXTRACT_FIRST}")
        # pycolmap does not report that another program holds the lock for writing.
        try:
            with contextlib.closing(sqlite3.connect(path, timeout=1)) as connection:
                connection.execute("BEGIN IMMEDIATE")
            self._database = pycolmap.Database.open(str(path))
        except (sqlite3.DatabaseError, RuntimeError) as error:
            reason = "is not a database of COLMAP"
            if "locked" in str(error):
                reason = "another program writes it; wait until that ends"
            raise RequestError(f"{path}: {reason}") from None
        images = sorted(self._database.read_all_images(), key=lambda image: image.name)
        self._images: Dict[str, Any] = {image.name: image for image in images}
        self._read = functools.lru_cache(MAX_CACHED_IMAGES)(self._read_image)
        self.photos: List[PhotoFile] = []
        self.left_out: Dict[str, str] = {}
        # Features that cannot be matched are found before hours of work.
        for name in self._images:
            photo = PhotoFile(name, Path(name))
            try:
                self._read(photo)
                self.photos.append(photo)
            except RequestError as error:
                self.left_out[name] = str(error)
        if not self.photos:
            reasons = [f"{name}: {reason}" for name, reason in self.left_out.items()]
            raise RequestError(
                f"{path}: no image has SIFT features: {[*reasons, EXTRACT_FIRST][0]}"
            )

    def __enter__(self) -> DatabaseFeatures:
        return self

    def __exit__(self, *_error: Any) -> None:
        self._database.close()

    def __call__(self, photo: PhotoFile) -> Features:
        """Return the features of an image, the largest first."""
        return self._read(photo)[0]

    def has_matches(self, photo0: PhotoFile, photo1: PhotoFile) -> bool:
        """Return whether the database has matches of this pair, or their geometry."""
        ids = [self._images[photo.name].image_id for photo in (photo0, photo1)]
        return self._database.exists_matches(*ids) or self._database.exists_two_view_geometry(*ids)

    def write_matches(self, photo0: PhotoFile, photo1: PhotoFile, result: MatchResult) -> None:
        """Write the matches of a pair, and their geometry if COLMAP verifies it.

        A rejected pair has no matches, and counts as matched afterwards.
        """
        _, order0, entry0 = self._read(photo0)
        _, order1, entry1 = self._read(photo1)
        matches = result.scored_matches.renumber(order0, order1).indices
        _write_pair(self._database, entry0, entry1, matches)

    def _read_image(self, photo: PhotoFile) -> Tuple[Features, np.ndarray, ImageEntry]:
        """Read the features of an image.

        Returns:
            The features, their rows in the database, and the entry with all rows.

        Raises:
            RequestError: If the features cannot be matched.
        """
        image = self._images[photo.name]
        if not self._database.exists_descriptors(image.image_id):
            raise RequestError(f"no features; {EXTRACT_FIRST}")
        camera = self._database.read_camera(image.camera_id)
        keypoints = self._database.read_keypoints(image.image_id)
        descriptors = self._database.read_descriptors(image.image_id)
        if int(descriptors.type) not in SIFT_TYPES:
            raise RequestError(f"descriptors of {descriptors.type.name}, not of SIFT")
        if keypoints.shape[1] == 2:
            # `create_database` writes such keypoints.
            raise RequestError(f"keypoints without scale and orientation; {EXTRACT_FIRST}")
        features = Features.of_colmap(keypoints, descriptors.data, (camera.width, camera.height))
        # The rows of the largest keypoints in the database
        order = np.argsort(-features.scales, kind="stable")[: self.max_keypoints]
        entry = image.image_id, camera, keypoints[:, :2].astype(np.float64)
        return features.select(order), order, entry
