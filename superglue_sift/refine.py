"""Refine matches to a fraction of a pixel: align the patch around each match in image 0 to image 1
by least squares.

SIFT's positions scatter by some tenths of a pixel, those of large keypoints by several pixels.
After matching, a patch of 21x21 samples of image 0, warped by the local affine map between the
images, is shifted until it fits image 1 best.

- Residual: both patches are normalized to weighted mean 0 and deviation 1, which removes gain and
  offset.
- Steps: Gauss-Newton on the two numbers of the shift, its Hessian computed once on the patch of
  image 0 (inverse compositional alignment; Baker and Matthews 2004). All matches are aligned
  together, on any torch device.
- Scale: samples are one pixel of the coarser image apart; the finer image is sampled from the
  pyramid level of that resolution. Large keypoints, and matches that start far off, are aligned on
  coarser levels first.
- Blur: if one image is blurred more (focus, motion), the other is blurred as much, and aligned
  again. Patches of unequal sharpness have no common minimum: at 2 px of blur, this reduces errors
  to a fifth.
- Deviation: from the covariance of the shift, sigma^2 (J^T J)^-1 (Gruen 1985). Along a direction
  without structure, as along a straight edge, the match does not move. Added blur makes residuals
  of neighbours alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, List, NamedTuple, Optional, Tuple, Union

import cv2
import numpy as np
import torch
from torch import Tensor

from superglue_sift import patches
from superglue_sift.local_maps import local_maps, similarities

MAX_ZOOM = 8.0  # maximum magnification between the images
COARSE_PX = 6.0  # a keypoint of twice this diameter starts one level up
COARSER = 3  # maximum number of coarser levels
SETTLED = 0.003  # samples: a match with a shorter step has converged
BLURRED = 0.35  # log ratio of gradient energies above which one image counts as blurred more
# Ratio of deviations, with and without equal sharpness, below which the former is kept
SHARPER = 0.85
MAX_BLUR = 8.0  # samples: maximum deviation of the added blur


@dataclass(frozen=True)
class Settings:
    """How patches are aligned. Lengths are in samples of a patch, one pixel apart without
    magnification.

    radius: of a patch of (2 radius + 1)^2 samples, weighted by a Gaussian of deviation `weight`.
    iterations: of Gauss-Newton, with steps of at most `longest`. A match is rejected below the
    minimum `correlation`, if it moves farther than `farthest`, or if its deviation exceeds `edge`.
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

    aligned0, aligned1: (K, 2) float32 px. deviations: (K,) float32, standard deviation in px of
    image 1 along each axis; NaN where alignment failed and SIFT's position is kept. correlations:
    (K,) float32, -1 to 1, of both patches at these positions; NaN where a patch leaves its image or
    is flat.
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
    """Align K matches of two images. Does not raise for any images or matches, however small, few
    or wrong.

    gray0, gray1: (H, W) uint8. records0, records1: (K,) keypoint records
    with x, y, scale and angle (`sift.KEYPOINT`); entry k of one matches entry k of the other.
    """
    points0, points1 = (
        np.stack([r["x"], r["y"]], 1).astype(np.float64) for r in (records0, records1)
    )
    if not len(points0):
        return align_points(
            gray0, gray1, points0, points1, np.zeros((0, 2, 2)), None, settings, device
        )
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
    """Align points of any kind. points0, points1: (K, 2) px. maps: (K, 2, 2) local affine maps 0 ->
    1.

    scales: (K,) diameters in px of image 1, which choose the coarsest level of a match; None: only
    the finest.
    """
    start0, start1 = (
        np.asarray(points, np.float32).reshape(-1, 2) for points in (points0, points1)
    )
    if not len(start0):
        return Aligned(start0, start1, np.zeros(0, np.float32), np.zeros(0, np.float32))
    coarsest = (
        np.zeros(len(start0))
        if scales is None
        else np.log2(np.maximum(scales, COARSE_PX) / COARSE_PX)
    )
    levels = torch.as_tensor(np.clip(coarsest, 0, COARSER), device=device).long()

    def begun(image0: np.ndarray, image1: np.ndarray) -> _Work:
        return _Work(image0, image1, start0, start1, np.asarray(maps, np.float64), settings, device)

    with torch.no_grad():
        work = begun(gray0, gray1)
        work.run(levels)
        sharpness = work.sharpness()
        if abs(sharpness) > BLURRED:
            images, blur = _equally_sharp(gray0, gray1, work, sharpness > 0, begun)
            again = begun(*images)
            again.run(levels, blur)
            if (
                torch.isnan(work.deviation).all()
                or torch.nanmedian(again.plain / work.deviation) < SHARPER
            ):
                work = again
        shift, deviations, correlations = (
            x.cpu().numpy() for x in (work.shift, work.deviation, work.correlation)
        )
    return Aligned(start0, start1 + shift, deviations, correlations)


def _equally_sharp(
    gray0: np.ndarray,
    gray1: np.ndarray,
    work: _Work,
    first: bool,
    begun: Callable[[np.ndarray, np.ndarray], _Work],
) -> Tuple[List[np.ndarray], float]:
    """Blur the sharper image until patches of both have the same gradient energy. first: image 0 is
    the sharper one.

    Returns both images, and the deviation of the added blur in samples.
    """
    # Of a sample, in the image to be blurred
    pixel = float((work.frame0[:, 0, 0] if first else work.step1).median())

    def blurred(deviation: float) -> List[np.ndarray]:
        soft = cv2.GaussianBlur(
            (gray0 if first else gray1).astype(np.float32), (0, 0), deviation * pixel
        )
        return [soft, gray1] if first else [gray0, soft]

    least = 0.0
    most = MAX_BLUR
    while most - least > 0.15:
        middle = (least + most) / 2
        still = begun(*blurred(middle)).sharpness()
        least, most = (middle, most) if (still > 0) == first else (least, middle)
    middle = (least + most) / 2
    return blurred(middle), middle


class _Pyramid:
    """Levels of an image, each half as large as the previous one, stacked vertically in one float32
    picture.
    """

    def __init__(self, gray: np.ndarray, levels: int, device: Union[str, torch.device]) -> None:
        pictures = [cv2.GaussianBlur(gray.astype(np.float32), (0, 0), patches.SMOOTHING_PX)]
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
        # of each level: its last sample in px of the image; a px of the image, and its first
        # sample, in the units of grid_sample, from -1 to 1 over the picture
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
        sampled = torch.nn.functional.grid_sample(
            self.picture, grid[None], align_corners=True, padding_mode="border"
        )
        return sampled[0, 0]

    def holds(self, points: Tensor, level: Tensor) -> Tensor:
        """(K,) bool: all points (K, n, 2), px of the image, lie inside on level (K,)."""
        return ((points >= 0) & (points <= self.last[level][:, None])).flatten(1).all(1)


class _Work:
    """State of K matches: shift (K, 2) in px of image 1; deviation and correlation (K,), NaN where
    unknown.

    plain: the deviation without regard to added blur.
    """

    def __init__(self, gray0, gray1, points0, points1, maps, settings: Settings, device) -> None:
        self.settings = settings
        self.device = device
        usable = (
            np.isfinite(maps).all((1, 2))
            & np.isfinite(points0).all(1)
            & np.isfinite(points1).all(1)
        )
        maps = np.where(usable[:, None, None], maps, np.eye(2))
        # Along the direction of most magnification
        scale = np.linalg.norm(maps, ord=2, axis=(1, 2))
        usable &= (
            (scale < MAX_ZOOM)
            & (scale * MAX_ZOOM > 1.0)
            & (np.abs(np.linalg.det(maps)) > scale**2 / MAX_ZOOM)
        )
        maps = np.where(usable[:, None, None], maps, np.eye(2))
        scale = np.where(usable, scale, 1.0)
        # Sampling distance, px of image 0: one px of the coarser image
        step0 = np.maximum(1.0, 1.0 / scale)
        octaves = np.log2(np.stack([step0, step0 * scale]))

        def tensor(values: np.ndarray) -> Tensor:
            return torch.as_tensor(values, dtype=torch.float32, device=device)

        self.usable = torch.as_tensor(usable, device=device)
        self.step1 = tensor(step0 * scale)
        self.octaves = tensor(octaves)
        self.frame0 = tensor(step0[:, None, None] * np.eye(2))  # one sample in px of image 0
        self.frame1 = tensor(step0[:, None, None] * maps)
        self.points0 = tensor(points0)
        self.points1 = tensor(points1)
        levels = COARSER + int(np.round(octaves.max()))
        self.pyramid0, self.pyramid1 = (_Pyramid(gray, levels, device) for gray in (gray0, gray1))
        self.shift = torch.zeros_like(self.points1)
        self.deviation = torch.full_like(self.step1, float("nan"))
        self.plain = torch.full_like(self.step1, float("nan"))
        self.correlation = torch.full_like(self.step1, float("nan"))
        self.blur = 0.0

    def run(self, coarsest: Tensor, blur: float = 0.0) -> None:
        """Align each match from its coarsest level (K,) to the finest; retry failures from one
        level up.

        blur: deviation of the blur that was added to one image, in samples of the finest level.
        """
        self.blur = blur
        for level in range(COARSER, -1, -1):
            self._align(level, coarsest >= level)
        again = torch.isnan(self.deviation) & (coarsest == 0)
        self._align(1, again)
        self._align(0, again & ~torch.isnan(self.deviation))

    def sharpness(self) -> float:
        """Median log ratio of the gradient energies of both patches, per variance; above 0: image 0
        is sharper.

        Uses SIFT's positions, which are accurate enough. 0 without patches inside both images.
        """
        level0, level1 = self.octaves.round().long()
        offsets, weight = patches.patch(self.settings, self.device)
        at0 = self.points0[:, None] + offsets @ self.frame0.transpose(1, 2)
        at1 = self.points1[:, None] + offsets @ self.frame1.transpose(1, 2)
        inside = (
            self.pyramid0.holds(patches.corners(at0), level0)
            & self.pyramid1.holds(patches.corners(at1), level1)
            & self.usable
        )
        energy0 = patches.energy(self.pyramid0.read(self.pyramid0.grid(at0, level0)), weight)
        energy1 = patches.energy(self.pyramid1.read(self.pyramid1.grid(at1, level1)), weight)
        ratios = torch.log(energy0 / energy1)[inside & (energy0 > 0) & (energy1 > 0)]
        return float(ratios.median()) if len(ratios) else 0.0

    def _align(self, level: int, chosen: Tensor) -> None:
        """Align the chosen matches (K,) on one level; keep the state of those that fail."""
        rows = torch.nonzero(chosen & self.usable).flatten()
        if not len(rows):
            return
        limits = self.settings
        new = self._descend(level, rows)
        good = (
            (new.correlation > limits.correlation)
            & (new.moved < limits.farthest)
            & (new.deviation < limits.edge)
        )
        sample = self.step1[rows] * float(2**level)
        unset = torch.isnan(self.deviation[rows])
        self.correlation[rows] = torch.where(good | unset, new.correlation, self.correlation[rows])
        self.plain[rows] = torch.where(good, new.deviation * sample, self.plain[rows])
        self.deviation[rows] = torch.where(good, new.blurred * sample, self.deviation[rows])
        self.shift[rows] = torch.where(good[:, None], new.shift, self.shift[rows])

    def _descend(self, level: int, rows: Tensor) -> _Descent:
        level0, level1 = (self.octaves[:, rows] + level).round().long()
        frame0 = self.frame0[rows] * 2.0**level
        frame1 = self.frame1[rows] * 2.0**level
        offsets, weight = patches.patch(self.settings, self.device)
        at0 = self.points0[rows][:, None] + offsets @ frame0.transpose(1, 2)
        inside = self.pyramid0.holds(patches.corners(at0), level0)
        template = patches.Template(self.pyramid0.read(self.pyramid0.grid(at0, level0)), weight)
        start = self.points1[rows] + self.shift[rows]
        at1 = start[:, None] + offsets[template.inner] @ frame1.transpose(1, 2)
        grid1 = self.pyramid1.grid(at1, level1)
        unit1 = self.pyramid1.unit[level1]
        moved = torch.zeros_like(start)
        left = torch.arange(len(rows), device=self.device)  # matches that have not converged
        part = template
        frame = frame1
        grid = grid1
        unit = unit1
        for _ in range(self.settings.iterations):
            shift = (frame @ moved[left][..., None])[..., 0]
            step = part.step(self.pyramid1.read(grid + (shift * unit)[:, None]))[0]
            length = step.norm(dim=1, keepdim=True)
            moved[left] -= step * (self.settings.longest / length.clamp(min=self.settings.longest))
            moving = length[:, 0] > SETTLED
            if 2 * int(moving.sum()) < len(left):  # dropping fewer takes longer than moving them
                left = left[moving]
                part = part.only(moving)
                frame = frame[moving]
                grid = grid[moving]
                unit = unit[moving]
            if not len(left):
                break
        shift = (frame1 @ moved[..., None])[..., 0]
        _, correlation = template.step(self.pyramid1.read(grid1 + (shift * unit1)[:, None]))
        inside &= self.pyramid1.holds(patches.corners(at1) + shift[:, None], level1)
        correlation = torch.where(inside, correlation, torch.full_like(correlation, float("nan")))
        plain = template.deviation(correlation)
        blurred = template.deviation(correlation, self.blur / 2.0**level)
        return _Descent(self.shift[rows] + shift, moved.norm(dim=1), plain, blurred, correlation)


class _Descent(NamedTuple):
    """Alignment of n matches on one level.

    shift: (n, 2) px of image 1, from SIFT's position. moved: (n,) samples of this level. deviation,
    blurred: (n,) of the same unit, without and with regard to added blur. correlation: (n,), NaN
    outside the image or without structure.
    """

    shift: Tensor
    moved: Tensor
    deviation: Tensor
    blurred: Tensor
    correlation: Tensor
