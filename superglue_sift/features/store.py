"""Compute the features of many images once, and keep them on disk.

The name of a file is a digest of the content of the image and its mask, and of the settings.
"""

from __future__ import annotations

import functools
import hashlib
import io
from pathlib import Path
from typing import Dict, NamedTuple, Optional

import cv2
import numpy as np

from superglue_sift import __version__
from superglue_sift.features.extractors import DEFAULT
from superglue_sift.features.features import REFINED_AT, Features
from superglue_sift.features.images import find_mask, read, read_gray, reduce_image
from superglue_sift.files import FileName, name_below, write_atomic
from superglue_sift.matcher import Matcher

MAX_FEATURES = 256  # number of images whose features stay in memory
MAX_GRAYS = 32  # number of images whose pixels stay in memory


def read_npz(path: FileName) -> Optional[Dict[str, np.ndarray]]:
    """Read the arrays of a `.npz` by name. Return None if the file is missing or damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except Exception:  # the bits of a damaged file can also ask for a password, for instance
        return None


class Item(NamedTuple):
    """An image to match. name: stem of its output files. image: its file."""

    name: str
    image: Path


class FeatureStore:
    """The features of images. All are kept on disk, and those that were used last in memory."""

    def __init__(
        self, matcher: Matcher, folder: Path, masks: Optional[Path] = None, root: Path = Path()
    ) -> None:
        """Create a store of features that `matcher` extracts.

        folder: folder for the files, which is created with the first one.
        masks: folder of masks, named after the photographs below the folder `root`
            (`images.find_mask`). A photograph without a mask is used whole. If None, there are no
            masks.
        """
        self.matcher = matcher
        self.folder = folder
        self.masks = masks
        self.root = root
        extractor = matcher.extractor or DEFAULT
        self.is_sift = extractor.name == DEFAULT.name
        self._settings = (
            f"{matcher.max_keypoints} {matcher.resize} {matcher.frame}"
            f" {__version__} {cv2.__version__}"
            f" {extractor.name}{extractor.code} {extractor.dtype.descr}"
        )
        # Memory holds the last ones. `prepare` alone fills only the disk.
        self._features = functools.lru_cache(MAX_FEATURES)(self.prepare)
        self._pixels = functools.lru_cache(MAX_GRAYS)(self._read_pixels)

    def __call__(self, item: Item) -> Features:
        """Return the features of an image. Raises RequestError if it cannot be read."""
        return self._features(item)

    def with_pixels(self, item: Item) -> Features:
        """Return the features with the gray pixels for refinement. Raises RequestError."""
        return self(item)._replace(gray=self._pixels(item))

    def _read_pixels(self, item: Item) -> np.ndarray:
        """Read the gray pixels (H, W) uint8, reduced as `features.extract` does for refinement."""
        return reduce_image(
            read_gray(item.image, self.matcher.frame), REFINED_AT * self.matcher.resize
        )

    def prepare(self, item: Item) -> Features:
        """Read the features from disk, or compute and write them. Thread-safe."""
        content = read(item.image)
        # The mask belongs to the content: with another one, other keypoints are found.
        mask = self.masks and find_mask(self.masks, name_below(item.image, self.root))
        # Other settings or another content give another file.
        digest = hashlib.sha256(self._settings.encode() + content)
        if mask:
            digest.update(b"mask" + read(mask))
        path = self.folder / f"{digest.hexdigest()[:32]}.npz"
        kept = read_npz(path)
        if kept is not None:
            size, found_at = (tuple(kept[name].tolist()) for name in ("size", "found_at"))
            features = Features(kept["records"], size, found_at=found_at)
            return features._replace(frame=self.matcher.frame, turned=int(kept["turned"]))
        features = self.matcher.extract_file(content, str(item.image), mask)
        # Keep the features, without pixels, for the next time.
        data = io.BytesIO()
        names = ("records", "size", "turned", "found_at")
        np.savez(data, **{name: getattr(features, name) for name in names})
        write_atomic(path, data.getvalue())
        return features._replace(gray=None, image=None)
