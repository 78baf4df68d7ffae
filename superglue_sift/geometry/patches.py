"""Pyramids of an image, square patches of it, and the shift that aligns one with another
(`refine`).
"""

from __future__ import annotations

import copy
from typing import Tuple, Union

import cv2
import numpy as np
import torch
from torch import Tensor

from superglue_sift.geometry import two_view
from superglue_sift.torch_compat import sqrt

RADIUS = 10  # of a patch of SIDE^2 samples,
SIDE = 2 * RADIUS + 1
WIDTH = 5.0  # weighted by a Gaussian of this deviation
SMOOTHING_PX = 0.7  # Gaussian blur of images before they are sampled
CORRELATED = 6.0  # samples of a smoothed image per independent one
FLAT = 0.5  # standard deviation, gray levels, below which a patch has no structure
EDGE = 0.02  # ratio of eigenvalues of the Hessian below which the weaker direction has no structure

Device = Union[str, torch.device]


class Pyramid:
    """Levels of an image, each half as large as the one before, one below another in a picture."""

    def __init__(self, gray: np.ndarray, levels: int, device: Device) -> None:
        pictures = [cv2.GaussianBlur(gray.astype(np.float32), (0, 0), SMOOTHING_PX)]
        for _ in range(levels):
            pictures.append(cv2.pyrDown(pictures[-1]))
        sizes = np.array([picture.shape[::-1] for picture in pictures])
        tops = np.cumsum(sizes[:, 1]) - sizes[:, 1]
        whole = np.zeros((sizes[:, 1].sum(), sizes[0, 0]), np.float32)
        for top, picture in zip(tops, pictures):
            whole[top : top + picture.shape[0], : picture.shape[1]] = picture
        self.picture = to_tensor(whole, device)[None, None]
        # Of each level: its last sample in px of the image; a px of the image, and its first
        # sample, in the units of grid_sample, from -1 to 1 over the picture
        scale = 2.0 ** -np.arange(levels + 1)
        unit = 2.0 / np.maximum(np.array(whole.shape[::-1]) - 1, 1)
        self.last = to_tensor((sizes - 1) / scale[:, None], device)
        self.unit = to_tensor(scale[:, None] * unit, device)
        self.begin = to_tensor(np.stack([np.zeros(len(tops)), tops], 1) * unit - 1.0, device)

    def grid(self, points: Tensor, level: Tensor) -> Tensor:
        """(K, n, 2) positions for `read` of points (K, n, 2), px of the image, on level (K,)."""
        return points * self.unit[level][:, None] + self.begin[level][:, None]

    def read(self, grid: Tensor) -> Tensor:
        """(K, n) gray levels at `grid`, interpolated linearly."""
        sampled = torch.nn.functional.grid_sample(
            self.picture, grid[None], align_corners=True, padding_mode="border"
        )
        return sampled[0, 0]

    def holds(self, points: Tensor, level: Tensor) -> Tensor:
        """(K,) bool: patches of points (K, n, 2), px of the image, lie inside on level (K,)."""
        side = round(points.shape[1] ** 0.5)
        points = points[:, [0, side - 1, side * (side - 1), side * side - 1]]  # the corners
        return ((points >= 0) & (points <= self.last[level][:, None])).flatten(1).all(1)


def to_tensor(values: np.ndarray, device: Device) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float32, device=device)


class Template:
    """Patches of image 0, prepared for Gauss-Newton.

    Samples are normalized to weighted mean 0 and deviation 1. Gain and offset are projected out of
    the gradient, so that the shift is solved for jointly with both.
    """

    def __init__(self, samples: Tensor, weight: Tensor) -> None:
        """samples: (n, (SIDE + 2)^2), weight: (SIDE^2,) as from `sample_patch`."""
        self.weight = weight
        inner, x, y = inner_and_gradient(samples)
        self.mean = samples.mean(1, keepdim=True)
        centred = inner - self.mean
        centred = centred - (centred @ weight)[:, None]
        self.spread = sqrt((centred**2) @ weight)
        template = centred / self.spread.clamp(min=FLAT)[:, None]
        gradient = torch.stack([x, y], 1) / self.spread.clamp(min=FLAT)[:, None, None]
        gradient = gradient - (gradient @ weight)[..., None]
        gradient = gradient - (gradient @ (template * weight)[..., None]) * template[:, None]
        weighted = gradient * weight
        self.inverse, self.unknown = _inverse(weighted @ gradient.transpose(1, 2))
        plain = weight.expand_as(template)[:, None]
        self.rows = torch.cat([weighted, (template * weight)[:, None], plain], 1)  # (n, 4, s s)

    def __getitem__(self, chosen: Tensor) -> Template:
        """The chosen patches (n,) bool, for `step` only."""
        part = copy.copy(self)
        for name in ("mean", "spread", "inverse", "rows"):
            setattr(part, name, getattr(self, name)[chosen])
        return part

    def step(self, samples: Tensor) -> Tuple[Tensor, Tensor]:
        """Compare with samples of image 1 (n, s s).

        Returns the shift (n, 2) to undo, and the correlation (n,) with the template.
        """
        samples = samples - self.mean
        sums = (self.rows @ samples[..., None])[..., 0]
        spread = sqrt(((samples**2) @ self.weight - sums[:, 3] ** 2).clamp(min=0))
        flat = (spread < FLAT) | (self.spread < FLAT)
        spread = spread.clamp(min=FLAT)
        correlation = (sums[:, 2] / spread).masked_fill(flat, float("nan"))
        return (self.inverse @ (sums[:, :2] / spread[:, None])[..., None])[..., 0], correlation

    def deviation(self, correlation: Tensor, blur: float = 0.0) -> Tensor:
        """(n,) standard deviation of the shift along each axis, in samples, from the residual.

        blur: added to one image, in samples. The residuals of two samples at a distance d correlate
        by exp(-d^2 / (4 s^2)), s the deviation of all smoothing, and the covariance sums over all
        pairs of samples. What they have in common in the whole patch is not in the residual, as its
        mean was made 0. Without added blur, the covariance is CORRELATED times that of independent
        samples.
        """
        residual = (2.0 - 2.0 * correlation).clamp(min=0)  # weighted mean square of the difference
        weighted = self.rows[:, :2]
        smoothed = weighted
        factor = CORRELATED
        if blur:
            line = torch.arange(SIDE, device=weighted.device, dtype=weighted.dtype)
            alike = torch.exp(-((line[:, None] - line) ** 2) / (4 * (SMOOTHING_PX**2 + blur**2)))
            smoothed = (alike @ weighted.view(-1, 2, SIDE, SIDE) @ alike).flatten(2)
            weight = self.weight.view(SIDE, SIDE)
            factor = 1.0 / (1.0 - float((weight * (alike @ weight @ alike)).sum()))
        scatter = self.inverse @ (weighted @ smoothed.transpose(1, 2)) @ self.inverse
        trace = scatter.diagonal(dim1=1, dim2=2).sum(1)
        # Along an edge, only SIFT's position is known
        return sqrt((factor * residual * trace + two_view.SCATTER_PX**2 * self.unknown) / 2)


def sample_patch(device: Device) -> Tuple[Tensor, Tensor, Tensor]:
    """Offsets ((SIDE + 2)^2, 2) of samples with a margin of one, (SIDE^2, 2) without it, and the
    weights (SIDE^2,) of the latter, with sum 1.
    """
    line = torch.arange(-RADIUS - 1.0, RADIUS + 2.0, device=device)
    x = line.expand(len(line), -1)
    square = torch.stack([x, x.t()], 2)
    inner = torch.exp(-0.5 * (line[1:-1] / WIDTH) ** 2)
    weight = (inner[:, None] * inner).flatten()
    return square.flatten(0, 1), square[1:-1, 1:-1].flatten(0, 1), weight / weight.sum()


def inner_and_gradient(samples: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """Inner samples (n, SIDE^2) of patches (n, (SIDE + 2)^2), and their gradients in x and y."""
    square = samples.view(-1, SIDE + 2, SIDE + 2)
    x = (square[:, 1:-1, 2:] - square[:, 1:-1, :-2]).flatten(1) / 2
    y = (square[:, 2:, 1:-1] - square[:, :-2, 1:-1]).flatten(1) / 2
    return square[:, 1:-1, 1:-1].flatten(1), x, y


def energy(samples: Tensor, weight: Tensor) -> Tensor:
    """(n,) gradient energy over variance of patches (n, (SIDE + 2)^2); 0 for flat patches."""
    inner, x, y = inner_and_gradient(samples)
    variance = (inner**2) @ weight - (inner @ weight) ** 2
    energies = ((x**2 + y**2) @ weight) / variance.clamp(min=FLAT**2)
    return energies.masked_fill(variance < FLAT**2, 0.0)


def _inverse(hessian: Tensor) -> Tuple[Tensor, Tensor]:
    """(n, 2, 2) inverse except for directions without structure, and the number of these (n,)."""
    values, vectors = torch.linalg.eigh(hessian)
    kept = values > (EDGE * values[:, 1:]).clamp(min=1e-6)
    inverse = (1.0 / values.clamp(min=1e-6)).masked_fill(~kept, 0.0)
    return (vectors * inverse[:, None]) @ vectors.transpose(1, 2), (~kept).sum(1)
