"""The marginals of optimal transport between padded sets of keypoints (SuperGlue, equation 8), made on the host."""

from __future__ import annotations

from typing import Dict, NamedTuple, Sequence

import numpy as np
import torch
from torch import Tensor

from superglue_sift.network.packing import to_device_async


class OnDevice(NamedTuple):
    """Of B problems padded to (M', N').

    mu (B, M'), nu (B, N'): masses, 1 a keypoint and the other image's number for the dustbin, over their sum; 0 beyond.
    log_mass (B, 1, 1): log of that sum. core (B, M', N') bool: where two keypoints meet.
    """

    mu: Tensor
    nu: Tensor
    log_mass: Tensor
    core: Tensor


class Marginals:
    """Of pairs of m_i and n_i keypoints: two copies to the device, and what they are for a size is kept."""

    def __init__(self, counts0: Sequence[int], counts1: Sequence[int], device: torch.device) -> None:
        self._counts = np.array([[int(m), int(n)] for m, n in zip(counts0, counts1)], np.int64).reshape(-1, 2)
        self._device = device
        self._kept: Dict[tuple, OnDevice] = {}

    def padded(self, pairs: int, rows: int, columns: int, dtype: torch.dtype) -> OnDevice:
        """For (pairs, rows, columns): further pairs have no keypoints; a pair without any has mass in its corner."""
        key = (pairs, rows, columns, dtype)
        if key not in self._kept:
            self._kept[key] = self._made(*key)
        return self._kept[key]

    def _made(self, pairs: int, rows: int, columns: int, dtype: torch.dtype) -> OnDevice:
        counts = np.zeros((pairs, 2), np.int64)
        counts[: len(self._counts)] = self._counts
        number = np.float64 if dtype == torch.float64 else np.float32
        total = np.maximum(counts.sum(1, keepdims=True), 1).astype(number)
        dustbins = np.where(counts.sum(1, keepdims=True) > 0, counts[:, ::-1], 1)
        inside, masses = [], []
        for side, size in enumerate((rows, columns)):
            place, own = np.arange(size), counts[:, side : side + 1]
            inside.append(place < own)
            masses.append(((place < own) + (place == own) * dustbins[:, side : side + 1]).astype(number) / total)
        table = self._moved(np.concatenate([*masses, np.log(total)], 1))
        mu, nu, log_mass = table.split([rows, columns, 1], 1)
        shown = self._moved(np.concatenate(inside, 1)).split([rows, columns], 1)
        return OnDevice(mu, nu, log_mass.unsqueeze(2), shown[0].unsqueeze(2) & shown[1].unsqueeze(1))

    def _moved(self, values: np.ndarray) -> Tensor:
        return to_device_async(torch.from_numpy(values), self._device)
