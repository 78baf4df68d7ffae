"""Hold the keypoints of pairs of images in padded tensors, and say their shapes and units.

A `PairBatch` of B pairs has a tensor for each property of a keypoint, with M keypoints in each
image 0 and N in each image 1: the numbers of the images with most keypoints. Suffix 0 is the first
image, 1 the second. `from_pairs` copies records of keypoints into tensors. Their dtype is
`sift.ORIENTED`, `sift.KEYPOINT`, or for other features `extractors.record_dtype`. No other code of
the network knows records.

Pairs of different sizes are sorted into a few batches with little padding
(`PairBatch.split_by_size`). The network reads the keypoints of all images of these batches as one
tensor (T, ...), padding included (`join_keypoints`), since only attention and transport need to
know which image a keypoint belongs to (`Images`).

SIFT has a descriptor for each strong orientation, and the strongest one changes between views. Lowe
(2004, section 5) creates a keypoint for each. Here a point remains one keypoint, so that true
matches and matches of the network are one to one. The point gets the orientation whose descriptor
is closer to a descriptor of the other image (`choose_orientations`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable, ClassVar, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from superglue_sift.features.sift import GEOMETRY, KEYPOINT, ORIENTED
from superglue_sift.geometry.two_view import Size
from superglue_sift.torch_compat import sqrt

MAX_PADDING = 1 / 32  # maximum padding of a batch of similar sizes on a CPU, per keypoint
MAX_COSINE_BYTES = 256 << 20  # maximum memory for the cosines of descriptors

Layout = Dict[str, Tuple[torch.dtype, Tuple[int, ...]]]  # dtype and shape of tensors by name


class Pair(NamedTuple):
    """Two views of one pair.

    Attributes:
        records0, records1: (m,) and (n,) records of the keypoints of each view.
        size0, size1: (width, height) of each view in px.
    """

    records0: np.ndarray
    records1: np.ndarray
    size0: Size
    size1: Size


class KeypointTensors(NamedTuple):
    """Keypoints of several images, with one tensor for each property, as in `PairBatch`.

    The shapes are those of B images with N keypoints. `join_keypoints` returns the keypoints of all
    images of several batches, with (T, ...) in place of (B, N, ...).

    Attributes:
        keypoints: (B, N, 2) float32, px.
        scales: (B, N) float32, px.
        oris: (B, N) float32, degrees.
        scores: (B, N) float32.
        descriptors: (B, N, D).
        image_size: (B, 2) float32, width and height in px. For all images of several batches it has
            the size of the image of each keypoint, (T, 2).
    """

    keypoints: Tensor
    scales: Tensor
    oris: Tensor
    scores: Tensor
    descriptors: Tensor
    image_size: Tensor


@dataclasses.dataclass(frozen=True)
class PairBatch:
    """B pairs of images with M and N keypoints. Padding follows the keypoints of an image.

    The shapes are those of image 0. For image 1 read N in place of M. M and N are at least 1.

    Attributes:
        keypoints0, keypoints1: (B, M, 2) float32, px. The centre of the first pixel is (0, 0).
        scales0, scales1: (B, M) float32, px, the diameter of the neighbourhood (OpenCV's `size`).
        oris0, oris1: (B, M) float32, degrees, clockwise as seen on the screen.
        scores0, scores1: (B, M) float32, 0 or more (for SIFT OpenCV's `response`).
        descriptors0, descriptors1: (B, M, 128) uint8, SIFT, or (B, M, D) float32 of another
            extractor.
        image_size0, image_size1: (B, 2) float32, width and height in px.
        mask0, mask1: (B, M) bool, True for keypoints. None if no image has padding, so that the
            host knows this without a wait for the GPU.
        second_oris0, second_oris1: (B, M) float32, degrees, of the points' second orientations.
            None if keypoints have one orientation.
        second_descriptors0, second_descriptors1: (B, M, 128) uint8, zero for a point of one
            orientation. None if keypoints have one orientation.
        H_0to1: (B, 3, 3) float64, maps pixels of image 0 to image 1. None if it is unknown.
        cells: (B, 2, 3, 3) float64, maps pixels of image 0 and of image 1 to the unit square of the
            photograph that both show. Other photographs may lie outside the square. If None, each
            image shows one photograph only.
    """

    keypoints0: Tensor
    keypoints1: Tensor
    scales0: Tensor
    scales1: Tensor
    oris0: Tensor
    oris1: Tensor
    scores0: Tensor
    scores1: Tensor
    descriptors0: Tensor
    descriptors1: Tensor
    image_size0: Tensor
    image_size1: Tensor
    mask0: Optional[Tensor] = None
    mask1: Optional[Tensor] = None
    second_oris0: Optional[Tensor] = None
    second_oris1: Optional[Tensor] = None
    second_descriptors0: Optional[Tensor] = None
    second_descriptors1: Optional[Tensor] = None
    H_0to1: Optional[Tensor] = None
    cells: Optional[Tensor] = None

    # The flat tensors, one for each dtype, and their layout. They are set if all tensors are views
    # of them. Then only the flat tensors are copied to a GPU or sent to a process.
    _flat_tensors: ClassVar[Optional[Tuple[Dict[torch.dtype, Tensor], Layout]]] = None

    def __len__(self) -> int:
        """Return the number of pairs, B."""
        return len(self.keypoints0)

    @property
    def device(self) -> torch.device:
        """Return the device of the keypoints."""
        return self.keypoints0.device

    @property
    def masks(self) -> Tuple[Tensor, Tensor]:
        """Return (B, M) and (B, N) bool, True for keypoints, also if there is no padding."""
        mask0, mask1 = (
            torch.ones(scores.shape, dtype=torch.bool, device=self.device) if mask is None else mask
            for mask, scores in ((self.mask0, self.scores0), (self.mask1, self.scores1))
        )
        return mask0, mask1

    @property
    def counts(self) -> Tensor:
        """Return the numbers of keypoints, (B, 2) int64."""
        return torch.stack([mask.sum(1) for mask in self.masks], 1)

    def get_keypoints(self, image: int) -> KeypointTensors:
        """Return the keypoints of the images 0 or of the images 1 of all pairs."""
        names = (f"{name}{image}" for name in KeypointTensors._fields)
        return KeypointTensors(*(getattr(self, name) for name in names))

    def to(self, device, non_blocking: bool = True) -> PairBatch:
        """Return the batch on `device`: itself if it is there, otherwise a copy."""
        if torch.device(device) == self.device:
            return self
        return self._map_tensors(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PairBatch:
        """Copy the batch to page-locked memory, from which copies to a GPU are asynchronous."""
        return self._map_tensors(Tensor.pin_memory)

    def __reduce__(self) -> Tuple[Any, ...]:
        """Pickle the flat tensors, so that a process sends a few tensors in place of twenty."""
        return from_flat_tensors, self._flatten_tensors()

    def select(self, pairs: Sequence[int]) -> PairBatch:
        """Return a batch of some pairs, with as little padding as they need.

        Args:
            pairs: the indices of the pairs, in the order of the new batch.
        """
        index = torch.tensor(pairs, dtype=torch.int64, device=self.device)
        counts = self.counts[index]
        # (B, M, ...) -> (b, m, ...), where m is the most keypoints of these images, at least 1.
        widths = [max([*column, 1]) for column in counts.T.tolist()]
        selected = {}
        for name, tensor in self._named_tensors().items():
            if self._has_keypoints(name):
                tensor = tensor[:, : widths[int(name[-1])]]
            selected[name] = tensor.index_select(0, index)
        # Without padding there is no mask.
        for image, width in enumerate(widths):
            if (counts[:, image] == width).all():
                selected.pop(f"mask{image}", None)
        return PairBatch(**selected)

    def split_by_size(self) -> Tuple[List[int], List[PairBatch]]:
        """Split into batches of pairs with similar numbers of keypoints.

        On a GPU there is one batch, because to launch the work of another batch takes longer than
        the padding.

        Returns:
            The indices of the pairs in the order of the batches, and the batches.
        """
        if self.device.type != "cpu" or len(self) < 2:
            return list(range(len(self))), [self]
        classes = group_similar_sizes(self.counts.tolist(), MAX_PADDING)
        order = [pair for pairs in classes for pair in pairs]
        return order, [self.select(pairs) for pairs in classes]

    def pad(self, pairs: int, keypoints: int) -> PairBatch:
        """Return a batch that is padded to so many pairs, and to so many keypoints of each image.

        The added pairs have no keypoints, and come last.
        """
        padded = self._named_tensors()
        for image, mask in enumerate(self.masks):
            if mask.shape != (pairs, keypoints):
                padded[f"mask{image}"] = mask
        for name, tensor in padded.items():
            # torch pads from the last dimension to the first, with two numbers for each: no padding
            # of a keypoint's values, then more keypoints, then more pairs.
            padding = [0, 0] * (tensor.dim() - 1) + [0, pairs - len(self)]
            if self._has_keypoints(name):
                padding[-3] = keypoints - tensor.shape[1]
            padded[name] = pad(tensor, padding)
        return PairBatch(**padded)

    def _named_tensors(self) -> Dict[str, Tensor]:
        """Return the tensors by name, without those that are None."""
        return {name: t for name, t in vars(self).items() if isinstance(t, Tensor)}

    @staticmethod
    def _has_keypoints(name: str) -> bool:
        """Say whether the second dimension of a tensor counts keypoints."""
        return name not in ("image_size0", "image_size1", "H_0to1", "cells")

    def _flatten_tensors(self) -> Tuple[Dict[torch.dtype, Tensor], Layout]:
        """Return all tensors as one flat tensor for each dtype, and the layout of these."""
        if self._flat_tensors is not None:
            return self._flat_tensors
        named = self._named_tensors()
        layout = {name: (t.dtype, tuple(t.shape)) for name, t in named.items()}
        by_dtype: Dict[torch.dtype, List[Tensor]] = {}
        for tensor in named.values():
            by_dtype.setdefault(tensor.dtype, []).append(tensor.flatten())
        return {dtype: torch.cat(tensors) for dtype, tensors in by_dtype.items()}, layout

    def _map_tensors(self, function: Callable[[Tensor], Tensor]) -> PairBatch:
        """Return a batch of the results of `function`, which gets the flat tensors."""
        flat, layout = self._flatten_tensors()
        return from_flat_tensors(
            {dtype: function(tensor) for dtype, tensor in flat.items()}, layout
        )


def from_flat_tensors(flat: Dict[torch.dtype, Tensor], layout: Layout) -> PairBatch:
    """Make a batch whose tensors are views of flat tensors, one for each dtype.

    Args:
        flat: the flat tensors by their dtype.
        layout: the dtype and the shape of each tensor by its name, in the order in which the flat
            tensors hold them.
    """
    tensors = {}
    begins = dict.fromkeys(flat, 0)
    for name, (dtype, shape) in layout.items():
        end = begins[dtype] + math.prod(shape)
        tensors[name] = flat[dtype][begins[dtype] : end].view(shape)
        begins[dtype] = end
    batch = PairBatch(**tensors)
    object.__setattr__(batch, "_flat_tensors", (flat, layout))
    return batch


def round_up_keypoints(keypoints: int) -> int:
    """Round a number of keypoints up to one of 128, 192, 256, 384, 512, 768, ..."""
    # The unit is a quarter of the next power of two.
    unit = max(64, (1 << max(keypoints - 1, 1).bit_length()) >> 2)
    return max(128, -(-keypoints // unit) * unit)


def group_similar_sizes(counts: Sequence[Tuple[int, int]], padding: float) -> List[List[int]]:
    """Group pairs with similar numbers of keypoints.

    Args:
        counts: the numbers of keypoints (M, N) of each pair.
        padding: maximum padding of a group of several pairs, per keypoint.

    Returns:
        The indices of the pairs of each group, from the largest pair to the smallest.
    """
    groups: List[List[int]] = []
    # Neighbours in this order have similar sizes.
    for index in sorted(range(len(counts)), key=lambda index: -sum(counts[index])):
        pairs = [*groups[-1], index] if groups else [index]
        # The numbers of keypoints of all images 0, and of all images 1
        sides = list(zip(*(counts[pair] for pair in pairs)))
        padded = len(pairs) * sum(map(max, sides))
        # Begin a new group if this pair would need too much padding in the present one.
        if not groups or padded > (1 + padding) * sum(map(sum, sides)):
            groups.append([index])
        else:
            groups[-1] = pairs
    return groups


class Images:
    """Say to which images the keypoints in one tensor (T, ...) belong, and which are padding.

    The tensor has the keypoints of several batches. Its parts are: images 0 of the first batch, its
    images 1, images 0 of the second batch, ... So the partners of the images in part i are the
    images in part `i ^ 1`. The first three attributes have an entry for each part, which has B
    images with N keypoints:

    Attributes:
        masks: (B, N) bool, True for keypoints.
        visible: (B, 1, 1, N) bool, the keypoints to which others attend. None without padding.
        occupied: (B, 1, 1, 1) bool, whether there is any keypoint. None without padding.
        valid: (T,) bool, True for keypoints. None without any padding.
    """

    def __init__(self, masks: Sequence[Tensor], padded: Sequence[bool]) -> None:
        """Create the masks of attention from the masks of keypoints.

        Args:
            masks: (B, N) bool of each part, True for keypoints.
            padded: whether some image of each part has padding.
        """
        self.masks = list(masks)
        self.visible: List[Optional[Tensor]] = []
        self.occupied: List[Optional[Tensor]] = []
        for mask, has_padding in zip(masks, padded):
            occupied = mask.any(1, keepdim=True)
            # An image without keypoints shows its padding, because a softmax over nothing is nan.
            visible = mask | ~occupied
            self.visible.append(visible[:, None, None] if has_padding else None)
            self.occupied.append(occupied[:, :, None, None] if has_padding else None)
        self.valid = torch.cat([mask.flatten() for mask in masks]) if any(padded) else None

    def split_by_image(self, values: Tensor) -> List[Tensor]:
        """Split (T, ...) into (B, N, ...) for images 0 and for images 1 of each batch."""
        # (T, ...) -> (B N, ...) of each part -> (B, N, ...)
        parts = values.split([mask.shape[0] * mask.shape[1] for mask in self.masks])
        return [part.view(*mask.shape, *part.shape[1:]) for part, mask in zip(parts, self.masks)]

    def join_images(self, parts: Sequence[Tensor]) -> Tensor:
        """Join (B, N, ...) of all images to (T, ...). This is the inverse of `split_by_image`."""
        return torch.cat([part.flatten(0, 1) for part in parts])


def join_keypoints(batches: Sequence[PairBatch]) -> Tuple[KeypointTensors, Images]:
    """Join the keypoints of several batches, with their padding, in tensors (T, ...).

    Returns:
        The tensors, and the images that the keypoints belong to.
    """
    parts = [batch.get_keypoints(image) for batch in batches for image in (0, 1)]
    masks = [mask for batch in batches for mask in batch.masks]
    padded = [mask is not None for batch in batches for mask in (batch.mask0, batch.mask1)]
    images = Images(masks, padded)
    # (B, 2) -> (B, N, 2): each keypoint gets the size of its image.
    sizes = [part.image_size[:, None].expand(*mask.shape, 2) for part, mask in zip(parts, masks)]
    parts = [part._replace(image_size=size) for part, size in zip(parts, sizes)]
    return KeypointTensors(*map(images.join_images, zip(*parts))), images


# The names of a batch's tensors by the fields of records of keypoints
TENSOR_OF_FIELD = {
    "scale": "scales",
    "angle": "oris",
    "score": "scores",
    "descriptor": "descriptors",
    "second_angle": "second_oris",
    "second_descriptor": "second_descriptors",
}


def from_pairs(
    pairs: Sequence[Pair],
    H_0to1: Optional[np.ndarray] = None,
    dtype: Optional[np.dtype] = None,
    cells: Optional[np.ndarray] = None,
) -> PairBatch:
    """Make a batch of pairs of views.

    Args:
        pairs: the records of keypoints, and the sizes of the views.
        H_0to1: (B, 3, 3) float64, true homographies. None if they are unknown.
        dtype: dtype of the keypoints. If None, it is ORIENTED if any keypoints are or there are no
            pairs, and otherwise the dtype of the first pair.
        cells: (B, 2, 3, 3) float64, see `PairBatch`.

    Example:
        >>> from superglue_sift.network.ground_truth import find_true_matches
        >>> keypoints = np.zeros(2, KEYPOINT)
        >>> keypoints["x"] = 10, 20
        >>> pair = Pair(keypoints, keypoints[:1], (320, 240), (320, 240))
        >>> batch = from_pairs([pair], np.eye(3)[None])
        >>> batch.keypoints0
        tensor([[[10.,  0.],
                 [20.,  0.]]])
        >>> find_true_matches(batch).matches0
        tensor([[ 0, -1]])
    """
    dtypes = [dtype] if dtype else [records.dtype for pair in pairs for records in pair[:2]]
    record_dtype = ORIENTED if ORIENTED in (dtypes or [ORIENTED]) else dtypes[0]
    layout = _plan_tensors([pair.records0 for pair in pairs], record_dtype, 0)
    layout.update(_plan_tensors([pair.records1 for pair in pairs], record_dtype, 1))
    for name, maps in (("H_0to1", H_0to1), ("cells", cells)):
        if maps is not None:
            layout[name] = torch.float64, maps.shape
    batch = from_flat_tensors(_allocate_zeros(layout), layout)
    arrays = {name: tensor.numpy() for name, tensor in batch._named_tensors().items()}
    for name, maps in (("H_0to1", H_0to1), ("cells", cells)):
        if maps is not None:
            arrays[name][...] = maps
    for row, pair in enumerate(pairs):
        _fill_row(arrays, row, 0, pair.records0, pair.size0)
        _fill_row(arrays, row, 1, pair.records1, pair.size1)
    return batch


def _plan_tensors(views: Sequence[np.ndarray], dtype: np.dtype, image: int) -> Layout:
    """Return the layout of the tensors of the images 0 or of the images 1 (`image`) of a batch.

    Args:
        views: the records of the keypoints of each image.
        dtype: the dtype of the records of the batch.
    """
    # There is at least one column, so that empty views need no special case.
    shape = (len(views), max([*map(len, views), 1]))
    layout: Layout = {
        f"keypoints{image}": (torch.float32, (*shape, 2)),
        f"image_size{image}": (torch.float32, (len(views), 2)),
    }
    for field, name in TENSOR_OF_FIELD.items():
        if field in (dtype.names or ()):
            tensor_dtype = torch.uint8 if dtype[field].base == np.uint8 else torch.float32
            layout[f"{name}{image}"] = tensor_dtype, (*shape, *dtype[field].shape)
    if any(len(records) < shape[1] for records in views):
        layout[f"mask{image}"] = torch.bool, shape
    return layout


def _allocate_zeros(layout: Layout) -> Dict[torch.dtype, Tensor]:
    """Allocate the flat tensors of a batch, with zeros."""
    lengths: Dict[torch.dtype, int] = {}
    for dtype, shape in layout.values():
        lengths[dtype] = lengths.get(dtype, 0) + math.prod(shape)
    # numpy gets zeros from the system, and torch would write them.
    arrays = {
        dtype: np.zeros(length, torch.empty(0, dtype=dtype, device="cpu").numpy().dtype)
        for dtype, length in lengths.items()
    }
    return {dtype: torch.from_numpy(array) for dtype, array in arrays.items()}


def _fill_row(
    arrays: Dict[str, np.ndarray], row: int, image: int, records: np.ndarray, size: Size
) -> None:
    """Copy the records (n,) of the keypoints of one view to its row of the arrays of a batch."""
    count = len(records)
    arrays[f"keypoints{image}"][row, :count, 0] = records["x"]
    arrays[f"keypoints{image}"][row, :count, 1] = records["y"]
    arrays[f"image_size{image}"][row] = size
    if f"mask{image}" in arrays:
        arrays[f"mask{image}"][row, :count] = True
    for field, name in TENSOR_OF_FIELD.items():
        # A KEYPOINT among ORIENTED ones has no second orientation, and keeps its zeros.
        if field in (records.dtype.names or ()):
            arrays[f"{name}{image}"][row, :count] = records[field]


@torch.no_grad()
def choose_orientations(batch: PairBatch) -> PairBatch:
    """Give each keypoint the better one of its two orientations for its pair.

    Batches of keypoints with one orientation are returned unchanged.
    """
    second_oris: Any = batch.second_oris0, batch.second_oris1
    second_descriptors: Any = batch.second_descriptors0, batch.second_descriptors1
    if second_descriptors[0] is None:
        return batch
    # (B, M, 2, 128) and (B, N, 2, 128)
    both = [
        torch.stack([batch.descriptors0, second_descriptors[0]], 2),
        torch.stack([batch.descriptors1, second_descriptors[1]], 2),
    ]
    M, N = (descriptors.shape[1] for descriptors in both)
    # Compute the cosines (B, 2 M, 2 N) of as many pairs at a time as fit MAX_COSINE_BYTES.
    pairs = max(1, MAX_COSINE_BYTES // (4 * 2 * M * 2 * N))
    is_second: Tuple[List[Tensor], List[Tensor]] = ([], [])
    for chunk in zip(*(descriptors.split(pairs) for descriptors in both)):
        # RootSIFT of all orientations, (B, 2 N, 128). Padding and missing second descriptors are
        # zero, so that their cosine is the minimum, 0.
        unit0, unit1 = (
            normalize_descriptors(descriptors, "sift").flatten(1, 2) for descriptors in chunk
        )
        cosines = torch.bmm(unit0, unit1.transpose(1, 2))
        for largest, chunks in zip((cosines.amax(2), cosines.amax(1)), is_second):
            # (B, 2 N) -> (B, N) for each orientation: its largest cosine with any orientation in
            # the other image
            first, second = largest.unflatten(1, (-1, 2)).unbind(2)
            chunks.append(second > first)
    second0, second1 = map(torch.cat, is_second)
    return dataclasses.replace(
        batch,
        oris0=torch.where(second0, second_oris[0], batch.oris0),
        oris1=torch.where(second1, second_oris[1], batch.oris1),
        descriptors0=torch.where(second0[:, :, None], both[0][:, :, 1], both[0][:, :, 0]),
        descriptors1=torch.where(second1[:, :, None], both[1][:, :, 1], both[1][:, :, 0]),
        second_oris0=None,
        second_oris1=None,
        second_descriptors0=None,
        second_descriptors1=None,
    )


def choose_pair_orientations(pair: Pair) -> Pair:
    """Give each keypoint of a pair the better one of its two orientations.

    Returns:
        The pair with KEYPOINT records (`choose_orientations`), or `pair` itself if no keypoints are
        ORIENTED.
    """
    if ORIENTED not in (pair.records0.dtype, pair.records1.dtype):
        return pair
    batch = choose_orientations(from_pairs([pair]))
    sides = []
    for image, records in enumerate(pair[:2]):
        tensors = batch.get_keypoints(image)
        keypoints = np.empty(len(records), KEYPOINT)
        for name in GEOMETRY:
            keypoints[name] = records[name]
        keypoints["angle"] = tensors.oris[0, : len(records)].numpy()
        keypoints["descriptor"] = tensors.descriptors[0, : len(records)].numpy()
        sides.append(keypoints)
    return Pair(sides[0], sides[1], pair.size0, pair.size1)


def normalize_descriptors(descriptors: Tensor, kind: str) -> Tensor:
    """Divide descriptors by their lengths. Descriptors of zeros stay zeros.

    Args:
        descriptors: (..., D) uint8 or float32.
        kind: "sift" for RootSIFT, the root of descriptors that are divided by their sums, or
            "float" for descriptors of another extractor.

    Returns:
        Unit vectors (..., D) float32.
    """
    if kind == "float":
        return normalize(descriptors, dim=-1)
    values = descriptors.float()
    # The sum of whole numbers is at least 1, unless all are zero.
    return sqrt(values / values.sum(-1, keepdim=True).clamp(min=1.0))
