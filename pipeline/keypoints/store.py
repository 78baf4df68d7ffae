"""Write and read a store of keypoints, whose files are verified and mapped into memory.

A store is a folder with `store.json` and shards `shard-00000.safetensors`. Each shard holds
consecutive images:

    records      uint8   (keypoints, R)       packed records of R bytes (280 for SIFT), view after
                                              view
    offsets      int64   (images * views + 1) index of the first record of each view, and the end
    homographies float64 (images, views, 3, 3) image pixels to view pixels
    sizes        int32   (images, 2)          width, height of the image
    view_sizes   int32   (images, views, 2)   width, height of the view

One view is one contiguous slice of the file, so random access reads a few pages and decodes
nothing. store.json lists the format version, the fields of a record, the images, their photographs,
and the SHA-256 of every shard, since DVC does not notice a damaged cache object.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple, Union

import numpy as np
from safetensors.numpy import save

from pipeline.errors import RequestError
from superglue_sift.features.extractors import SIFT, Extractor
from superglue_sift.features.features import SIFT_DIM, Features
from superglue_sift.features.sift import MIN_SCALE
from superglue_sift.files import compute_file_sha256, read_json, write_atomically

FORMAT = "superglue-sift-keypoints"
VERSION = 2
TITLE = f"{FORMAT} {VERSION}"
INDEX = "store.json"
# Number of shards to hash with verify="sample"
SAMPLED_SHARDS = 3

Row = Dict[str, Any]  # A row of store.json, which describes a shard

_DTYPES = {"U8": np.uint8, "I32": np.int32, "I64": np.int64, "F64": np.float64}
_GEOMETRY = [(name, "<f4") for name in ("x", "y", "scale", "angle", "score")]
# The record of a SIFT keypoint. Its second orientation has a descriptor of zeros if there is none.
SIFT_RECORD = np.dtype(
    [
        *_GEOMETRY,
        ("descriptor", "u1", (SIFT_DIM,)),
        ("second_angle", "<f4"),
        ("second_descriptor", "u1", (SIFT_DIM,)),
    ]
)

# The cell of a view that shows its image alone. Every pixel is in the middle of the unit square.
EVERYWHERE = np.array([[0.0, 0.0, 0.5], [0.0, 0.0, 0.5], [0.0, 0.0, 1.0]])


class ImageViews(NamedTuple):
    """All views of one image.

    Attributes:
        name: name of the image.
        size: width and height of the image in px.
        homographies: (views, 3, 3) float64, from the image to each view.
        features: the keypoints of each view.
    """

    name: str
    size: Tuple[int, int]
    homographies: np.ndarray
    features: List[Features]


class View(NamedTuple):
    """One view, as it is stored or after augmentation.

    Attributes:
        features: the keypoints. Those of a stored view are read-only, in mapped memory.
        H_image_to_view: (3, 3) float64.
        cell: (3, 3) float64, maps pixels of the view to the unit square (`find_true_matches`).
    """

    features: Features
    H_image_to_view: np.ndarray
    cell: np.ndarray = EVERYWHERE


def make_record_dtype(extractor: Extractor) -> np.dtype:
    """Return the dtype of the records of an extractor's keypoints."""
    if extractor.name == SIFT.name:
        return SIFT_RECORD
    return np.dtype([*_GEOMETRY, ("descriptor", "<f4", (extractor.descriptor_dim,))])


def pack_records(features: Features) -> np.ndarray:
    """Return keypoints as records, (N, R) uint8, of the dtype of `make_record_dtype`."""
    dim = features.descriptors.shape[2]
    dtype = np.dtype([*_GEOMETRY, ("descriptor", "<f4", (dim,))])
    records = np.zeros(len(features.scores), SIFT_RECORD if features.is_sift else dtype)
    records["x"], records["y"] = features.keypoints.T
    records["scale"] = features.scales
    records["angle"] = features.oris[:, 0]
    records["score"] = features.scores
    records["descriptor"] = features.descriptors[:, 0]
    if features.oris.shape[1] > 1:
        records["second_angle"] = features.oris[:, 1]
        records["second_descriptor"] = features.descriptors[:, 1]
    return records.view(np.uint8).reshape(len(records), records.itemsize)


def unpack_records(packed: np.ndarray, is_sift: bool, size: Tuple[int, int]) -> Features:
    """Return the records of a view as keypoints, in the same memory.

    Args:
        packed: the records, (N, R) uint8.
        is_sift: whether they are records of SIFT.
        size: width and height of the view in px.
    """
    geometry = packed[:, :20].view("<f4")  # (N, 5)
    if is_sift:
        # From the first angle to the second one, 136 bytes later
        oris = packed[:, 12:152].view("<f4")[:, ::34]
        # Each descriptor has 4 bytes before it: the score, and the second angle.
        descriptors = packed[:, 16:].reshape(len(packed), 2, 4 + SIFT_DIM)[:, :, 4:]
    else:
        oris = geometry[:, 3:4]
        descriptors = packed[:, 20:].view("<f4")[:, None]
    return Features(geometry[:, :2], geometry[:, 2], oris, geometry[:, 4], descriptors, size)


def name_shard(index: int) -> str:
    """Return the file name of the shard with this index."""
    return f"shard-{index:05d}.safetensors"


def write_shard(path: Path, images: Sequence[ImageViews]) -> Row:
    """Write one shard atomically (temporary file, fsync, rename).

    Args:
        path: the file of the shard.
        images: the images of the shard, all with the same number of views.

    Returns:
        The row of the shard in store.json, with the keys file, images (their names), keypoints,
        bytes and sha256. Equal images give equal bytes.

    Raises:
        OSError: For example if the disk is full. No partial shard is left under the final name.
    """
    features = [features for image in images for features in image.features]
    # Records are (keypoints, R) bytes, because safetensors has no records
    empty = np.empty((0, SIFT_RECORD.itemsize), np.uint8)
    packed = np.concatenate([pack_records(view) for view in features]) if features else empty
    views = len(images[0].features) if images else 0
    homographies = [image.homographies for image in images]
    view_sizes = [[view.image_size for view in image.features] for image in images]
    data = save(
        {
            "records": packed,
            "offsets": np.cumsum([0, *(len(view.scores) for view in features)], dtype=np.int64),
            "homographies": np.array(homographies, np.float64).reshape(len(images), views, 3, 3),
            "sizes": np.array([image.size for image in images], np.int32).reshape(len(images), 2),
            "view_sizes": np.array(view_sizes, np.int32).reshape(len(images), views, 2),
        },
        metadata={"format": TITLE},
    )
    write_atomically(path, data)
    return {
        "file": path.name,
        "images": [image.name for image in images],
        "keypoints": len(packed),
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }


def make_index(shards: Sequence[Row], views: int, extractor: Extractor = SIFT) -> Dict[str, Any]:
    """Return the content of store.json, which names the extractor unless that is SIFT.

    Args:
        shards: the row of each shard (`write_shard`), and the identifiers of the photographs of its
            images under the key photographs.
        views: number of views of each image.
        extractor: what found the keypoints.
    """
    dtype = make_record_dtype(extractor)
    extractor_fields = {"extractor": extractor.name, "scale_angle": extractor.scale_angle}
    return {
        "format": FORMAT,
        "version": VERSION,
        **(extractor_fields if extractor is not SIFT else {}),
        "views_per_image": views,
        "record": [
            [name, dtype[name].base.str, list(dtype[name].shape)] for name in dtype.names or ()
        ],
        "digest": _hash_rows(shards),
        "shards": list(shards),
    }


def _hash_rows(shards: Sequence[Row]) -> str:
    """Return the SHA-256 over the images, their photographs and the SHA-256 of the shards."""
    rows = [[shard["sha256"], shard["images"], shard["photographs"]] for shard in shards]
    return hashlib.sha256(json.dumps([TITLE, rows]).encode()).hexdigest()


class KeypointStore:
    """The keypoints of one split, which are mapped into memory and read when they are needed.

    Attributes:
        images: names of the images.
        photographs: identifier of the photograph of each image (`ImageSet.identify_photograph`).
        views_per_image: number of views of each image.
        digest: SHA-256 over the images, their photographs and the SHA-256 of the shards.
        counts: (images, views) int64, numbers of keypoints.
        extractor: name of the extractor.
        descriptor: kind of the descriptors, "sift" or "float".
        descriptor_dim: number of entries of a descriptor.
        scale_angle: whether the keypoints have a scale and an orientation.
        min_scale: smallest scale of the extractor in px, 0 if unknown.
    """

    def __init__(self, path: Union[str, Path], verify: str = "sample") -> None:
        """Open the store in a folder.

        Args:
            path: the folder.
            verify: which shards to hash: "none", "sample" (a few) or "all".

        Raises:
            RequestError: If the store is missing, damaged, of another version of this program, or
                of another program. The error names the file.
            OSError: If a shard cannot be read.
        """
        self.path = Path(path)
        content = read_index(self.path)
        self.views_per_image: int = content["views_per_image"]
        self.digest: str = content["digest"]
        self.extractor: str = content.get("extractor", SIFT.name)
        self.scale_angle: bool = content.get("scale_angle", True)
        is_sift = self.extractor == SIFT.name
        self.min_scale = MIN_SCALE if is_sift else 0.0
        dtype = np.dtype([(name, kind, tuple(shape)) for name, kind, shape in content["record"]])
        self.descriptor = "sift" if is_sift else "float"
        self.descriptor_dim: int = dtype["descriptor"].shape[0]
        # Every shard must exist and have its size. Shards at multiples of `step` are hashed.
        step = 1 if verify == "all" else max(len(content["shards"]) // SAMPLED_SHARDS, 1)
        for position, shard in enumerate(content["shards"]):
            check_shard(
                self.path / shard["file"], shard, hashed=verify != "none" and position % step == 0
            )
        shards = [shard for shard in content["shards"] if shard["images"]]
        self.images: List[str] = [name for shard in shards for name in shard["images"]]
        self.photographs: List[str] = [name for shard in shards for name in shard["photographs"]]
        mapped = [map_shard(self.path / shard["file"]) for shard in shards]
        # Each image has the tensors of its shard, and its row there.
        self._rows = [(tensors, row) for tensors in mapped for row in range(len(tensors["sizes"]))]
        views = self.views_per_image
        counts = [np.diff(tensors["offsets"]).reshape(-1, views) for tensors in mapped]
        self.counts = np.concatenate([np.empty((0, views), np.int64), *counts])

    def __reduce__(self) -> Tuple[Any, ...]:
        """Let another process map the files again, without checking them again."""
        return KeypointStore, (self.path, "none")

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.images)

    def read_view(
        self, image: int, view: int, keypoints: Union[slice, np.ndarray] = slice(None)
    ) -> View:
        """Read one view from the mapped memory.

        Args:
            image: index of the image.
            view: index of the view among the views of the image.
            keypoints: which keypoints to read: a slice, or the indices (n,) of them.

        Raises:
            IndexError: If there is no such image or view.
        """
        if not 0 <= image < len(self.images) or not 0 <= view < self.views_per_image:
            raise IndexError(f"view {view} of image {image}: the store has {self.counts.shape}")
        tensors, row = self._rows[image]
        position = row * self.views_per_image + view
        begin, end = tensors["offsets"][position : position + 2]
        records = tensors["records"][begin:end]
        if isinstance(keypoints, slice):
            records = records[keypoints]
        else:
            records = records.take(keypoints, 0)
        size = tuple(tensors["view_sizes"][row, view].tolist())
        features = unpack_records(records, self.descriptor == "sift", size)
        return View(features, tensors["homographies"][row, view])


def check_shard(path: Path, shard: Row, hashed: bool = True) -> None:
    """Check the file of a shard.

    Args:
        path: the file.
        shard: its row in store.json.
        hashed: whether to compare its SHA-256, and not only its size.

    Raises:
        RequestError: If the file is missing or damaged.
    """
    # Compare the size first, because a hash reads the whole file.
    size = path.stat().st_size if path.is_file() else 0
    if size != shard["bytes"] or (hashed and compute_file_sha256(path) != shard["sha256"]):
        raise RequestError(
            f"{path}: missing or damaged ({size} bytes, {shard['bytes']} when it was written); run"
            " `dvc repro keypoints` again (delete the file first if it is linked from the cache)"
        )


def read_index(folder: Path) -> Dict[str, Any]:
    """Read store.json of a folder.

    Raises:
        RequestError: If it is missing, damaged or of another version.
    """
    path = folder / INDEX
    content = read_json(path, "no keypoint store here; run `dvc repro keypoints` first")
    title = "of another program"
    with contextlib.suppress(KeyError, TypeError):
        title = f"{content['format']} {content['version']}"
        if title == TITLE and _hash_rows(content["shards"]) == content["digest"]:
            return content
    raise RequestError(
        f"{path}: damaged, or {title}, this program reads {TITLE}; run `dvc repro -f keypoints`"
    )


def map_shard(path: Path) -> Dict[str, np.ndarray]:
    """Map the tensors of a safetensors file, without a copy, unlike the library.

    A disk that cannot map files into memory, such as some network folders, is read as a whole.

    Raises:
        OSError: If the file cannot be read.
    """
    try:
        data = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
    except OSError:
        data = np.fromfile(path, np.uint8)
    # The file begins with the length of its header, which says where each tensor lies.
    begin = 8 + int(data[:8].view("<u8")[0])
    header = json.loads(data[8:begin].tobytes())
    header.pop("__metadata__")
    return {
        name: (
            data[begin:][slice(*entry["data_offsets"])]
            .view(_DTYPES[entry["dtype"]])
            .reshape(entry["shape"])
        )
        for name, entry in header.items()
    }
