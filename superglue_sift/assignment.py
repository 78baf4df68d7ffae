"""Log assignments of a batch: one buffer, read as a matrix for each pair or at single entries of all pairs at once."""

from __future__ import annotations

import collections.abc
import functools
from typing import List, NamedTuple, Tuple

import torch
from torch import Tensor

from superglue_sift.packing import to_device_async


class Dustbins(NamedTuple):
    """(B, 1) int64 each: row and column of a pair's dustbins, which are its numbers of keypoints."""

    row: Tensor
    column: Tensor


class Assignments(collections.abc.Sequence):
    """Of B pairs the log assignment (m_i + 1, n_i + 1), dustbins last: a sequence of such matrices, without padding."""

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

    @functools.cached_property
    def dustbins(self) -> Dustbins:
        """Where the dustbins lie, on the device."""
        return Dustbins(*self._on_device(self.sizes).unbind(1))

    def entries(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Entries at (B, K) int64 rows and columns, each inside its pair's matrix: (B, K), differentiable."""
        offset, stride = self._on_device(self._places).unbind(1)
        index = offset + rows * stride + columns
        return self.flat.index_select(0, index.reshape(-1)).view(index.shape)

    def _on_device(self, values: List[Tuple[int, int]]) -> Tensor:
        """(B, 2, 1) int64."""
        table = torch.tensor(values, dtype=torch.int64).reshape(-1, 2, 1)
        return to_device_async(table, self.flat.device)
