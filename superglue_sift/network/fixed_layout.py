"""Batches of fixed shapes: what a CUDA graph of a training step needs.

`packing.Layout` reads the numbers of keypoints on the host, and its shapes follow them. Here shapes are those of a
`Size`, and the numbers of keypoints are a tensor on the device, from which all indices are computed there. A batch fits
a size if it has at most its pairs, sorted as in `Layout.sorted`, each within its width, and at most its tokens.

The rest is padding, which changes no result beyond rounding. Missing pairs are empty. Missing tokens are behind those
of each side, split between images of zeros that attend to each other only: every token belongs to a sequence, since
kernels for packed sequences leave other rows unwritten.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Iterable, List, Sequence, Tuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from superglue_sift.network.attention import in_one_call
from superglue_sift.network.packing import Assignments, Layout, Part, size_class
from superglue_sift.network.sinkhorn import OnDevice


@dataclasses.dataclass(frozen=True)
class Size:
    """Shapes of a batch.

    widths: most keypoints of each pair's views, from the largest pair to the smallest; pairs of one width are a part.
    tokens: of each side, keypoints and padding. width: of the records, at least the largest of `widths`.
    """

    widths: Tuple[int, ...]
    tokens: int
    width: int

    def holds(self, counts0: Tensor, counts1: Tensor) -> bool:
        """Whether a batch of these counts (B,), on the host and in any order, fits."""
        if len(counts0) > len(self.widths) or max(int(counts0.sum()), int(counts1.sum())) > self.tokens:
            return False
        largest = torch.maximum(counts0, counts1).sort(descending=True)[0].tolist()
        return all(count <= width for count, width in zip(largest, self.widths))

    @property
    def fillers(self) -> int:
        """Images of padding behind each side: enough that none exceeds `width`, few enough keypoints in each."""
        return -(-self.tokens // self.width)

    @property
    def parts(self) -> List[Tuple[int, int, int]]:
        """(first pair, end, width) of each part."""
        bounds = [0, *(i for i in range(1, len(self.widths)) if self.widths[i] != self.widths[i - 1])]
        return [(a, b, self.widths[a]) for a, b in zip(bounds, [*bounds[1:], len(self.widths)])]


def size_of(largest: Sequence[int], tokens: int, width: int) -> Size:
    """The smallest `Size` for pairs of these largest counts, in falling order."""
    return Size(tuple(min(size_class(count), width) for count in largest), -(-tokens // 256) * 256, width)


class FixedLayout(Layout):
    """A `Layout` of the shapes of `size`; each index is computed on the device when it is first read."""

    fixed = True

    def __init__(self, counts: Tensor, size: Size) -> None:
        """counts: (2, B) int64 on the device, keypoints of each side of sorted pairs; 0 for missing ones."""
        self.counts, self.size, self.device = counts, size, counts.device
        self.order = []
        self.sides: Any = [self._padding(side, slice(None), size.width) for side in (0, 1)]
        self.within: Any = _FixedEdges(self, crossed=False)
        self.between: Any = _FixedEdges(self, crossed=True)
        self.marginals = [_FixedMarginals(counts[:, part.pairs]) for part in self.parts]

    @property
    def sizes(self) -> List[Tuple[int, int]]:
        """The most that each pair can have."""
        return [(width, width) for width in self.size.widths]

    @functools.cached_property
    def parts(self) -> List[Part]:
        """Pairs of one width; each side's packing takes the packed rows of all its images."""
        every = slice(None), slice(None)
        return [
            Part(slice(a, b), every, tuple(self._padding(side, slice(a, b), width) for side in (0, 1)))  # type: ignore
            for a, b, width in self.size.parts
        ]

    def _padding(self, side: int, images: slice, width: int) -> FixedPacking:
        """Of these images of one side, whose rows are counted from the side's first."""
        tokens = slice(side * self.size.tokens, (side + 1) * self.size.tokens)
        start, stop, _ = images.indices(self.counts.shape[1])
        image = self._image[tokens] - side * self.counts.shape[1]
        inside = (image >= start) & (image < stop)
        lengths, firsts = self.counts[side, images], self._firsts[side, images]
        return FixedPacking(lengths, firsts, width, torch.where(inside, image - start, -1), self._place[tokens])

    @functools.cached_property
    def _firsts(self) -> Tensor:
        """(2, B) int64: first row of each image in its side."""
        return self.counts.cumsum(1) - self.counts

    @functools.cached_property
    def _image(self) -> Tensor:
        """(S,) int64: image of each token, of 2B; -1 for padding."""
        ends = self.counts.cumsum(1)
        rows = torch.arange(self.size.tokens, device=self.device).repeat(2, 1)
        image = torch.searchsorted(ends, rows, right=True)  # the first that ends behind the row
        there = image + torch.arange(2, device=self.device)[:, None] * ends.shape[1]
        return torch.where(image < ends.shape[1], there, -1).flatten()

    @functools.cached_property
    def _place(self) -> Tensor:
        """(S,) int64: place of each token in its image."""
        rows = torch.arange(self.size.tokens, device=self.device).repeat(2)
        return rows - self._firsts.flatten().index_select(0, self.images)

    @functools.cached_property
    def both(self) -> Any:
        """All 2B images, images 0 first, as wide as the records."""
        firsts = self._firsts + torch.arange(2, device=self.device)[:, None] * self.size.tokens
        return FixedPacking(self.counts.flatten(), firsts.flatten(), self.size.width, self._image, self._place)

    @functools.cached_property
    def images(self) -> Tensor:
        """(S,) int64: image of each token; of padding the first."""
        return self._image.clamp(min=0)

    @functools.cached_property
    def partner_starts(self) -> Tensor:
        firsts = self._firsts.flip(0) + torch.arange(1, -1, -1, device=self.device)[:, None] * self.size.tokens
        return firsts.flatten().index_select(0, self.images)

    @functools.cached_property
    def alone(self) -> Tensor:
        return (self.counts.flip(0) == 0).flatten().index_select(0, self.images)

    def pack_sides(self, padded0: Tensor, padded1: Tensor) -> Tensor:
        return self.both.pack(torch.cat([padded0, padded1]))

    def joined(self, sides: Sequence[Sequence[Tensor]]) -> Tensor:
        rows = torch.cat([t.flatten(0, 1) for side in sides for t in side])
        starts = _spaced([(b - a, width) for _ in sides for a, b, width in self.size.parts], self.device)
        return _taken(rows, torch.where(self._image >= 0, starts.index_select(0, self.images) + self._place, -1))

    def assignments(self, parts: Sequence[Assignments]) -> Assignments:
        return _FixedAssignments(Assignments.joined(parts), parts, self.counts)

    def halves(self, packed: Tensor) -> Tuple[Tensor, Tensor]:
        return packed[: self.size.tokens], packed[self.size.tokens :]

    @functools.cached_property
    def lengths(self) -> Tensor:
        """(2, B + fillers) int64: tokens of each sequence of a side, the fillers last."""
        missing, fillers = self.size.tokens - self.counts.sum(1, keepdim=True), self.size.fillers
        further = torch.arange(fillers, device=self.device) < missing % fillers
        return torch.cat([self.counts, torch.div(missing, fillers, rounding_mode="floor") + further], 1)


class FixedPacking:
    """`packing.Packing` of images whose `lengths` (n,) are on the device."""

    full = False

    def __init__(self, lengths: Tensor, firsts: Tensor, width: int, image: Tensor, place: Tensor) -> None:
        """firsts: (n,) first packed row of each image; image, place: (S,) of each packed row, image -1: of none."""
        self.lengths, self.width = lengths, width
        self._firsts, self._image, self._place = firsts, image, place

    @functools.cached_property
    def valid(self) -> Tensor:
        return torch.arange(self.width, device=self.lengths.device) < self.lengths[:, None]

    @functools.cached_property
    def _rows(self) -> Tensor:
        """(n width,) int64: packed row of each padded one; -1: none."""
        rows = self._firsts[:, None] + torch.arange(self.width, device=self.lengths.device)
        return torch.where(self.valid, rows, -1).flatten()

    @functools.cached_property
    def _places(self) -> Tensor:
        """(S,) int64: padded row of each packed one; -1: none."""
        return torch.where(self._image >= 0, self._image * self.width + self._place, -1)

    def pad(self, packed: Tensor) -> Tensor:
        """(S, ...) -> (n, width, ...), padded with zeros."""
        moved = _Moved.apply(packed, self._rows, self._places)
        return moved.view(len(self.lengths), self.width, *packed.shape[1:])

    def pack(self, padded: Tensor) -> Tensor:
        """(n, width, ...) -> (S, ...), zeros in rows of no image."""
        return _Moved.apply(padded.flatten(0, 1), self._places, self._rows)


class _Moved(torch.autograd.Function):
    """`_taken` of rows that are taken once at most; `back` are the places of the inverse.

    The gradient of `index_select` would add all rows without a place to one.
    """

    @staticmethod
    def forward(ctx, rows: Tensor, places: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return _taken(rows, places)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _taken(grad, *ctx.saved_tensors), None, None


def _taken(rows: Tensor, places: Tensor) -> Tensor:
    """Rows at these places, zeros at place -1."""
    missing = (places < 0).view(-1, *[1] * (rows.dim() - 1))
    return rows.index_select(0, places.clamp(min=0)).masked_fill_(missing, 0)


def _spaced(parts: Iterable[Tuple[int, int]], device: torch.device) -> Tensor:
    """First rows of consecutive blocks: for each part (number, rows of a block)."""
    first, starts = 0, []
    for number, rows in parts:
        starts.append(first + torch.arange(number, device=device) * rows)
        first += number * rows
    return torch.cat(starts)


class _FixedEdges:
    """`packing.Edges` of a FixedLayout, with the attributes that `attention.in_one_call` reads."""

    def __init__(self, layout: FixedLayout, crossed: bool) -> None:
        self.layout, self.crossed = layout, crossed
        self.offset = layout.counts.shape[1] if crossed else 0
        self.first_token = layout.size.tokens if crossed else 0

    def attention(self, heads: Tensor) -> Tensor:
        """(S, 3, H, d) -> (S, H, d), see `attention.ragged_attention`."""
        return in_one_call(heads, self)

    @property
    def packing(self) -> Any:
        return _Sequences(self.layout, crossed=False)

    @property
    def partner_packing(self) -> Any:
        return _Sequences(self.layout, self.crossed)

    @property
    def visible(self) -> Tensor:
        valid = self.layout.both.valid
        valid = valid.roll(self.offset, 0) if self.crossed else valid
        return (valid | ~valid.any(-1, keepdim=True))[:, None, None, :]


class _Sequences:
    """The packing of all images for attention: `starts` with the fillers, `pad` and `pack` without."""

    full = False

    def __init__(self, layout: FixedLayout, crossed: bool) -> None:
        self.layout, self.crossed, self.width = layout, crossed, layout.size.width
        self.pad, self.pack = layout.both.pad, layout.both.pack

    @property
    def starts(self) -> Tensor:
        lengths = self.layout.lengths.flip(0) if self.crossed else self.layout.lengths
        return pad(lengths.flatten().cumsum(0), (1, 0)).to(torch.int32)


class _FixedMarginals:
    """`sinkhorn.Marginals` of counts (2, n) on the device."""

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts

    def padded(self, pairs: int, rows: int, columns: int, dtype: torch.dtype) -> OnDevice:
        """Marginals for (pairs, rows, columns)."""
        both = self.counts.sum(0).unsqueeze(1)  # (pairs, 1)
        total, inside, masses = both.clamp(min=1).to(dtype), [], []
        for own, other, size in zip(self.counts, self.counts.flip(0), (rows, columns)):
            index = torch.arange(size, device=own.device)
            dustbin = torch.where(both > 0, other.unsqueeze(1), 1)
            inside.append(index < own.unsqueeze(1))
            masses.append((inside[-1] + (index == own.unsqueeze(1)) * dustbin).to(dtype) / total)
        return OnDevice(masses[0], masses[1], total.log().unsqueeze(2), inside[0].unsqueeze(2) & inside[1].unsqueeze(1))


class _FixedAssignments(Assignments):
    """Assignments whose numbers of keypoints (2, B) are on the device; `sizes` are the most they can be."""

    def __init__(self, joined: Assignments, parts: Sequence[Assignments], counts: Tensor) -> None:
        super().__init__(joined.flat, joined.sizes, joined._places)
        self._parts, self._counts = parts, counts

    def table(self) -> Tensor:
        device, blocks = self.flat.device, [(len(part), part.flat.numel() // len(part)) for part in self._parts]
        strides = [torch.full((len(part),), part._places[0][1], device=device) for part in self._parts]
        return torch.stack([*self._counts, _spaced(blocks, device), torch.cat(strides)], 1)
