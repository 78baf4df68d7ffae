"""Hold pairs of images and their keypoints in padded tensors. Here are all shapes and units.

A `PairBatch` of B pairs has a tensor for each property of a keypoint, with M keypoints in each
image 0 and N in each image 1: the numbers of the images with most keypoints. Suffix 0 is the first
image, 1 the second. `from_pairs` takes the records of keypoints apart (`sift.ORIENTED`,
`sift.KEYPOINT`, or `extractors.record_dtype` for other features). No other code of the network
knows records.

Pairs of different sizes are sorted into a few batches with little padding
(`PairBatch.size_classes`). The network reads the keypoints of all images of these batches as one
tensor (T, ...), padding included (`join_keypoints`), since only attention and transport need to
know which image a keypoint belongs to (`Images`).

SIFT has a descriptor for each strong orientation, and the strongest one changes between views. Lowe
(2004, section 5) creates a keypoint for each. Here a point remains one keypoint, so that truth and
matches are one to one, and its orientation is the one whose descriptor is closer to a descriptor of
the other image (`choose_orientations`).
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

MAX_PADDING = 1 / 32  # maximum padding of a size class on a CPU, per keypoint
MAX_BYTES = 256 << 20  # maximum memory for the cosines of descriptors

Layout = Dict[str, Tuple[torch.dtype, Tuple[int, ...]]]  # dtype and shape of tensors by name


class Pair(NamedTuple):
    """Two views of one pair.

    Attributes:
        records0, records1: (n,) keypoints of each view.
        size0, size1: (width, height) of each view in px.
    """

    records0: np.ndarray
    records1: np.ndarray
    size0: Size
    size1: Size


class KeypointTensors(NamedTuple):
    """Keypoints of several images, with one tensor for each property, as in `PairBatch`.

    The first dimensions are (B, N) for B images, or (T,) for all images of several batches. Then
    `image_size` has the size of the image of each keypoint, (T, 2).
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
        mask0, mask1: (B, M) bool, True for keypoints. None if no image has padding. So the host
            knows whether there is padding without a wait for the GPU.
        second_oris0, second_oris1: (B, M) float32, degrees, of the points' second orientations.
            None if keypoints have one orientation.
        second_descriptors0, second_descriptors1: (B, M, 128) uint8, zero for a point of one
            orientation. None if keypoints have one orientation.
        H_0to1: (B, 3, 3) float64, maps pixels of image 0 to image 1. None if it is not known.
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

    # One flat tensor for each dtype and their layout, if all tensors are views of these. They are
    # what is moved: each copy to a GPU, and each tensor that another process sends, takes its time.
    _flat: ClassVar[Optional[Tuple[Dict[torch.dtype, Tensor], Layout]]] = None

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

    def view(self, index: int) -> KeypointTensors:
        """Return the keypoints of images 0 or 1 (`index`) of all pairs."""
        return KeypointTensors(*(getattr(self, f"{n}{index}") for n in KeypointTensors._fields))

    def to(self, device, non_blocking: bool = True) -> PairBatch:
        """Copy the batch to `device`, if it is not there."""
        if torch.device(device) == self.device:
            return self
        return self._move(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PairBatch:
        """Copy the batch to page-locked memory, from which copies to a GPU are asynchronous."""
        return self._move(Tensor.pin_memory)

    def __reduce__(self) -> Tuple[Any, ...]:
        """Pickle the flat tensors, so that a process sends a few tensors in place of twenty."""
        return split_flat, self._join()

    def select(self, pairs: Sequence[int]) -> PairBatch:
        """Return a batch of the given pairs, in this order, padded to their longest images."""
        index = torch.tensor(pairs, dtype=torch.int64, device=self.device)
        counts = self.counts[index]
        # Trim images 0 and 1, (B, M, ...) -> (b, m, ...), to the longest of these, at least 1.
        widths = [max([*column, 1]) for column in counts.T.tolist()]
        selected = {}
        for name, tensor in self._tensors().items():
            if self._has_keypoints(name):
                tensor = tensor[:, : widths[int(name[-1])]]
            selected[name] = tensor.index_select(0, index)
        # Without padding there is no mask.
        for view, width in enumerate(widths):
            if (counts[:, view] == width).all():
                selected.pop(f"mask{view}", None)
        return PairBatch(**selected)

    def size_classes(self) -> Tuple[List[int], List[PairBatch]]:
        """Split into batches of pairs of similar size.

        On a GPU there is one class, because launching the work of another class takes longer than
        its padding.

        Returns:
            The indices of the pairs in the order of the batches, and the batches.
        """
        if self.device.type != "cpu" or len(self) < 2:
            return list(range(len(self))), [self]
        # Each class becomes a batch of its own, which is padded less than all pairs together.
        classes = similar_sizes(self.counts.tolist(), MAX_PADDING)
        order = [pair for pairs in classes for pair in pairs]
        return order, [self.select(pairs) for pairs in classes]

    def pad(self, pairs: int, keypoints: int) -> PairBatch:
        """Pad to so many pairs and keypoints. The pairs without keypoints come last."""
        padded = self._tensors()
        for view, mask in enumerate(self.masks):
            if mask.shape != (pairs, keypoints):
                padded[f"mask{view}"] = mask
        for name, tensor in padded.items():
            # The last dimension comes first: no padding, then more keypoints, then more pairs.
            sides = [0, 0] * (tensor.dim() - 1) + [0, pairs - len(self)]
            if self._has_keypoints(name):
                sides[-3] = keypoints - tensor.shape[1]
            padded[name] = pad(tensor, sides)
        return PairBatch(**padded)

    def _tensors(self) -> Dict[str, Tensor]:
        """Return the tensors by name, without those that are None."""
        return {name: t for name, t in vars(self).items() if isinstance(t, Tensor)}

    @staticmethod
    def _has_keypoints(name: str) -> bool:
        """Say whether the second dimension of a tensor counts keypoints."""
        return name not in ("image_size0", "image_size1", "H_0to1", "cells")

    def _join(self) -> Tuple[Dict[torch.dtype, Tensor], Layout]:
        """Return all tensors as one flat tensor for each dtype, and what these hold, in order."""
        if self._flat is not None:
            return self._flat
        named = self._tensors()
        layout = {name: (t.dtype, tuple(t.shape)) for name, t in named.items()}
        parts: Dict[torch.dtype, List[Tensor]] = {}
        for tensor in named.values():
            parts.setdefault(tensor.dtype, []).append(tensor.flatten())
        return {dtype: torch.cat(tensors) for dtype, tensors in parts.items()}, layout

    def _move(self, function: Callable[[Tensor], Tensor]) -> PairBatch:
        """Apply `function` to the flat tensors."""
        flat, layout = self._join()
        return split_flat({dtype: function(tensor) for dtype, tensor in flat.items()}, layout)


def split_flat(flat: Dict[torch.dtype, Tensor], layout: Layout) -> PairBatch:
    """Make a batch whose tensors are views of flat ones, one for each dtype.

    Args:
        layout: the dtype and the shape of each tensor, by name, in their order in the flat ones.
    """
    tensors = {}
    begins = dict.fromkeys(flat, 0)
    for name, (dtype, shape) in layout.items():
        end = begins[dtype] + math.prod(shape)
        tensors[name] = flat[dtype][begins[dtype] : end].view(shape)
        begins[dtype] = end
    batch = PairBatch(**tensors)
    object.__setattr__(batch, "_flat", (flat, layout))
    return batch


def size_class(keypoints: int) -> int:
    """Round a number of keypoints up to one of two sizes per octave: 128, 192, 256, 384, ..."""
    # The unit is a quarter of the next power of two.
    unit = max(64, (1 << max(keypoints - 1, 1).bit_length()) >> 2)
    return max(128, -(-keypoints // unit) * unit)


def similar_sizes(counts: Sequence[Tuple[int, int]], padding: float) -> List[List[int]]:
    """Return the indices of the pairs of each size class, from the largest pair to the smallest.

    Args:
        counts: the numbers of keypoints (M, N) of each pair.
        padding: maximum number of padded rows per keypoint in a class of several pairs.
    """
    classes: List[List[int]] = []
    # Neighbours in this order have similar sizes.
    for i in sorted(range(len(counts)), key=lambda i: -sum(counts[i])):
        together = [*classes[-1], i] if classes else [i]
        sides = list(zip(*(counts[j] for j in together)))
        rows = len(together) * sum(map(max, sides))
        # Begin a new class if this pair would need too much padding in the present one.
        if not classes or rows > (1 + padding) * sum(map(sum, sides)):
            classes.append([i])
        else:
            classes[-1] = together
    return classes


class Images:
    """The images of several batches, whose keypoints are in one tensor (T, ...).

    The order is: images 0 of the first batch, its images 1, images 0 of the second batch, ... So
    the partners of images i are images `i ^ 1`. Each of the first three attributes has an entry for
    each of these groups of B images with N keypoints:

    Attributes:
        masks: (B, N) bool, True for keypoints.
        visible: (B, 1, 1, N) bool, the keypoints to which others attend. None without padding.
        occupied: (B, 1, 1, 1) bool, whether there is any keypoint. None without padding.
        valid: (T,) bool, True for keypoints. None without any padding.
    """

    def __init__(self, masks: Sequence[Tensor], padded: Sequence[bool]) -> None:
        """Create the masks of attention from the masks of keypoints, (B, N) each.

        Args:
            padded: whether some image of a group has padding.
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

    def split(self, tokens: Tensor) -> List[Tensor]:
        """Split (T, ...) into (B, N, ...) for images 0 and for images 1 of each batch."""
        # (T, ...) -> (B N, ...) of each group -> (B, N, ...)
        parts = tokens.split([mask.shape[0] * mask.shape[1] for mask in self.masks])
        return [part.view(*mask.shape, *part.shape[1:]) for part, mask in zip(parts, self.masks)]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Join (B, N, ...) of all images to (T, ...). This is the inverse of `split`."""
        return torch.cat([part.flatten(0, 1) for part in parts])


def join_keypoints(batches: Sequence[PairBatch]) -> Tuple[KeypointTensors, Images]:
    """Join all keypoints of several batches, with their padding, to tensors (T, ...).

    Returns:
        The tensors, and the images that the keypoints belong to.
    """
    views = [batch.view(index) for batch in batches for index in (0, 1)]
    masks = [mask for batch in batches for mask in batch.masks]
    padded = [mask is not None for batch in batches for mask in (batch.mask0, batch.mask1)]
    images = Images(masks, padded)
    # (B, 2) -> (B, N, 2): each keypoint gets the size of its image.
    sizes = [view.image_size[:, None].expand(*mask.shape, 2) for view, mask in zip(views, masks)]
    views = [view._replace(image_size=size) for view, size in zip(views, sizes)]
    return KeypointTensors(*map(images.join, zip(*views))), images


# Fields of the records of keypoints, and the tensors of a batch
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

    >>> from superglue_sift.network.ground_truth import ground_truth
    >>> keypoints = np.zeros(2, KEYPOINT)
    >>> keypoints["x"] = 10, 20
    >>> pair = Pair(keypoints, keypoints[:1], (320, 240), (320, 240))
    >>> batch = from_pairs([pair], np.eye(3)[None])
    >>> batch.keypoints0
    tensor([[[10.,  0.],
             [20.,  0.]]])
    >>> ground_truth(batch).matches0
    tensor([[ 0, -1]])

    Args:
        H_0to1: (B, 3, 3) float64, true homographies, if they are known.
        dtype: dtype of the keypoints. If None, it is ORIENTED if any keypoints are or there are no
            pairs, and otherwise the dtype of the first pair.
        cells: see `PairBatch`.
    """
    dtypes = [dtype] if dtype else [view.dtype for pair in pairs for view in pair[:2]]
    used = ORIENTED if ORIENTED in (dtypes or [ORIENTED]) else dtypes[0]
    sides = [pair.records0 for pair in pairs], [pair.records1 for pair in pairs]
    # Say what the flat tensors hold.
    layout: Layout = {}
    for view, side in enumerate(sides):
        # There is at least one column, so that empty views need no special case.
        shape = (len(side), max([*map(len, side), 1]))
        layout[f"keypoints{view}"] = torch.float32, (*shape, 2)
        layout[f"image_size{view}"] = torch.float32, (len(side), 2)
        for field, name in TENSOR_OF_FIELD.items():
            if field in (used.names or ()):
                kind = torch.uint8 if used[field].base == np.uint8 else torch.float32
                layout[f"{name}{view}"] = kind, (*shape, *used[field].shape)
        if any(len(records) < shape[1] for records in side):
            layout[f"mask{view}"] = torch.bool, shape
    for name, maps in (("H_0to1", H_0to1), ("cells", cells)):
        if maps is not None:
            layout[name] = torch.float64, maps.shape
    batch = split_flat(_zeros(layout), layout)
    # Copy the values to their places.
    arrays = {name: tensor.numpy() for name, tensor in batch._tensors().items()}
    for name, maps in (("H_0to1", H_0to1), ("cells", cells)):
        if maps is not None:
            arrays[name][...] = maps
    for row, pair in enumerate(pairs):
        _fill_row(arrays, row, 0, pair.records0, pair.size0)
        _fill_row(arrays, row, 1, pair.records1, pair.size1)
    return batch


def _zeros(layout: Layout) -> Dict[torch.dtype, Tensor]:
    """Allocate the flat tensors of a batch, with zeros."""
    lengths: Dict[torch.dtype, int] = {}
    for dtype, shape in layout.values():
        lengths[dtype] = lengths.get(dtype, 0) + math.prod(shape)
    # numpy gets zeros from the system, where torch would write them.
    arrays = {
        dtype: np.zeros(length, torch.empty(0, dtype=dtype, device="cpu").numpy().dtype)
        for dtype, length in lengths.items()
    }
    return {dtype: torch.from_numpy(array) for dtype, array in arrays.items()}


def _fill_row(
    arrays: Dict[str, np.ndarray], row: int, view: int, records: np.ndarray, size: Size
) -> None:
    """Copy the keypoints (n,) of one view to its row of the arrays of a batch."""
    count = len(records)
    arrays[f"keypoints{view}"][row, :count, 0] = records["x"]
    arrays[f"keypoints{view}"][row, :count, 1] = records["y"]
    arrays[f"image_size{view}"][row] = size
    if f"mask{view}" in arrays:
        arrays[f"mask{view}"][row, :count] = True
    for field, name in TENSOR_OF_FIELD.items():
        # A KEYPOINT among ORIENTED ones has no second orientation, and keeps its zeros.
        if field in (records.dtype.names or ()):
            arrays[f"{name}{view}"][row, :count] = records[field]


@torch.no_grad()
def choose_orientations(batch: PairBatch) -> PairBatch:
    """Give each keypoint the better one of its two orientations for its pair.

    Batches of keypoints with one orientation are returned unchanged.
    """
    second_oris: Any = batch.second_oris0, batch.second_oris1
    second_descriptors: Any = batch.second_descriptors0, batch.second_descriptors1
    if second_descriptors[0] is None:
        return batch
    both = [
        torch.stack([batch.descriptors0, second_descriptors[0]], 2),
        torch.stack([batch.descriptors1, second_descriptors[1]], 2),
    ]  # (B, M, 2, 128) and (B, N, 2, 128)
    M, N = (descriptors.shape[1] for descriptors in both)
    # Compute the cosines (B, 2 M, 2 N) of as many pairs at a time as fit MAX_BYTES.
    pairs = max(1, MAX_BYTES // (4 * 2 * M * 2 * N))
    is_second: Tuple[List[Tensor], List[Tensor]] = ([], [])
    for chunk in zip(*(descriptors.split(pairs) for descriptors in both)):
        # RootSIFT of all orientations, (B, 2 N, 128). Padding and missing second descriptors are
        # zero, so that their cosine is the minimum, 0.
        unit0, unit1 = (unit_vectors(descriptors, "sift").flatten(1, 2) for descriptors in chunk)
        cosines = torch.bmm(unit0, unit1.transpose(1, 2))
        for largest, parts in zip((cosines.amax(2), cosines.amax(1)), is_second):
            # (B, 2 N) -> (B, N) for each orientation: its largest cosine with any orientation in
            # the other image
            first, second = largest.unflatten(1, (-1, 2)).unbind(2)
            parts.append(second > first)
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


def choose_pair(pair: Pair) -> Pair:
    """Choose the orientations of one pair (`choose_orientations`). Return KEYPOINT records.

    A pair without ORIENTED keypoints is returned unchanged.
    """
    if ORIENTED not in (pair.records0.dtype, pair.records1.dtype):
        return pair
    batch = choose_orientations(from_pairs([pair]))
    sides = []
    for view, records in enumerate(pair[:2]):
        tensors = batch.view(view)
        keypoints = np.empty(len(records), KEYPOINT)
        for name in GEOMETRY:
            keypoints[name] = records[name]
        keypoints["angle"] = tensors.oris[0, : len(records)].numpy()
        keypoints["descriptor"] = tensors.descriptors[0, : len(records)].numpy()
        sides.append(keypoints)
    return Pair(sides[0], sides[1], pair.size0, pair.size1)


def unit_vectors(descriptors: Tensor, kind: str) -> Tensor:
    """Return descriptors (..., D) as unit vectors, float32 (..., D). Zeros stay zeros.

    Args:
        kind: "sift" gives RootSIFT, of uint8 or float; "float" divides by the length.
    """
    if kind == "float":
        return normalize(descriptors, dim=-1)
    values = descriptors.float()
    # Whole numbers have a sum of at least 1, unless all are zero.
    return sqrt(values / values.sum(-1, keepdim=True).clamp(min=1.0))
