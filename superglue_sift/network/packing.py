"""Ragged batches: the layout of the tokens of all images, which image attends to which, and log assignments.

Tokens of all images are packed one after another, (S, D) with S the sum of the counts, so that linear layers and norms
process no padding. Index tensors are computed once per batch from counts on the host: no device-to-host
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
    """Copy from the host to `device`; to a GPU asynchronously, through page-locked memory."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def size_class(keypoints: int) -> int:
    """Round up to one of two sizes per octave: 128, 192, 256, 384, ..."""
    unit = max(64, 1 << max(keypoints - 1, 1).bit_length() >> 2)
    return max(128, -(-keypoints // unit) * unit)


def kernel_length(tokens: int) -> int:
    """Round up to one of four lengths per octave from 64 on: 64, 80, 96, 112, 128, 160, ...; multiples of 16 below."""
    unit = max(16, 1 << max(tokens - 1, 1).bit_length() >> 3)
    return -(-tokens // unit) * unit


def pair_by_pair(device: torch.device) -> bool:
    """Whether each pair is a separate part (`Layout.parts`)."""
    return device.type == "cpu"


class Packing:
    """Sequences of `counts` tokens: conversion between packed (S, ...) and padded (B, width, ...)."""

    def __init__(self, counts: List[int], device: torch.device, width: int = 0) -> None:
        """width: of the padded form; 0: length of the longest sequence, at least 1."""
        self.counts, self.device = counts, device
        self.width = width or max([*counts, 1])

    @property
    def full(self) -> bool:
        """Whether the padded form has no padding."""
        return all(count == self.width for count in self.counts)

    @functools.cached_property
    def starts(self) -> Tensor:
        """(B + 1,) int32: first packed row of each sequence, and S."""
        return self._on_device(np.cumsum([0, *self.counts]).astype(np.int32))

    @functools.cached_property
    def lengths(self) -> Tensor:
        """(B,) int64: the counts."""
        return self._on_device(np.asarray(self.counts, np.int64))

    @functools.cached_property
    def valid(self) -> Tensor:
        """(B, width) bool: tokens of the padded form."""
        return torch.arange(self.width, device=self.device) < self.lengths[:, None]

    @functools.cached_property
    def _places(self) -> Tensor:
        """(S,) int64: row of each token in the padded form with its first two axes flattened."""
        return self._on_device(np.flatnonzero(np.arange(self.width) < np.asarray(self.counts)[:, None]))

    def pad(self, packed: Tensor) -> Tensor:
        """(S, ...) -> (B, width, ...), padded with zeros; a view if there is no padding."""
        shape = (len(self.counts), self.width, *packed.shape[1:])
        if self.full:
            return packed.reshape(shape)
        rows = packed.new_zeros((shape[0] * shape[1], *shape[2:]))
        return rows.index_copy(0, self._places, packed).view(shape)

    def pack(self, padded: Tensor) -> Tensor:
        """(B, width, ...) -> (S, ...); a view if there is no padding."""
        rows = padded.reshape(-1, *padded.shape[2:])
        return rows if self.full else rows.index_select(0, self._places)

    def _on_device(self, values: np.ndarray) -> Tensor:
        return to_device_async(torch.from_numpy(values), self.device)


class Group(NamedTuple):
    """Packed rows of `number` adjacent sequences of equal length, and of their partners, also of equal length."""

    own: slice
    others: slice
    number: int

    @property
    def lengths(self) -> Tuple[int, int]:
        """Tokens of each sequence and of each partner."""
        own, others = ((rows.stop - rows.start) // self.number for rows in (self.own, self.others))
        return own, others


class Edges:
    """The image to which each image attends (SuperGlue, section 3.1: self and cross edges)."""

    def __init__(self, packing: Packing, partner: List[int]) -> None:
        """partner: for each sequence, the index to which it attends: the same cyclic offset for all."""
        self.packing, self.partner = packing, partner
        self.counts = [packing.counts[j] for j in partner]  # of the partners
        self.offset = partner[0] if partner else 0
        if partner != [(i + self.offset) % len(partner) for i in range(len(partner))]:
            raise ValueError("the cyclic offset of all partners must be equal")

    def groups(self, max_weights: int) -> Iterator[Group]:
        """Group all sequences: at most `max_weights` weights or one sequence per group."""
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
        """Packing of the partners, in the order of the sequences that attend to them."""
        return Packing(self.counts, self.packing.device, self.packing.width)

    @property
    def first_token(self) -> int:
        """First packed row of the first sequence's partner; the other partners follow cyclically."""
        return sum(self.packing.counts[: self.offset])

    @functools.cached_property
    def visible(self) -> Tensor:
        """(B, 1, 1, width) bool: visible keys of each sequence; of an empty partner its padding, which is zero."""
        valid = self.partner_packing.valid
        # a softmax over no keys would be nan
        return (valid | ~valid.any(-1, keepdim=True))[:, None, None, :]


class Part(NamedTuple):
    """Consecutive pairs of a batch: their slice, the packed rows of each side, and the packing of each side."""

    pairs: slice
    rows: Tuple[slice, slice]
    sides: Tuple[Packing, Packing]


class Layout:
    """Layout of a batch of B pairs: each side, all 2B images (images 0 first), and edges within and between images.

    fixed: the shapes are those of every batch (`fixed_layout.FixedLayout`).
    """

    fixed = False

    def __init__(self, batch) -> None:
        """batch: a PairBatch, or any object with its counts and records."""
        self.device = batch.records0.device
        counts = [batch.counts0.tolist(), batch.counts1.tolist()]
        widths = batch.records0.shape[1], batch.records1.shape[1]
        self.sides = [Packing(side, self.device, width) for side, width in zip(counts, widths)]
        both = Packing(counts[0] + counts[1], self.device)
        itself = list(range(len(both.counts)))
        self.within = Edges(both, itself)
        self.between = Edges(both, itself[len(counts[0]) :] + itself[: len(counts[0])])
        self.marginals: Optional[list] = None  # of each of `parts`, set by `SuperGlue.transport`
        self.order: List[int] = []  # see `sorted`

    @classmethod
    def sorted(cls, batch) -> Tuple[Any, Layout]:
        """A batch and its layout; on a GPU sorted by decreasing size, so that `parts` have little padding."""
        order: List[int] = []
        if not pair_by_pair(batch.device):
            # torch 1.10 has no argsort(stable=)
            order = torch.maximum(batch.counts0, batch.counts1).sort(descending=True, stable=True)[1].tolist()
            batch = batch.select(order)
        layout = cls(batch)
        layout.order = order
        return batch, layout

    def unsorted(self, values: Tensor) -> Tensor:
        """Restore values (B,) of the pairs to the order before `sorted`."""
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

        On a CPU, a part is one pair, whose matrices stay in the cache. On a GPU, a part is all pairs of one
        `size_class`, which limits padding; a batch that is not sorted by size is one part.
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
        """(S,) int64: row of each token in the concatenated padded sides."""
        first, second = (np.flatnonzero(np.arange(s.width) < np.asarray(s.counts)[:, None]) for s in self.sides)
        return self._on_device(np.concatenate([first, second + len(self.sides[0].counts) * self.sides[0].width]))

    @functools.cached_property
    def images(self) -> Tensor:
        """(S,) int64: image of each token, of 2B."""
        return self._on_device(np.repeat(np.arange(len(self.both.counts)), self.both.counts))

    def valid(self, part: Part) -> List[Tensor]:
        """(pairs, m) and (pairs, n) bool: tokens of the padded sides of a part."""
        both = self.both.valid.view(2, len(self.sizes), self.both.width)
        return [both[i, part.pairs, : side.width] for i, side in enumerate(part.sides)]

    @functools.cached_property
    def partner_starts(self) -> Tensor:
        """(S,) int64: first packed row of the partner image of each token."""
        starts = np.cumsum([0, *self.both.counts])[:-1]
        return self._on_device(np.repeat(starts[self.between.partner], self.both.counts))

    @functools.cached_property
    def alone(self) -> Optional[Tensor]:
        """(S,) bool: tokens whose partner image is empty; None if no image is empty."""
        counts = np.asarray(self.both.counts)
        partners = np.asarray(self.between.counts)
        return self._on_device(np.repeat(partners == 0, counts)) if 0 in partners else None

    def _on_device(self, values: np.ndarray) -> Tensor:
        return to_device_async(torch.from_numpy(values), self.device)

    def pack_sides(self, padded0: Tensor, padded1: Tensor) -> Tensor:
        """(B, N0, ...) and (B, N1, ...), padded as the batch -> (S, ...), images 0 first."""
        rows = torch.cat([t.reshape(-1, *t.shape[2:]) for t in (padded0, padded1)])
        return rows if all(side.full for side in self.sides) else rows.index_select(0, self._places)

    def joined(self, sides: Sequence[Sequence[Tensor]]) -> Tensor:
        """Pack the padded values of each side's `parts`, (pairs, m, ...) and (pairs, n, ...) -> (S, ...)."""
        return torch.cat([part.sides[i].pack(t) for i in (0, 1) for part, t in zip(self.parts, sides[i])])

    def assignments(self, parts: Sequence[Assignments]) -> Assignments:
        """Concatenate those of `parts`."""
        return Assignments.joined(parts)

    def halves(self, packed: Tensor) -> Tuple[Tensor, Tensor]:
        """Split (S, ...) into the tokens of images 0 and of images 1."""
        first = sum(self.sides[0].counts)
        return packed[:first], packed[first:]


class Assignments(collections.abc.Sequence):
    """A sequence of B log assignments (m_i + 1, n_i + 1), dustbins last, without padding.

    They share one buffer, so that single entries of all pairs can be read at once (`at`).
    """

    def __init__(self, flat: Tensor, sizes: List[Tuple[int, int]], places: List[Tuple[int, int]]) -> None:
        """flat: (E,) entries; sizes: (m_i, n_i); places: offset in `flat` and row stride of each matrix."""
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
        """Concatenate the pairs of `parts`."""
        if len(parts) == 1:
            return parts[0]
        places, offset = [], 0
        for part in parts:
            places += [(offset + at, stride) for at, stride in part._places]
            offset += part.flat.numel()
        return cls(torch.cat([part.flat for part in parts]), [size for part in parts for size in part.sizes], places)

    def clone(self) -> Assignments:
        """Copy to new memory."""
        return Assignments(self.flat.clone(), self.sizes, self._places)

    def replaced(self, pairs: List[int], matrices: List[Tensor]) -> Assignments:
        """Replace the matrices of these pairs by others of the same sizes."""
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

    def table(self) -> Tensor:
        """(B, 4) int64: m_i, n_i, offset in `flat` and row stride of each matrix."""
        table = np.concatenate([np.asarray(self.sizes).reshape(-1, 2), np.asarray(self._places).reshape(-1, 2)], 1)
        return to_device_async(torch.from_numpy(table.astype(np.int64)), self.flat.device)

    def at(self, partners0: Tensor, partners1: Tensor) -> Tensor:
        """One entry of each keypoint's row and column: (B, M + N), differentiable.

        Args:
            partners0: (B, M) int64, column to read in the row of each keypoint of image 0; below 0: the dustbin. For
                padding, the entry of both dustbins is read.
            partners1: (B, N); for each keypoint of image 1, the dustbin's row is read, whatever its partner.
        """
        m, n, offset, stride = self.table().unsqueeze(2).unbind(1)  # (B, 1) each
        i, j = (torch.arange(t.shape[1], device=t.device) for t in (partners0, partners1))
        columns = torch.where(partners0 >= 0, partners0, n)
        index = torch.cat([torch.minimum(i, m) * stride + columns, m * stride + torch.minimum(j, n)], 1) + offset
        return self.flat.index_select(0, index.reshape(-1)).view(index.shape)
