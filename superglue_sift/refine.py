"""Refine matches to a fraction of a pixel: align the patch around each match in image 0 to image 1 by least squares.

SIFT's positions scatter by some tenths of a pixel, those of large keypoints by several pixels. After matching, a patch
of 21x21 samples of image 0, warped by the local affine map between the images, is shifted until it fits image 1 best.

- Residual: both patches are normalized to weighted mean 0 and deviation 1, which removes gain and offset.
- Steps: Gauss-Newton on the two numbers of the shift, its Hessian computed once on the patch of image 0 (inverse
  compositional alignment; Baker and Matthews 2004). All matches are aligned together, on any torch device.
- Scale: samples are one pixel of the coarser image apart; the finer image is sampled from the pyramid level of that
  resolution. Large keypoints, and matches that start far off, are aligned on coarser levels first.
- Blur: if one image is blurred more (focus, motion), the other is blurred as much, and aligned again. Patches of
  unequal sharpness have no common minimum: at 2 px of blur, this reduces errors to a fifth.
- Deviation: from the covariance of the shift, sigma^2 (J^T J)^-1 (Gruen 1985). Along a direction without structure, as
  along a straight edge, the match does not move.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Callable, List, NamedTuple, Optional, Tuple, Union

import cv2
import numpy as np
import torch
from torch import Tensor

from superglue_sift import geometry
from superglue_sift.local_maps import local_maps, similarities

SMOOTHING_PX = 0.7  # Gaussian blur of images before they are sampled
MAX_ZOOM = 8.0  # maximum magnification between the images
COARSE_PX = 6.0  # a keypoint of twice this diameter starts one level up
COARSER = 3  # maximum number of coarser levels
CORRELATED = 6.0  # samples of a smoothed image per independent one
FLAT = 0.5  # standard deviation, gray levels, below which a patch has no structure
SETTLED = 0.003  # samples: a match with a shorter step has converged
BLURRED = 0.35  # log ratio of gradient energies above which one image counts as blurred more
SHARPER = 0.85  # ratio of deviations, with and without equal sharpness, below which the former is kept
MAX_BLUR = 8.0  # samples: maximum deviation of the added blur
EDGE = 0.02  # ratio of eigenvalues of the Hessian below which the weaker direction has no structure


@dataclass(frozen=True)
class Settings:
    """How patches are aligned. Lengths are in samples of a patch, one pixel apart without magnification.

    radius: of a patch of (2 radius + 1)^2 samples, weighted by a Gaussian of deviation `weight`. iterations: of
    Gauss-Newton, with steps of at most `longest`. A match is rejected below the minimum `correlation`, if it moves
    farther than `farthest`, or if its deviation exceeds `edge`.
    """

    radius: int = 10
    weight: float = 5.0
    iterations: int = 8
    longest: float = 1.0
    correlation: float = 0.6
    farthest: float = 3.0
    edge: float = 0.5


DEFAULT = Settings()


class Aligned(NamedTuple):
    """K matches after alignment.

    aligned0, aligned1: (K, 2) float32 px. deviations: (K,) float32, standard deviation in px of image 1 along each
    axis; NaN where alignment failed and SIFT's position is kept. correlations: (K,) float32, -1 to 1, of both patches
    at these positions; NaN where a patch leaves its image or is flat.
    """

    aligned0: np.ndarray
    aligned1: np.ndarray
    deviations: np.ndarray
    correlations: np.ndarray


def align(
    gray0: np.ndarray,
    gray1: np.ndarray,
    records0: np.ndarray,
    records1: np.ndarray,
    settings: Settings = DEFAULT,
    device: Union[str, torch.device] = "cpu",
) -> Aligned:
    """Align K matches of two images. Does not raise for any images or matches, however small, few or wrong.

    gray0, gray1: (H, W) uint8. records0, records1: (K,) keypoint records
    with x, y, scale and angle (`sift.KEYPOINT`); entry k of one matches entry k of the other.
    """
    points0, points1 = (np.stack([r["x"], r["y"]], 1).astype(np.float64) for r in (records0, records1))
    if not len(points0):
        return align_points(gray0, gray1, points0, points1, np.zeros((0, 2, 2)), None, settings, device)
    maps = local_maps(points0, points1, similarities(records0, records1))
    return align_points(gray0, gray1, points0, points1, maps, records1["scale"], settings, device)


def align_points(
    gray0: np.ndarray,
    gray1: np.ndarray,
    points0: np.ndarray,
    points1: np.ndarray,
    maps: np.ndarray,
    scales: Optional[np.ndarray] = None,
    settings: Settings = DEFAULT,
    device: Union[str, torch.device] = "cpu",
) -> Aligned:
    """Align points of any kind. points0, points1: (K, 2) px. maps: (K, 2, 2) local affine maps 0 -> 1.

    scales: (K,) diameters in px of image 1, which choose the coarsest level of a match; None: only the finest.
    """
    start0, start1 = (np.asarray(points, np.float32).reshape(-1, 2) for points in (points0, points1))
    if not len(start0):
        return Aligned(start0, start1, np.zeros(0, np.float32), np.zeros(0, np.float32))
    coarsest = np.zeros(len(start0)) if scales is None else np.log2(np.maximum(scales, COARSE_PX) / COARSE_PX)
    levels = torch.as_tensor(np.clip(coarsest, 0, COARSER), device=device).long()

    def begun(image0: np.ndarray, image1: np.ndarray) -> _Work:
        return _Work(image0, image1, start0, start1, np.asarray(maps, np.float64), settings, device)

    with torch.no_grad():
        work = begun(gray0, gray1)
        work.run(levels)
        sharpness = work.sharpness()
        if abs(sharpness) > BLURRED:
            again = begun(*_equally_sharp(gray0, gray1, work, sharpness > 0, begun))
            again.run(levels)
            if torch.isnan(work.deviation).all() or torch.nanmedian(again.deviation / work.deviation) < SHARPER:
                work = again
        shift, deviations, correlations = (x.cpu().numpy() for x in (work.shift, work.deviation, work.correlation))
    return Aligned(start0, start1 + shift, deviations, correlations)


def _equally_sharp(
    gray0: np.ndarray, gray1: np.ndarray, work: _Work, first: bool, begun: Callable[[np.ndarray, np.ndarray], _Work]
) -> List[np.ndarray]:
    """Blur the sharper image until patches of both have the same gradient energy. first: image 0 is the sharper one."""
    pixel = float((work.frame0[:, 0, 0] if first else work.step1).median())  # of a sample, in the image to be blurred

    def blurred(deviation: float) -> List[np.ndarray]:
        soft = cv2.GaussianBlur((gray0 if first else gray1).astype(np.float32), (0, 0), deviation * pixel)
        return [soft, gray1] if first else [gray0, soft]

    least, most = 0.0, MAX_BLUR
    while most - least > 0.15:
        middle = (least + most) / 2
        still = begun(*blurred(middle)).sharpness()
        least, most = (middle, most) if (still > 0) == first else (least, middle)
    return blurred((least + most) / 2)


class _Pyramid:
    """Levels of an image, each half as large as the previous one, stacked vertically in one float32 picture."""

    def __init__(self, gray: np.ndarray, levels: int, device: Union[str, torch.device]) -> None:
        pictures = [cv2.GaussianBlur(gray.astype(np.float32), (0, 0), SMOOTHING_PX)]
        for _ in range(levels):
            pictures.append(cv2.pyrDown(pictures[-1]))
        sizes = np.array([picture.shape[::-1] for picture in pictures])
        tops = np.cumsum(sizes[:, 1]) - sizes[:, 1]
        whole = np.zeros((sizes[:, 1].sum(), sizes[0, 0]), np.float32)
        for top, picture in zip(tops, pictures):
            whole[top : top + picture.shape[0], : picture.shape[1]] = picture

        def tensor(values: np.ndarray) -> Tensor:
            return torch.as_tensor(values, dtype=torch.float32, device=device)

        self.picture = tensor(whole)[None, None]
        # of each level: its last sample in px of the image; a px of the image, and its first sample, in the units of
        # grid_sample, from -1 to 1 over the picture
        scale = 2.0 ** -np.arange(levels + 1)
        unit = 2.0 / np.maximum(np.array(whole.shape[::-1]) - 1, 1)
        self.last = tensor((sizes - 1) / scale[:, None])
        self.unit = tensor(scale[:, None] * unit)
        self.begin = tensor(np.stack([np.zeros(len(tops)), tops], 1) * unit - 1.0)

    def grid(self, points: Tensor, level: Tensor) -> Tensor:
        """(K, n, 2) positions for `read` of points (K, n, 2), px of the image, on level (K,)."""
        return points * self.unit[level][:, None] + self.begin[level][:, None]

    def read(self, grid: Tensor) -> Tensor:
        """(K, n) gray levels at `grid`, interpolated linearly."""
        sampled = torch.nn.functional.grid_sample(self.picture, grid[None], align_corners=True, padding_mode="border")
        return sampled[0, 0]

    def holds(self, points: Tensor, level: Tensor) -> Tensor:
        """(K,) bool: all points (K, n, 2), px of the image, lie inside on level (K,)."""
        return ((points >= 0) & (points <= self.last[level][:, None])).flatten(1).all(1)


class _Work:
    """State of K matches: shift (K, 2) in px of image 1; deviation and correlation (K,), NaN where unknown."""

    def __init__(self, gray0, gray1, points0, points1, maps, settings: Settings, device) -> None:
        self.settings, self.device = settings, device
        usable = np.isfinite(maps).all((1, 2)) & np.isfinite(points0).all(1) & np.isfinite(points1).all(1)
        maps = np.where(usable[:, None, None], maps, np.eye(2))
        scale = np.linalg.norm(maps, ord=2, axis=(1, 2))  # along the direction of most magnification
        usable &= (scale < MAX_ZOOM) & (scale * MAX_ZOOM > 1.0) & (np.abs(np.linalg.det(maps)) > scale**2 / MAX_ZOOM)
        maps = np.where(usable[:, None, None], maps, np.eye(2))
        scale = np.where(usable, scale, 1.0)
        step0 = np.maximum(1.0, 1.0 / scale)  # sampling distance, px of image 0: one px of the coarser image
        octaves = np.log2(np.stack([step0, step0 * scale]))

        def tensor(values: np.ndarray) -> Tensor:
            return torch.as_tensor(values, dtype=torch.float32, device=device)

        self.usable = torch.as_tensor(usable, device=device)
        self.step1, self.octaves = tensor(step0 * scale), tensor(octaves)
        self.frame0 = tensor(step0[:, None, None] * np.eye(2))  # one sample in px of image 0
        self.frame1 = tensor(step0[:, None, None] * maps)
        self.points0, self.points1 = tensor(points0), tensor(points1)
        levels = COARSER + int(np.round(octaves.max()))
        self.pyramid0, self.pyramid1 = (_Pyramid(gray, levels, device) for gray in (gray0, gray1))
        self.shift = torch.zeros_like(self.points1)
        self.deviation = torch.full_like(self.step1, float("nan"))
        self.correlation = torch.full_like(self.step1, float("nan"))

    def run(self, coarsest: Tensor) -> None:
        """Align each match from its coarsest level (K,) to the finest; retry failures from one level up."""
        for level in range(COARSER, -1, -1):
            self._align(level, coarsest >= level)
        again = torch.isnan(self.deviation) & (coarsest == 0)
        self._align(1, again)
        self._align(0, again & ~torch.isnan(self.deviation))

    def sharpness(self) -> float:
        """Median log ratio of the gradient energies of both patches, per variance; above 0: image 0 is sharper.

        Uses SIFT's positions, which are accurate enough. 0 without patches inside both images.
        """
        level0, level1 = self.octaves.round().long()
        offsets, weight = _patch(self.settings, self.device)
        at0 = self.points0[:, None] + offsets @ self.frame0.transpose(1, 2)
        at1 = self.points1[:, None] + offsets @ self.frame1.transpose(1, 2)
        inside = self.pyramid0.holds(_corners(at0), level0) & self.pyramid1.holds(_corners(at1), level1) & self.usable
        energy0 = _energy(self.pyramid0.read(self.pyramid0.grid(at0, level0)), weight)
        energy1 = _energy(self.pyramid1.read(self.pyramid1.grid(at1, level1)), weight)
        ratios = torch.log(energy0 / energy1)[inside & (energy0 > 0) & (energy1 > 0)]
        return float(ratios.median()) if len(ratios) else 0.0

    def _align(self, level: int, chosen: Tensor) -> None:
        """Align the chosen matches (K,) on one level; keep the state of those that fail."""
        rows = torch.nonzero(chosen & self.usable).flatten()
        if not len(rows):
            return
        limits, new = self.settings, self._descend(level, rows)
        good = (new.correlation > limits.correlation) & (new.moved < limits.farthest) & (new.deviation < limits.edge)
        deviation = new.deviation * self.step1[rows] * float(2**level)
        unset = torch.isnan(self.deviation[rows])
        self.correlation[rows] = torch.where(good | unset, new.correlation, self.correlation[rows])
        self.deviation[rows] = torch.where(good, deviation, self.deviation[rows])
        self.shift[rows] = torch.where(good[:, None], new.shift, self.shift[rows])

    def _descend(self, level: int, rows: Tensor) -> _Descent:
        level0, level1 = (self.octaves[:, rows] + level).round().long()
        frame0, frame1 = self.frame0[rows] * 2.0**level, self.frame1[rows] * 2.0**level
        offsets, weight = _patch(self.settings, self.device)
        at0 = self.points0[rows][:, None] + offsets @ frame0.transpose(1, 2)
        inside = self.pyramid0.holds(_corners(at0), level0)
        template = _Template(self.pyramid0.read(self.pyramid0.grid(at0, level0)), weight)
        start = self.points1[rows] + self.shift[rows]
        at1 = start[:, None] + offsets[template.inner] @ frame1.transpose(1, 2)
        grid1, unit1 = self.pyramid1.grid(at1, level1), self.pyramid1.unit[level1]
        moved = torch.zeros_like(start)
        left = torch.arange(len(rows), device=self.device)  # matches that have not converged
        part, frame, grid, unit = template, frame1, grid1, unit1
        for _ in range(self.settings.iterations):
            shift = (frame @ moved[left][..., None])[..., 0]
            step = part.step(self.pyramid1.read(grid + (shift * unit)[:, None]))[0]
            length = step.norm(dim=1, keepdim=True)
            moved[left] -= step * (self.settings.longest / length.clamp(min=self.settings.longest))
            moving = length[:, 0] > SETTLED
            if 2 * int(moving.sum()) < len(left):  # dropping fewer takes longer than moving them
                left, part = left[moving], part.only(moving)
                frame, grid, unit = frame[moving], grid[moving], unit[moving]
            if not len(left):
                break
        shift = (frame1 @ moved[..., None])[..., 0]
        _, correlation = template.step(self.pyramid1.read(grid1 + (shift * unit1)[:, None]))
        inside &= self.pyramid1.holds(_corners(at1) + shift[:, None], level1)
        correlation = torch.where(inside, correlation, torch.full_like(correlation, float("nan")))
        return _Descent(self.shift[rows] + shift, moved.norm(dim=1), template.deviation(correlation), correlation)


class _Descent(NamedTuple):
    """Alignment of n matches on one level.

    shift: (n, 2) px of image 1, from SIFT's position. moved: (n,) samples of this level. deviation: (n,) of the same
    unit. correlation: (n,), NaN outside the image or without structure.
    """

    shift: Tensor
    moved: Tensor
    deviation: Tensor
    correlation: Tensor


class _Template:
    """Patches of image 0, prepared for Gauss-Newton.

    Samples are normalized to weighted mean 0 and deviation 1. Gain and offset are projected out of the gradient, so
    that the shift is solved for jointly with both.
    """

    def __init__(self, samples: Tensor, weight: Tensor) -> None:
        """samples: (n, s s) with a margin of one sample; weight: ((s - 2)^2,) of the inner samples, with sum 1."""
        side = round(samples.shape[1] ** 0.5)
        numbers = torch.arange(side * side, device=samples.device).view(side, side)
        self.inner, self.weight = numbers[1:-1, 1:-1].reshape(-1), weight
        inner, x, y = _inner_and_gradient(samples)
        self.mean = samples.mean(1, keepdim=True)
        centred = inner - self.mean
        centred = centred - (centred @ weight)[:, None]
        self.spread = ((centred**2) @ weight).sqrt()
        template = centred / self.spread.clamp(min=FLAT)[:, None]
        gradient = torch.stack([x, y], 1) / self.spread.clamp(min=FLAT)[:, None, None]
        gradient = gradient - (gradient @ weight)[..., None]
        gradient = gradient - (gradient @ (template * weight)[..., None]) * template[:, None]
        weighted = gradient * weight
        self.inverse, self.unknown = _inverse(weighted @ gradient.transpose(1, 2))
        self.scatter = self.inverse @ (weighted @ weighted.transpose(1, 2)) @ self.inverse
        plain = weight.expand_as(template)[:, None]
        self.rows = torch.cat([weighted, (template * weight)[:, None], plain], 1)  # (n, 4, s s)

    def only(self, chosen: Tensor) -> _Template:
        """The chosen patches (n,) bool, for `step` only."""
        part = copy.copy(self)
        part.mean, part.spread, part.inverse, part.rows = (
            values[chosen] for values in (self.mean, self.spread, self.inverse, self.rows)
        )
        return part

    def step(self, samples: Tensor) -> Tuple[Tensor, Tensor]:
        """For samples of image 1 (n, s s): the shift (n, 2) to undo, and the correlation (n,) with the template."""
        samples = samples - self.mean
        sums = (self.rows @ samples[..., None])[..., 0]
        spread = ((samples**2) @ self.weight - sums[:, 3] ** 2).clamp(min=0).sqrt()
        flat = (spread < FLAT) | (self.spread < FLAT)
        spread = spread.clamp(min=FLAT)
        correlation = torch.where(flat, torch.full_like(spread, float("nan")), sums[:, 2] / spread)
        return (self.inverse @ (sums[:, :2] / spread[:, None])[..., None])[..., 0], correlation

    def deviation(self, correlation: Tensor) -> Tensor:
        """(n,) standard deviation of the shift along each axis, in samples, from the residual."""
        residual = (2.0 - 2.0 * correlation).clamp(min=0)  # weighted mean square of the difference
        trace = self.scatter.diagonal(dim1=1, dim2=2).sum(1)
        # along an edge, only SIFT's position is known
        return ((CORRELATED * residual * trace + geometry.SCATTER_PX**2 * self.unknown) / 2).sqrt()


def _patch(settings: Settings, device) -> Tuple[Tensor, Tensor]:
    """Offsets ((2 radius + 3)^2, 2) of samples with a margin of one; weights of the inner samples, with sum 1."""
    line = torch.arange(-settings.radius - 1, settings.radius + 2, device=device, dtype=torch.float32)
    columns = line[None].expand(len(line), len(line))
    inner = torch.exp(-0.5 * (line[1:-1] / settings.weight) ** 2)
    weight = (inner[:, None] * inner).reshape(-1)
    return torch.stack([columns.reshape(-1), columns.t().reshape(-1)], 1), weight / weight.sum()


def _inner_and_gradient(samples: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """Inner samples (n, (s - 2)^2) of patches (n, s s) with a margin of one, and their gradients in x and y."""
    side = round(samples.shape[1] ** 0.5)
    square = samples.view(-1, side, side)
    x = (square[:, 1:-1, 2:] - square[:, 1:-1, :-2]).flatten(1) / 2
    y = (square[:, 2:, 1:-1] - square[:, :-2, 1:-1]).flatten(1) / 2
    return square[:, 1:-1, 1:-1].flatten(1), x, y


def _energy(samples: Tensor, weight: Tensor) -> Tensor:
    """(n,) gradient energy over variance of patches (n, s s) with a margin of one sample; 0 for flat patches."""
    inner, x, y = _inner_and_gradient(samples)
    variance = (inner**2) @ weight - (inner @ weight) ** 2
    flat = variance < FLAT**2
    return torch.where(flat, torch.zeros_like(variance), ((x**2 + y**2) @ weight) / variance.clamp(min=FLAT**2))


def _corners(points: Tensor) -> Tensor:
    """(n, 4, 2) corners of the points (n, s s, 2) of a patch."""
    side = round(points.shape[1] ** 0.5)
    return points[:, [0, side - 1, side * (side - 1), side * side - 1]]


def _inverse(hessian: Tensor) -> Tuple[Tensor, Tensor]:
    """(n, 2, 2) inverse except for directions without structure, and the number of these (n,)."""
    values, vectors = torch.linalg.eigh(hessian)
    kept = values > (EDGE * values[:, 1:]).clamp(min=1e-6)
    inverse = torch.where(kept, 1.0 / values.clamp(min=1e-6), torch.zeros_like(values))
    return (vectors * inverse[:, None]) @ vectors.transpose(1, 2), (~kept).sum(1)
