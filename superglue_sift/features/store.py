"""Features of many images are computed once and kept on disk.

The name of a file is a digest of the content of the image and its mask, and of the settings.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import io
from pathlib import Path
from typing import Dict, NamedTuple, Optional, OrderedDict, Tuple, Union

import cv2
import numpy as np

from superglue_sift import __version__
from superglue_sift.features.extractors import DEFAULT
from superglue_sift.features.features import ALIGNED_AT, Features
from superglue_sift.features.images import find_mask, read, read_gray, reduce
from superglue_sift.files import DAMAGED, name_below, write_atomic
from superglue_sift.matcher import Matcher

MAX_FEATURES = 256  # number of images whose features stay in memory
MAX_GRAYS = 32  # number of images whose pixels stay in memory


class Item(NamedTuple):
    """An image to match.

    name: stem of its output files. image: a file, or a frame of a video (H, W, 3) uint8 BGR.
    """

    name: str
    image: Union[Path, np.ndarray]


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
        self._memory: OrderedDict[str, Features] = collections.OrderedDict()
        self._digests: Dict[str, str] = {}
        self._side = side = ALIGNED_AT * matcher.resize
        # The function does not refer to `self`. This would keep a store and its features in memory
        # until the next garbage collection.
        self._pixels = functools.lru_cache(MAX_GRAYS)(
            lambda path: reduce(read_gray(path, matcher.frame), side)
        )

    def __call__(self, item: Item) -> Features:
        """Return the features of an image. Raises RequestError if it cannot be read."""
        features = self._memory.pop(item.name, None) or self.prepare(item)
        self._memory[item.name] = features  # now it is the last one of the dictionary
        if len(self._memory) > MAX_FEATURES:
            self._memory.popitem(last=False)
        return features

    def with_pixels(self, item: Item) -> Features:
        """Return the features with the gray pixels, which alignment needs. Raises RequestError."""
        if isinstance(item.image, Path):
            return self(item)._replace(gray=self._pixels(item.image))
        gray = cv2.cvtColor(item.image, cv2.COLOR_BGR2GRAY)
        return self(item)._replace(gray=reduce(gray, self._side))

    def digest(self, item: Item) -> str:
        """Return the hex SHA-256 of the content of the image and its mask.

        Raises RequestError if either cannot be read.
        """
        if item.name not in self._digests:
            self._read(item)
        return self._digests[item.name]

    def mask_of(self, item: Item) -> Optional[Path]:
        """Return the file with the mask of a photograph, or None if there is none."""
        if self.masks is None or not isinstance(item.image, Path):
            return None
        return find_mask(self.masks, name_below(item.image, self.root))

    def prepare(self, item: Item) -> Features:
        """Read the features from disk, or compute and write them. Thread-safe."""
        content, digest = self._read(item)
        # Other settings or another content give another file.
        name = hashlib.sha256(f"{self._settings} {digest}".encode()).hexdigest()[:32]
        path = self.folder / f"{name}.npz"
        try:
            with np.load(path, allow_pickle=False) as file:
                size, found_at = (tuple(file[name].tolist()) for name in ("size", "found_at"))
                features = Features(file["records"], size, found_at=found_at)
                return features._replace(frame=self.matcher.frame, turned=int(file["turned"]))
        except DAMAGED:  # the file may also be missing
            if isinstance(item.image, Path):
                features = self.matcher.extract_file(content, str(item.image), self.mask_of(item))
            else:
                features = self.matcher.extract(item.image)
        # Keep the features, without pixels, for the next time.
        data = io.BytesIO()
        kept = ("records", "size", "turned", "found_at")
        np.savez(data, **{name: getattr(features, name) for name in kept})
        write_atomic(path, data.getvalue())
        return features._replace(gray=None, image=None)

    def _read(self, item: Item) -> Tuple[bytes, str]:
        """Return the bytes of the file, or of the pixels, and their digest, which is kept."""
        if isinstance(item.image, Path):
            content = read(item.image)
            mask = self.mask_of(item)
            hashed = content if mask is None else content + b"mask" + read(mask)
            digest = hashlib.sha256(hashed).hexdigest()
        else:
            content = item.image.tobytes()
            digest = hashlib.sha256(f"{item.image.shape}".encode() + content).hexdigest()
            if len(self._digests) > MAX_FEATURES:  # frames of a camera never end
                del self._digests[next(iter(self._digests))]
        self._digests[item.name] = digest
        return content, digest
