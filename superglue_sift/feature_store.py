"""Features of many images, computed once and kept on disk, by the content of the image and the
settings.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import io
from pathlib import Path
from typing import Dict, NamedTuple, OrderedDict, Tuple, Union

import cv2
import numpy as np

from superglue_sift import __version__, sift
from superglue_sift.errors import RequestError
from superglue_sift.extractors import DEFAULT, DENSE
from superglue_sift.features import ALIGNED_AT, Features, reduce
from superglue_sift.files import DAMAGED, write_atomic
from superglue_sift.images import read_gray
from superglue_sift.matcher import Matcher

MAX_FEATURES = 256  # images whose features stay in memory
MAX_GRAYS = 32  # images whose pixels stay in memory


class Item(NamedTuple):
    """An image to match. name: the stem of its output files; image: a file, or (H, W, 3) uint8 BGR
    of a video.
    """

    name: str
    image: Union[Path, np.ndarray]


class FeatureStore:
    """Features of images: all on disk, the recently used ones in memory."""

    def __init__(self, matcher: Matcher, folder: Path, held: int = MAX_FEATURES) -> None:
        """folder: for the files, created with the first one. held: the number of images in
        memory.
        """
        self.matcher = matcher
        self.folder = folder
        self.held = held
        extractor = matcher.extractor or DEFAULT
        self.is_sift = extractor.name == DEFAULT.name
        own = "" if self.is_sift else f"{extractor.name}{extractor.code} "
        own += f"{sift.WEAK} " if extractor is DENSE else ""
        versions = f"{__version__} {cv2.__version__}"
        asked = f"{matcher.max_keypoints} {matcher.resize} {matcher.frame}"
        self._settings = f"{asked} {versions} {own}{extractor.dtype.descr}"
        self._memory: OrderedDict[str, Features] = collections.OrderedDict()
        self._aligned_at = ALIGNED_AT * matcher.resize
        # without `self`, which would keep a store and its features in memory until the next garbage
        # collection
        read = functools.partial(_read_reduced, frame=matcher.frame, longer=self._aligned_at)
        self._read = functools.lru_cache(MAX_GRAYS)(read)
        self._digests: Dict[str, str] = {}

    def __call__(self, item: Item) -> Features:
        """Features of an image. Raises RequestError if it cannot be read."""
        if item.name not in self._memory:
            self._memory[item.name] = self.prepare(item)
            while len(self._memory) > self.held:
                self._memory.popitem(last=False)
        self._memory.move_to_end(item.name)
        return self._memory[item.name]

    def with_pixels(self, item: Item) -> Features:
        """The features with the gray pixels, which alignment needs. Raises RequestError."""
        if isinstance(item.image, Path):
            gray = self._read(item.image)
        else:
            gray = reduce(cv2.cvtColor(item.image, cv2.COLOR_BGR2GRAY), self._aligned_at)
        return self(item)._replace(gray=gray)

    def digest(self, item: Item) -> str:
        """SHA-256 of the image's content. Raises RequestError if it cannot be read."""
        if item.name not in self._digests:
            self._content(item)
        return self._digests[item.name]

    def prepare(self, item: Item) -> Features:
        """Read the features from disk, or compute and write them. Thread-safe."""
        source, digest = self._content(item)
        path = (
            self.folder
            / f"{hashlib.sha256(f'{self._settings} {digest}'.encode()).hexdigest()[:32]}.npz"
        )
        try:
            with np.load(path, allow_pickle=False) as file:
                size = tuple(file["size"].tolist())
                turned = int(file["turned"])
                return Features(file["records"], size, frame=self.matcher.frame, turned=turned)
        except DAMAGED:  # or missing
            is_file = isinstance(source, bytes)
            features = (
                self.matcher.extract_file(source, str(item.image))
                if is_file
                else self.matcher.extract(source)
            )
        data = io.BytesIO()
        np.savez(data, records=features.records, size=features.size, turned=features.turned)
        write_atomic(path, data.getvalue())
        return features._replace(gray=None, image=None)

    def _content(self, item: Item) -> Tuple[Union[bytes, np.ndarray], str]:
        """The bytes of the file, or the pixels; and their digest, which is kept."""
        try:
            source = item.image.read_bytes() if isinstance(item.image, Path) else item.image
        except OSError as error:
            raise RequestError(f"{item.image}: cannot be read: {error.strerror}") from None
        shape = b"" if isinstance(source, bytes) else str(source.shape).encode()
        digest = hashlib.sha256(
            shape + (source if isinstance(source, bytes) else source.tobytes())
        ).hexdigest()
        self._digests[item.name] = digest
        # A camera's frames never end
        while not isinstance(source, bytes) and len(self._digests) > self.held:
            del self._digests[next(iter(self._digests))]
        return source, digest


def _read_reduced(path: Path, frame: str, longer: int) -> np.ndarray:
    return reduce(read_gray(path, frame), longer)
