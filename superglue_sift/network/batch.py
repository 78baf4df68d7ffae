"""Hold pairs of images and their keypoints in padded tensors. Here are all shapes and units.

A `PairBatch` of B pairs holds two byte buffers of keypoint records, (B, M, R) and (B, N, R), padded
to the longest image of the batch. They are moved to the device as bytes and cast there. Suffix 0 is
the first image, 1 the second. R is the number of bytes of a record: 280 for SIFT with its
orientations (`sift.ORIENTED`), 148 with one of them (`sift.KEYPOINT`), and other numbers for other
features (`extractors.record_dtype`).

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
from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from superglue_sift.features.sift import GEOMETRY, KEYPOINT, ORIENTED
from superglue_sift.geometry.two_view import Size
from superglue_sift.torch_compat import floats_of_bytes, sqrt

DESCRIPTOR_AT = 4 * len(GEOMETRY)  # first byte of the descriptor of a keypoint
MAX_PADDING = 1 / 32  # maximum padding of a size class on a CPU, per keypoint
MAX_BYTES = 256 << 20  # maximum memory for the cosines of descriptors
KEYPOINT_BYTES = KEYPOINT.itemsize  # bytes of a keypoint with one orientation


class Pair(NamedTuple):
    """Two views of one pair.

    records0, records1: (n,) keypoints of each view.
    size0, size1: (width, height) of each view in px.
    """

    records0: np.ndarray
    records1: np.ndarray
    size0: Size
    size1: Size


@dataclasses.dataclass(frozen=True)
class PairBatch:
    """B pairs of views. The keypoints of a view come first, then padding.

    Attributes:
        records: (B, M, R) and (B, N, R) uint8, the bytes of the keypoints of both views. M and N
            are at least 1. Padding is zero.
        counts: (B, 2) int64 numbers of keypoints, always on the host, since they decide shapes.
            Reading them from a GPU would make the host wait.
        image_sizes: (B, 2, 2) float32, width and height in px of both views.
        H_0to1: (B, 3, 3) float64, maps pixels of view 0 to view 1. None if it is not known.
        cells: (B, 2, 3, 3) float64, maps pixels of view 0 and of view 1 to the unit square of the
            photograph that both show. Other photographs may lie outside the square. If None, each
            view shows one photograph only.
    """

    records: Tuple[Tensor, Tensor]
    counts: Tensor
    image_sizes: Tensor
    H_0to1: Optional[Tensor] = None
    cells: Optional[Tensor] = None

    def __len__(self) -> int:
        """Return the number of pairs, B."""
        return len(self.counts)

    @property
    def device(self) -> torch.device:
        """Return the device of the keypoints."""
        return self.image_sizes.device

    def to(self, device, non_blocking: bool = True) -> PairBatch:
        """Copy the batch to `device`. The counts stay on the host."""
        return self._with(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PairBatch:
        """Copy the batch to page-locked memory, from which copies to a GPU are asynchronous."""
        return self._with(Tensor.pin_memory)

    def select(self, pairs: Sequence[int]) -> PairBatch:
        """Return a batch of the given pairs, in this order, padded to their longest images."""
        chosen = torch.tensor(pairs, dtype=torch.int64, device="cpu")
        there = to_device_async(chosen, self.device)
        counts = self.counts[chosen]
        batch = self._with(lambda t: t.index_select(0, there))
        # (b, M, R) -> (b, m, R), where m is the longest of these images, at least 1
        records0, records1 = (
            view[:, : max([*count, 1])] for view, count in zip(batch.records, counts.T.tolist())
        )
        return dataclasses.replace(batch, records=(records0, records1), counts=counts)

    def size_classes(self) -> Tuple[List[int], List[PairBatch]]:
        """Split into batches of pairs of similar size.

        On a GPU there is one class, because launching the work of another class takes longer than
        its padding.

        Returns the indices of the pairs in the order of the batches, and the batches.
        """
        if self.device.type != "cpu" or len(self) < 2:
            return list(range(len(self))), [self]
        # Each class becomes a batch of its own, which is padded less than all pairs together.
        classes = similar_sizes(self.counts.tolist(), MAX_PADDING)
        order = [pair for pairs in classes for pair in pairs]
        return order, [self.select(pairs) for pairs in classes]

    def pad(self, pairs: int, keypoints: int) -> PairBatch:
        """Pad to the shapes (pairs, keypoints, R). Pairs without keypoints follow the others."""

        def pad_pairs(t: Tensor) -> Tensor:
            return pad(t, (*(0, 0) * (t.dim() - 1), 0, pairs - len(self)))

        records0, records1 = (pad(t, (0, 0, 0, keypoints - t.shape[1])) for t in self.records)
        wider = dataclasses.replace(self, records=(records0, records1))._with(pad_pairs)
        return dataclasses.replace(wider, counts=pad_pairs(self.counts))

    def keypoints(self, view: int) -> Tensor:
        """Return positions (B, M, 2) or (B, N, 2) float32, px."""
        return floats_of_bytes(self.records[view][..., :DESCRIPTOR_AT])[..., :2]

    def descriptors(self, view: int) -> Tensor:
        """Return the bytes of the descriptors, (B, M, R - 20) or (B, N, R - 20) uint8."""
        return self.records[view][..., DESCRIPTOR_AT:]

    def _with(self, function: Callable[[Tensor], Tensor]) -> PairBatch:
        """Apply `function` to all tensors except the counts."""
        records0, records1 = map(function, self.records)
        known = [t if t is None else function(t) for t in (self.H_0to1, self.cells)]
        return PairBatch((records0, records1), self.counts, function(self.image_sizes), *known)


def to_device_async(values: Tensor, device: torch.device) -> Tensor:
    """Copy from the host to `device`, to a GPU asynchronously through page-locked memory."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


def size_class(keypoints: int) -> int:
    """Round a number of keypoints up to one of two sizes per octave: 128, 192, 256, 384, ..."""
    # The unit is a quarter of the next power of two.
    unit = max(64, (1 << max(keypoints - 1, 1).bit_length()) >> 2)
    return max(128, -(-keypoints // unit) * unit)


def similar_sizes(counts: Sequence[Tuple[int, int]], padding: float) -> List[List[int]]:
    """Return the indices of the pairs of each size class, from the largest pair to the smallest.

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

    masks: (B, N) bool, True for keypoints.
    visible: (B, 1, 1, N) bool, the keypoints to which others attend. None without padding.
    occupied: (B, 1, 1, 1) bool, whether there is any keypoint. None without padding.
    valid: (T,) bool, True for keypoints. None without any padding.
    """

    def __init__(self, masks: Sequence[Tensor], padded: Sequence[bool]) -> None:
        """Create the masks of attention from the masks of keypoints, (B, N) each.

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


def join_keypoints(batches: Sequence[PairBatch]) -> Tuple[Tensor, Tensor, Tensor, Images]:
    """Join all keypoints of several batches, with their padding, to tensors (T, ...).

    Returns:
        `GEOMETRY` (T, 5) float32: x, y, scale, angle and score of each keypoint.
        The bytes from the descriptor on, (T, C) uint8.
        Width and height in px of the image of each keypoint, (T, 2) float32.
        The images that the keypoints belong to.
    """
    records = [view for batch in batches for view in batch.records]
    counts = [count for batch in batches for count in batch.counts.unbind(1)]
    sizes = [size for batch in batches for size in batch.image_sizes.unbind(1)]
    # (N,) < (B, 1) -> (B, N): the keypoints of a view come before its padding. This is computed on
    # the host, so that nothing here waits for the device.
    indices = [torch.arange(view.shape[1], device="cpu") for view in records]
    masks = [index < count[:, None] for index, count in zip(indices, counts)]
    padded = [not mask.all() for mask in masks]
    images = Images([to_device_async(mask, records[0].device) for mask in masks], padded)
    # (B, 2) -> (T, 2): each keypoint gets the size of its image.
    size = images.join([size[:, None].expand(*mask.shape, 2) for size, mask in zip(sizes, masks)])
    data = images.join(records)  # (T, R)
    return floats_of_bytes(data[:, :DESCRIPTOR_AT]), data[:, DESCRIPTOR_AT:], size, images


def from_pairs(
    pairs: Sequence[Pair],
    H_0to1: Optional[np.ndarray] = None,
    dtype: Optional[np.dtype] = None,
    cells: Optional[np.ndarray] = None,
) -> PairBatch:
    """Make a batch of pairs of views.

    H_0to1: (B, 3, 3) float64, true homographies, if they are known.
    dtype: dtype of the keypoints. If None, it is ORIENTED if any keypoints are or there are no
        pairs, and otherwise the dtype of the first pair.
    cells: see `PairBatch`.
    """
    dtypes = [dtype] if dtype else [view.dtype for pair in pairs for view in pair[:2]]
    used = ORIENTED if ORIENTED in (dtypes or [ORIENTED]) else dtypes[0]
    records0 = _pack([pair.records0 for pair in pairs], used)
    records1 = _pack([pair.records1 for pair in pairs], used)
    counts = [(len(pair.records0), len(pair.records1)) for pair in pairs]
    sizes = [(pair.size0, pair.size1) for pair in pairs]
    known = [None if maps is None else torch.from_numpy(maps) for maps in (H_0to1, cells)]
    return PairBatch(
        (records0, records1),
        torch.tensor(counts, dtype=torch.int64, device="cpu").reshape(-1, 2),
        torch.tensor(sizes, dtype=torch.float32, device="cpu").reshape(-1, 2, 2),
        *known,
    )


def _pack(views: Sequence[np.ndarray], dtype: np.dtype) -> Tensor:
    """Copy the keypoints (n,) of each view to one padded buffer (B, N, R) uint8."""
    # There is at least one column, so that empty views need no special case.
    width = max([*map(len, views), 1])
    shape = (len(views), width, dtype.itemsize)
    buffer = torch.zeros(shape, dtype=torch.uint8, device="cpu")
    for row, r in zip(buffer.numpy(), views):
        size = r.dtype.itemsize  # a KEYPOINT is the beginning of an ORIENTED
        row[: len(r), :size] = np.ascontiguousarray(r).view(np.uint8).reshape(len(r), size)
    return buffer


@torch.no_grad()
def choose_orientations(batch: PairBatch) -> PairBatch:
    """Replace ORIENTED keypoints by KEYPOINTs with the better orientation for each pair.

    Batches of other keypoints are returned unchanged.
    """
    if batch.records[0].shape[-1] != ORIENTED.itemsize:
        return batch
    M, N = (records.shape[1] for records in batch.records)
    # Compute the cosines (B, 2 M, 2 N) of as many pairs at a time as fit MAX_BYTES.
    pairs = max(1, MAX_BYTES // (4 * 2 * M * 2 * N))
    chosen: Tuple[List[Tensor], List[Tensor]] = ([], [])
    for records in zip(*(view.split(pairs) for view in batch.records)):
        both = list(map(_orientations, records))
        # RootSIFT of all orientations, (B, 2 N, 128). Padding and missing second descriptors are
        # zero, so that their cosine is the minimum, 0.
        unit0, unit1 = (
            unit_vectors(view[..., DESCRIPTOR_AT:], "sift").flatten(1, 2) for view in both
        )
        cosines = torch.bmm(unit0, unit1.transpose(1, 2))
        for view, largest, parts in zip(both, (cosines.amax(2), cosines.amax(1)), chosen):
            # (B, 2 N) -> (B, N) for each orientation: its largest cosine with any orientation in
            # the other image
            first, second = largest.unflatten(1, (-1, 2)).unbind(2)
            parts.append(torch.where((second > first).unsqueeze(2), view[:, :, 1], view[:, :, 0]))
    records0, records1 = map(torch.cat, chosen)
    return dataclasses.replace(batch, records=(records0, records1))


def _orientations(records: Tensor) -> Tensor:
    """Convert ORIENTED keypoints (B, N, 280) to KEYPOINTs of both orientations, (B, N, 2, 148)."""
    # x, y and scale take 12 bytes, the angle and the score 4 each.
    shared = records[..., :12]
    score = records[..., 16:DESCRIPTOR_AT]
    # The second angle and the second descriptor follow the bytes of a KEYPOINT.
    first = records[..., :KEYPOINT_BYTES]
    rest = records[..., KEYPOINT_BYTES:]
    second = [shared, rest[..., :4], score, rest[..., 4:]]
    return torch.stack([first, torch.cat(second, -1)], 2)


def choose_pair(pair: Pair) -> Pair:
    """Choose the orientations of one pair (`choose_orientations`). Return KEYPOINT records.

    A pair without ORIENTED keypoints is returned unchanged.
    """
    if ORIENTED not in (pair.records0.dtype, pair.records1.dtype):
        return pair
    chosen = choose_orientations(from_pairs([pair]))
    # Bytes (1, N, 148) -> records (N, 1) -> records (n,) without padding
    records0, records1 = (
        records[0].numpy().view(KEYPOINT)[: len(given), 0]
        for records, given in zip(chosen.records, pair)
    )
    return Pair(records0, records1, pair.size0, pair.size1)


def unit_vectors(data: Tensor, kind: str) -> Tensor:
    """Return descriptors as unit vectors, float32 (..., D). Zeros stay zeros.

    data: (..., K) uint8, the bytes of keypoints from the descriptor on (`PairBatch.descriptors`).
        SIFT may also be float.
    kind: "sift" gives RootSIFT; "float" divides by the length.
    """
    if kind == "float":
        return normalize(floats_of_bytes(data), dim=-1)
    values = data.float()
    # Whole numbers have a sum of at least 1, unless all are zero.
    return sqrt(values / values.sum(-1, keepdim=True).clamp(min=1.0))
