"""Ragged sets of keypoints: where the tokens of each image of a batch lie, which image attends to which, and the log
assignments of pairs of them.

Tokens of all images are packed one after another, (S, D) with S the sum of the counts, so that linear layers and norms
never see padding. Index tensors for a GPU are computed once a batch, from counts on the host: no device-to-host
synchronisation.
"""

from __future__ import annotations

import collections.abc
import functools
from typing import Any, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor


def to_device_async(values: Tensor, device: torch.device) -> Tensor:
    """Copy from the host to `device`, through page-locked memory, so that copies to a GPU are asynchronous."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def size_class(keypoints: int) -> int:
    """Round up to one of two sizes an octave: 128, 192, 256, 384, ..."""
    unit = max(64, 1 << max(keypoints - 1, 1).bit_length() >> 2)
    return max(128, -(-keypoints // unit) * unit)


def pair_by_pair(device: torch.device) -> bool:
    """Is each pair a part of its own (`Layout.parts`)?"""
    return device.type == "cpu"


class Packing:
    """Sequences of `counts` tokens, packed (S, ...) or padded (B, width, ...), and the way between the two."""

    def __init__(self, counts: List[int], device: torch.device, width: int = 0) -> None:
        """width: of the padded form; 0: that of the longest, at least 1."""
        self.counts, self.device = counts, device
        self.width = width or max([*counts, 1])

    @property
    def full(self) -> bool:
        """Is the padded form without padding?"""
        return all(count == self.width for count in self.counts)

    @functools.cached_property
    def starts(self) -> Tensor:
        """(B + 1,) int32: where each sequence begins among the packed, and S."""
        return self._on_device(np.cumsum([0, *self.counts]).astype(np.int32))

    @functools.cached_property
    def lengths(self) -> Tensor:
        """(B,) int64: the counts."""
        return self._on_device(np.asarray(self.counts, np.int64))

    @functools.cached_property
    def valid(self) -> Tensor:
        """(B, width) bool: where the padded form holds a token."""
        return torch.arange(self.width, device=self.device) < self.lengths[:, None]

    @functools.cached_property
    def _places(self) -> Tensor:
        """(S,) int64: row of each token in the padded form, its first two axes taken as one."""
        return self._on_device(np.flatnonzero(np.arange(self.width) < np.asarray(self.counts)[:, None]))

    def pad(self, packed: Tensor) -> Tensor:
        """(S, ...) -> (B, width, ...), zeros where there is no token; a view where there is no padding."""
        shape = (len(self.counts), self.width, *packed.shape[1:])
        if self.full:
            return packed.reshape(shape)
        rows = packed.new_zeros((shape[0] * shape[1], *shape[2:]))
        return rows.index_copy(0, self._places, packed).view(shape)

    def pack(self, padded: Tensor) -> Tensor:
        """(B, width, ...) -> (S, ...); a view where there is no padding."""
        rows = padded.reshape(-1, *padded.shape[2:])
        return rows if self.full else rows.index_select(0, self._places)

    def _on_device(self, values: np.ndarray) -> Tensor:
        return to_device_async(torch.from_numpy(values), self.device)


class Group(NamedTuple):
    """`number` neighbours of n keypoints each, whose partners are neighbours of m keypoints each: their packed rows."""

    own: slice
    others: slice
    number: int

    @property
    def weights(self) -> int:
        """How many pairs of keypoints attend to each other: number n m."""
        return (self.own.stop - self.own.start) * (self.others.stop - self.others.start) // self.number


class Edges:
    """Which image the keypoints of each image attend to (SuperGlue, section 3.1: self and cross edges)."""

    def __init__(self, packing: Packing, partner: List[int]) -> None:
        """partner: for each sequence the index of the one it attends to: all as many places further, cyclically."""
        self.packing, self.partner = packing, partner
        self.counts = [packing.counts[j] for j in partner]  # of the partners
        self.turn = partner[0] if partner else 0
        if partner != [(i + self.turn) % len(partner) for i in range(len(partner))]:
            raise ValueError("partners must all be as many places apart")

    def groups(self, max_weights: int) -> Iterator[Group]:
        """All sequences, in groups of at most `max_weights` weights or of one sequence."""
        starts = np.cumsum([0, *self.packing.counts]).tolist()
        shapes = list(zip(self.packing.counts, self.counts))
        i = 0
        while i < len(shapes):
            n, m = shapes[i]
            number = 1
            for k in range(i + 1, min(len(shapes), i + max_weights // max(n * m, 1))):
                if shapes[k] != (n, m) or self.partner[k] != self.partner[i] + number:
                    break
                number += 1
            j = self.partner[i]
            yield Group(slice(starts[i], starts[i + number]), slice(starts[j], starts[j + number]), number)
            i += number

    @functools.cached_property
    def partner_packing(self) -> Packing:
        """The partners' tokens, packed in the order of those that attend to them."""
        return Packing(self.counts, self.packing.device, self.packing.width)

    @property
    def first_token(self) -> int:
        """Packed row at which the partner of the first sequence begins: those of the others follow, cyclically."""
        return sum(self.packing.counts[: self.turn])

    @functools.cached_property
    def visible(self) -> Tensor:
        """(B, 1, 1, width) bool: the keys each sequence may see. Of an empty partner the padding, which is zero."""
        valid = self.partner_packing.valid
        # a softmax over no key at all would be nan
        return (valid | ~valid.any(-1, keepdim=True))[:, None, None, :]


class Part(NamedTuple):
    """Some consecutive pairs of a batch: which, the packed rows of each side, and how these are padded."""

    pairs: slice
    rows: Tuple[slice, slice]
    sides: Tuple[Packing, Packing]


class Layout:
    """Of a batch of B pairs: each side, all 2B images (images 0 first), and the edges within and between them."""

    def __init__(self, batch) -> None:
        """batch: a PairBatch, or any object with its counts and records."""
        self.device = batch.records0.device
        counts = [batch.counts0.tolist(), batch.counts1.tolist()]
        widths = batch.records0.shape[1], batch.records1.shape[1]
        self.sides = [Packing(own, self.device, width) for own, width in zip(counts, widths)]
        both = Packing(counts[0] + counts[1], self.device)
        itself = list(range(len(both.counts)))
        self.within = Edges(both, itself)
        self.between = Edges(both, itself[len(counts[0]) :] + itself[: len(counts[0])])
        self.marginals: Optional[list] = None  # of each of `parts`, once `SuperGlue.transport` was called
        self.order: List[int] = []  # see `sorted`

    @classmethod
    def sorted(cls, batch) -> Tuple[Any, Layout]:
        """A batch and its layout; on a GPU with the largest pairs first, so that `parts` have little padding."""
        order: List[int] = []
        if not pair_by_pair(batch.device):
            order = torch.maximum(batch.counts0, batch.counts1).argsort(descending=True, stable=True).tolist()
            batch = batch.select(order)
        layout = cls(batch)
        layout.order = order
        return batch, layout

    def unsorted(self, values: Tensor) -> Tensor:
        """Values (B,) of the pairs, in the order of the batch that `sorted` was given."""
        return values.index_select(0, self._places_before) if self.order else values

    @functools.cached_property
    def _places_before(self) -> Tensor:
        return self._on_device(np.argsort(self.order))

    @property
    def both(self) -> Packing:
        """All 2B images, images 0 first."""
        return self.within.packing

    @property
    def sizes(self) -> List[Tuple[int, int]]:
        """(m_i, n_i) of each pair."""
        return list(zip(*(side.counts for side in self.sides)))

    @functools.cached_property
    def parts(self) -> List[Part]:
        """All pairs, in parts that are processed together.

        On a CPU a part is one pair, whose matrices then stay in the cache. On a GPU a part is the pairs of one
        `size_class`, so that little of it is padding; a batch that is not sorted by size is one part.
        """
        largest = [max(size) for size in self.sizes]
        bounds = [0]
        if pair_by_pair(self.device):
            bounds += range(1, len(largest))
        elif largest == sorted(largest, reverse=True):
            bounds += [i for i in range(1, len(largest)) if size_class(largest[i]) < size_class(largest[i - 1])]
        starts = [np.cumsum([0, *side.counts]).tolist() for side in self.sides]
        if len(bounds) == 1 and all(side.width == max([*side.counts, 1]) for side in self.sides):
            return [Part(slice(0, len(largest)), (slice(None), slice(None)), (self.sides[0], self.sides[1]))]
        return [
            Part(
                slice(a, b),
                (slice(starts[0][a], starts[0][b]), slice(starts[1][a], starts[1][b])),
                (Packing(self.sides[0].counts[a:b], self.device), Packing(self.sides[1].counts[a:b], self.device)),
            )
            for a, b in zip(bounds, [*bounds[1:], len(largest)])
        ]

    @functools.cached_property
    def _places(self) -> Tensor:
        """(S,) int64: row of each token among those of both padded sides, one after the other."""
        first, second = (np.flatnonzero(np.arange(s.width) < np.asarray(s.counts)[:, None]) for s in self.sides)
        return self._on_device(np.concatenate([first, second + len(self.sides[0].counts) * self.sides[0].width]))

    @functools.cached_property
    def images(self) -> Tensor:
        """(S,) int64: the image of each token, of 2B."""
        return self._on_device(np.repeat(np.arange(len(self.both.counts)), self.both.counts))

    def valid(self, part: Part) -> List[Tensor]:
        """(pairs, m) and (pairs, n) bool: where the padded sides of a part hold a token."""
        both = self.both.valid.view(2, len(self.sizes), self.both.width)
        return [both[i, part.pairs, : side.width] for i, side in enumerate(part.sides)]

    @functools.cached_property
    def partner_starts(self) -> Tensor:
        """(S,) int64: of each token the first packed row of the image that it is matched with."""
        starts = np.cumsum([0, *self.both.counts])[:-1]
        return self._on_device(np.repeat(starts[self.between.partner], self.both.counts))

    @functools.cached_property
    def alone(self) -> Optional[Tensor]:
        """(S,) bool: tokens whose partner image has none; None where every image has some."""
        counts = np.asarray(self.both.counts)
        partners = np.asarray(self.between.counts)
        return self._on_device(np.repeat(partners == 0, counts)) if 0 in partners else None

    def _on_device(self, values: np.ndarray) -> Tensor:
        return to_device_async(torch.from_numpy(values), self.device)

    def pack_sides(self, padded0: Tensor, padded1: Tensor) -> Tensor:
        """(B, N0, ...) and (B, N1, ...), padded as the batch is -> (S, ...), images 0 first."""
        rows = torch.cat([t.reshape(-1, *t.shape[2:]) for t in (padded0, padded1)])
        return rows if all(side.full for side in self.sides) else rows.index_select(0, self._places)

    def halves(self, packed: Tensor) -> Tuple[Tensor, Tensor]:
        """(S, ...) of all images: that of images 0, and that of images 1."""
        first = sum(self.sides[0].counts)
        return packed[:first], packed[first:]


class Assignments(collections.abc.Sequence):
    """Of B pairs the log assignment (m_i + 1, n_i + 1), dustbins last: a sequence of such matrices, without padding.

    They lie in one buffer, which is read as a matrix for each pair or at single entries of all pairs at once.
    """

    def __init__(self, flat: Tensor, sizes: List[Tuple[int, int]], places: List[Tuple[int, int]]) -> None:
        """flat: (E,) entries; sizes: (m_i, n_i); places: of each matrix its offset in `flat` and its rows' stride."""
        self.flat, self.sizes, self._places = flat, sizes, places

    @classmethod
    def of(cls, matrices: List[Tensor]) -> Assignments:
        """From matrices (m_i + 1, n_i + 1)."""
        sizes = [(P.shape[0] - 1, P.shape[1] - 1) for P in matrices]
        places, offset = [], 0
        for m, n in sizes:
            places.append((offset, n + 1))
            offset += (m + 1) * (n + 1)
        flat = torch.cat([P.reshape(-1) for P in matrices]) if matrices else torch.zeros(0)
        return cls(flat, sizes, places)

    @classmethod
    def padded(cls, log_P: Tensor, sizes: List[Tuple[int, int]]) -> Assignments:
        """From (B, M', N'), pair i in its first m_i + 1 rows and n_i + 1 columns."""
        _, rows, columns = log_P.shape
        places = [(i * rows * columns, columns) for i in range(len(sizes))]
        return cls(log_P.reshape(-1), sizes, places)

    @classmethod
    def joined(cls, parts: Sequence[Assignments]) -> Assignments:
        """Of all pairs of `parts`, in order."""
        if len(parts) == 1:
            return parts[0]
        places, offset = [], 0
        for part in parts:
            places += [(offset + at, stride) for at, stride in part._places]
            offset += part.flat.numel()
        return cls(torch.cat([part.flat for part in parts]), [size for part in parts for size in part.sizes], places)

    def clone(self) -> Assignments:
        """A copy in other memory."""
        return Assignments(self.flat.clone(), self.sizes, self._places)

    def replaced(self, pairs: List[int], matrices: List[Tensor]) -> Assignments:
        """The same with other matrices, of the same sizes, for these pairs."""
        flat, places, offset = [self.flat], list(self._places), self.flat.numel()
        for pair, P in zip(pairs, matrices):
            flat.append(P.reshape(-1))
            places[pair] = (offset, P.shape[1])
            offset += P.numel()
        return Assignments(torch.cat(flat), self.sizes, places)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        (m, n), (offset, stride) = self.sizes[index], self._places[index]
        return self.flat[offset : offset + (m + 1) * stride].view(m + 1, stride)[:, : n + 1]

    def at(self, partners0: Tensor, partners1: Tensor) -> Tensor:
        """Entries of each keypoint's row and column: (B, M + N), differentiable.

        Args:
            partners0: (B, M) int64, the column that is read in the row of each keypoint of image 0; below 0 the
                dustbin's. Where padded the dustbins' own entry is read.
            partners1: (B, N); of each keypoint of image 1 the dustbin's row is read, whoever its partner is.
        """
        table = np.concatenate([np.asarray(self.sizes).reshape(-1, 2), np.asarray(self._places).reshape(-1, 2)], 1)
        table = to_device_async(torch.from_numpy(table.astype(np.int64)), self.flat.device)
        m, n, offset, stride = table.unsqueeze(2).unbind(1)  # (B, 1) each
        i, j = (torch.arange(t.shape[1], device=t.device) for t in (partners0, partners1))
        columns = torch.where(partners0 >= 0, partners0, n)
        index = torch.cat([torch.minimum(i, m) * stride + columns, m * stride + torch.minimum(j, n)], 1) + offset
        return self.flat.index_select(0, index.reshape(-1)).view(index.shape)
