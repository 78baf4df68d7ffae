"""Compute the features of many photographs once, and keep them on disk.

The name of a file is a digest of the content of the photograph and its mask, and of the settings.
So a photograph that was replaced under its name gets features of its own.
"""

from __future__ import annotations

import functools
import hashlib
import io
from pathlib import Path
from typing import Any, Dict, NamedTuple, Optional, Tuple

import cv2
import numpy as np

from superglue_sift import __version__
from superglue_sift.errors import RequestError
from superglue_sift.features.extraction import REFINED_AT
from superglue_sift.features.extractors import SIFT
from superglue_sift.features.features import KEYPOINT_FIELDS, Features
from superglue_sift.features.images import decode_gray, read_bytes, reduce_image
from superglue_sift.features.photo_folder import find_mask
from superglue_sift.files import FileName, name_below, write_atomically
from superglue_sift.matcher import Matcher

MAX_FEATURES = 256  # Number of photographs whose features stay in memory
MAX_GRAYS = 32  # Number of photographs whose pixels stay in memory
# Attributes of `Features` that a file holds
ARRAYS = (*KEYPOINT_FIELDS, "image_size", "turned", "sift_scale")


def read_npz(path: FileName) -> Optional[Dict[str, np.ndarray]]:
    """Read the arrays of a `.npz` by name. Return None if the file is missing or damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except Exception:  # The bits of a damaged file can also ask for a password, for instance
        return None


class PhotoFile(NamedTuple):
    """A photograph to match.

    Attributes:
        name: stem of its output files.
        path: its file.
    """

    name: str
    path: Path


class FeatureStore:
    """The features of photographs. All are kept on disk, and those used last also in memory."""

    def __init__(
        self, matcher: Matcher, folder: Path, masks: Optional[FileName] = None, root: Path = Path()
    ) -> None:
        """Create a store of features that `matcher` extracts.

        Args:
            matcher: extracts the features.
            folder: folder for the files, which is created with the first one.
            masks: folder of masks, named after the photographs below `root` (see
                `photo_folder.find_mask`). A photograph without a mask is used whole. If None, there
                are no masks.
            root: folder of the photographs.
        """
        self.matcher = matcher
        self.folder = folder
        self.masks = Path(masks) if masks else None
        self.root = root
        extractor = matcher.extractor or SIFT
        self.is_sift = extractor.name == SIFT.name
        self._settings = (
            f"{matcher.max_keypoints} {matcher.resize} {matcher.frame}"
            f" {__version__} {cv2.__version__}"
            f" {extractor.name}{extractor.code} {ARRAYS}"
        )
        self._digests: Dict[PhotoFile, str] = {}
        # Pixels of photographs whose features were extracted, until `_pixels` takes them
        self._extracted_pixels: Dict[PhotoFile, np.ndarray] = {}
        # Memory holds the last ones. `prepare` alone fills only the disk.
        self._features = functools.lru_cache(MAX_FEATURES)(self.prepare)
        self._pixels = functools.lru_cache(MAX_GRAYS)(self._read_pixels)

    def __call__(self, photo: PhotoFile) -> Features:
        """Return the features of a photograph.

        Raises:
            RequestError: If the photograph cannot be read, or was replaced since it was first read.
        """
        return self._features(photo)

    def read_with_pixels(self, photo: PhotoFile) -> Features:
        """Return the features of a photograph, with the gray pixels for refinement.

        Raises:
            RequestError: If the photograph cannot be read, or was replaced since it was first read.
        """
        return self(photo)._replace(gray=self._pixels(photo))

    def digest(self, photo: PhotoFile) -> str:
        """Return the digest of a photograph and its mask, 16 hexadecimal digits.

        It is that of the bytes that were read first.

        Raises:
            RequestError: If the photograph or its mask cannot be read.
        """
        if photo not in self._digests:
            self._read(photo)
        return self._digests[photo][:16]

    def prepare(self, photo: PhotoFile) -> Features:
        """Read the features of a photograph from disk, or compute and write them. Thread-safe."""
        content, mask = self._read(photo)
        # Other settings or another content give another file.
        key = hashlib.sha256(f"{self._settings} {self._digests[photo]}".encode()).hexdigest()
        path = self.folder / f"{key[:32]}.npz"
        features = self._load(path)
        if features is not None:
            return features
        features = self.matcher.extract_file(content, str(photo.path), mask)
        if features.gray is not None and len(self._extracted_pixels) < MAX_GRAYS:
            self._extracted_pixels[photo] = features.gray
        # A file has no pixels, since they would take most of its space.
        buffer = io.BytesIO()
        np.savez(buffer, **{name: getattr(features, name) for name in ARRAYS})
        write_atomically(path, buffer.getvalue())
        return features._replace(gray=None, image=None)

    def _read(self, photo: PhotoFile) -> Tuple[bytes, Optional[Path]]:
        """Read the bytes of a photograph; return them and the file of its mask.

        Raises:
            RequestError: If the photograph or the mask changed since they were first read. Their
                features and their results would be of two different photographs.
        """
        content = read_bytes(photo.path)
        digest = hashlib.sha256(content)
        mask = self.masks and find_mask(self.masks, name_below(photo.path, self.root))
        if mask:
            digest.update(b"mask" + read_bytes(mask))
        if self._digests.setdefault(photo, digest.hexdigest()) != digest.hexdigest():
            changed = "the photograph or its mask was replaced while it was matched"
            raise RequestError(f"{photo.path}: {changed}; match it again")
        return content, mask

    def _load(self, path: Path) -> Optional[Features]:
        """Read a file of features. Return None if it is missing, damaged or foreign."""
        arrays = read_npz(path)
        if arrays is None or not arrays.keys() >= set(ARRAYS):
            return None
        values: Dict[str, Any] = {name: arrays[name] for name in ARRAYS}
        values.update(
            image_size=tuple(arrays["image_size"].tolist()),
            turned=int(arrays["turned"]),
            sift_scale=float(arrays["sift_scale"]),
        )
        return Features(**values, frame=self.matcher.frame)

    def _read_pixels(self, photo: PhotoFile) -> np.ndarray:
        """Return the gray pixels (H, W) uint8 for refinement, reduced as in `extract_features`."""
        if photo in self._extracted_pixels:
            return self._extracted_pixels.pop(photo)
        content, _ = self._read(photo)
        gray = decode_gray(content, str(photo.path), self.matcher.frame)
        return reduce_image(gray, REFINED_AT * self.matcher.resize)
