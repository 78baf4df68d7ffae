"""PairBatch: shapes and units of the network's input.

A batch of B pairs of views holds two byte buffers of keypoint records, padded to the longest of the batch. They are
moved to the device as bytes and cast there. Suffix 0 is the first view, 1 the second. R is the number of bytes of a
record: 280 for SIFT with its orientations (`sift.ORIENTED`), 148 with one of them (`sift.KEYPOINT`), and other numbers
for other features (`descriptors.record_dtype`).
"""

from __future__ import annotations

import dataclasses
from typing import Callable, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor

from superglue_sift.network.packing import to_device_async
from superglue_sift.sift import KEYPOINT, ORIENTED
from superglue_sift.torch_compat import floats_of_bytes

_FIELDS = dict(KEYPOINT.fields or {})
DESCRIPTOR_AT = _FIELDS["descriptor"][1]  # byte offset inside a record
ON_HOST = ("counts0", "counts1")  # fields that always stay in host memory
_COLUMN = {"position": slice(2), **{name: _FIELDS[name][1] // 4 for name in ("scale", "angle", "score")}}


class Pair(NamedTuple):
    """Two views to match. records0, records1: (n,) keypoint records; size0, size1: (width, height) px."""

    records0: np.ndarray
    records1: np.ndarray
    size0: Tuple[int, int]
    size1: Tuple[int, int]


@dataclasses.dataclass(frozen=True)
class PairBatch:
    """B pairs of views; the keypoints of a view come first, then padding.

    Attributes:
        records0, records1: (B, N0, R), (B, N1, R) uint8, N at least 1; zeros where padded.
        counts0, counts1: (B,) int64 numbers of keypoints, always on the host: they decide shapes, and reading them
            from a GPU would be a device-to-host synchronisation.
        image_size0, image_size1: (B, 2) float32, width and height in px.
        H_0to1: (B, 3, 3) float64, maps pixels of view 0 to view 1; None if unknown.
        cells: (B, 2, 3, 3) float64, maps pixels of view 0 and of view 1 to the unit square of the photograph that both
            show; other photographs may lie outside it. None: there are none.
    """

    records0: Tensor
    records1: Tensor
    counts0: Tensor
    counts1: Tensor
    image_size0: Tensor
    image_size1: Tensor
    H_0to1: Optional[Tensor] = None
    cells: Optional[Tensor] = None

    def __len__(self) -> int:
        return self.counts0.shape[0]

    @property
    def device(self) -> torch.device:
        """Device of the keypoints."""
        return self.records0.device

    def to(self, device, non_blocking: bool = True) -> PairBatch:
        """Copy to `device`."""
        return self._with(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PairBatch:
        """Copy to page-locked memory, from which copies to a GPU are asynchronous."""
        return self._with(Tensor.pin_memory)

    def clone(self) -> PairBatch:
        """Copy to new memory."""
        return self._with(Tensor.clone)

    def copy_(self, other: PairBatch) -> None:
        """Copy the tensors of a batch with the same counts into this one."""
        for name, value in vars(self).items():
            source = getattr(other, name)
            if value is not None and source is not None and name not in ON_HOST:
                value.copy_(source)

    def select(self, pairs: Sequence[int]) -> PairBatch:
        """Batch of the given pairs, in this order."""
        chosen = torch.tensor(pairs, dtype=torch.int64)
        there = to_device_async(chosen, self.device)
        moved = self._with(lambda t: t.index_select(0, there))
        return dataclasses.replace(moved, counts0=self.counts0[chosen], counts1=self.counts1[chosen])

    def _with(self, function: Callable[[Tensor], Tensor]) -> PairBatch:
        """Apply `function` to all tensors but the counts."""
        tensors = {name: value for name, value in vars(self).items() if value is not None and name not in ON_HOST}
        return dataclasses.replace(self, **{name: function(value) for name, value in tensors.items()})

    keypoints0 = property(lambda self: _column(self.records0, "position"), doc="(B, N0, 2) float32, px")
    keypoints1 = property(lambda self: _column(self.records1, "position"), doc="(B, N1, 2) float32, px")
    scales0 = property(lambda self: _column(self.records0, "scale"), doc="(B, N0) float32, diameter in px")
    scales1 = property(lambda self: _column(self.records1, "scale"), doc="(B, N1) float32, diameter in px")
    angles0 = property(lambda self: _column(self.records0, "angle"), doc="(B, N0) float32, degrees")
    angles1 = property(lambda self: _column(self.records1, "angle"), doc="(B, N1) float32, degrees")
    scores0 = property(lambda self: _column(self.records0, "score"), doc="(B, N0) float32")
    scores1 = property(lambda self: _column(self.records1, "score"), doc="(B, N1) float32")
    descriptors0 = property(lambda self: self.records0[..., DESCRIPTOR_AT:], doc="(B, N0, R - 20) uint8")
    descriptors1 = property(lambda self: self.records1[..., DESCRIPTOR_AT:], doc="(B, N1, R - 20) uint8")


def _column(records: Tensor, name: str) -> Tensor:
    return floats_of_bytes(records[..., :DESCRIPTOR_AT])[..., _COLUMN[name]]


def _pack(records: Sequence[np.ndarray], dtype: np.dtype) -> Tuple[Tensor, Tensor]:
    """One padded buffer (B, N, R) uint8 of all views, and the counts (B,) int64."""
    counts = [len(r) for r in records]
    # at least one column, so that empty views need no special case
    buffer = torch.empty((len(records), max([*counts, 1]), dtype.itemsize), dtype=torch.uint8)
    for row, r in zip(buffer.numpy(), records):
        if r.dtype != dtype and (r.dtype, dtype) != (KEYPOINT, ORIENTED):
            raise TypeError(f"records of dtype {r.dtype}: must be {dtype}, like others of the batch")
        size = r.dtype.itemsize  # a KEYPOINT is the beginning of an ORIENTED
        row[: len(r), :size] = np.ascontiguousarray(r).view(np.uint8).reshape(len(r), size)
        row[: len(r), size:] = 0
        row[len(r) :] = 0
    return buffer, torch.tensor(counts, dtype=torch.int64)


def from_pairs(
    pairs: Sequence[Pair],
    H_0to1: Optional[np.ndarray] = None,
    dtype: Optional[np.dtype] = None,
    cells: Optional[np.ndarray] = None,
) -> PairBatch:
    """Batch pairs of views. H_0to1: (B, 3, 3) float64, true homographies, if known; cells: see `PairBatch`.

    dtype: of the records; None: ORIENTED if any record is ORIENTED or there are no pairs, else that of the first pair.
    Raises TypeError for records of another dtype.
    """
    if dtype is None:
        dtypes = [records.dtype for pair in pairs for records in pair[:2]]
        dtype = ORIENTED if not dtypes or ORIENTED in dtypes else dtypes[0]
    records0, counts0 = _pack([p.records0 for p in pairs], dtype)
    records1, counts1 = _pack([p.records1 for p in pairs], dtype)
    size0 = torch.tensor([p.size0 for p in pairs], dtype=torch.float32).reshape(-1, 2)
    size1 = torch.tensor([p.size1 for p in pairs], dtype=torch.float32).reshape(-1, 2)
    H = None if H_0to1 is None else torch.from_numpy(H_0to1)
    regions = None if cells is None else torch.from_numpy(cells)
    return PairBatch(records0, records1, counts0, counts1, size0, size1, H, regions)
