"""Refine matches to a fraction of a pixel: align the patch around each match in image 0 to image 1.

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

import functools
from typing import Callable, List, NamedTuple, Tuple, Union

import cv2
import numpy as np
import torch
from torch import Tensor

from superglue_sift.features.sift import positions
from superglue_sift.geometry import two_view
from superglue_sift.geometry.patches import (
    Device,
    Pyramid,
    Template,
    energy,
    sample_patch,
    to_tensor,
)

MAX_ZOOM = 8.0  # maximum magnification between the images
COARSE_PX = 6.0  # a keypoint of twice this diameter starts one level up
COARSER = 3  # maximum number of coarser levels
ITERATIONS = 8  # of Gauss-Newton
# Samples of a patch, which are a pixel apart without magnification
LONGEST = 1.0  # step
SETTLED = 0.003  # a match with a shorter step has converged
FARTHEST = 3.0  # a match that moves farther on one level is rejected,
MAX_DEVIATION = 0.5  # and one with a larger deviation,
MIN_CORRELATION = 0.6  # or a smaller correlation
MAX_BLUR = 8.0  # maximum deviation of the added blur
BLURRED = 0.35  # log ratio of gradient energies above which one image counts as blurred more
# Ratio of deviations, with and without equal sharpness, below which the former is kept
SHARPER = 0.85


def refine(
    gray0: np.ndarray,
    gray1: np.ndarray,
    records0: np.ndarray,
    records1: np.ndarray,
    device: Device = "cpu",
) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Refine K matches of two images. Does not raise for any images and finite positions.

    gray0, gray1: (H, W) uint8. records0, records1: (K,) keypoint records (`sift.KEYPOINT`); entry k
    of one matches entry k of the other. Returns what `refine_points` returns.
    """
    points0, points1 = (positions(records).astype(np.float64) for records in (records0, records1))
    maps = two_view.local_maps(points0, points1, similarities(records0, records1))
    return refine_points(gray0, gray1, points0, points1, maps, records1["scale"], device)


def refine_points(
    gray0: np.ndarray,
    gray1: np.ndarray,
    points0: np.ndarray,
    points1: np.ndarray,
    maps: np.ndarray,
    scales: Union[float, np.ndarray] = COARSE_PX,
    device: Device = "cpu",
) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Move points of any kind in image 1 to what their partners in image 0 show.

    Args:
        points0, points1: (K, 2) px.
        maps: (K, 2, 2) local affine maps 0 -> 1.
        scales: (K,) diameters in px of image 1, which choose the coarsest level of a match.

    Returns:
        points1 (K, 2) float32 px; deviations (K,) float32, the standard deviation in px of image 1
        along each axis, NaN where refinement failed and the point is where it was; correlations
        (K,) float32, -1 to 1, of both patches, NaN where a patch leaves its image or is flat.
    """
    start0, start1 = (np.asarray(points, np.float32) for points in (points0, points1))
    if not len(start0):
        return start1, np.zeros(0, np.float32), np.zeros(0, np.float32)
    octaves = np.log2(np.maximum(scales, COARSE_PX) / COARSE_PX)
    coarsest = np.broadcast_to(np.clip(octaves, 0, COARSER), len(start0))
    levels = torch.as_tensor(coarsest.astype(np.int64), device=device)
    begin = functools.partial(_Work, points0=start0, points1=start1, maps=maps, device=device)
    with torch.no_grad():
        work = begin(gray0, gray1)
        work.run(levels)
        sharpness = work.sharpness()
        if abs(sharpness) > BLURRED:
            images, blur = _equally_sharp(gray0, gray1, work, sharpness > 0, begin)
            again = begin(images[0], images[1])
            again.run(levels, blur)
            better = torch.nanmedian(again.plain / work.deviation) < SHARPER
            if better or torch.isnan(work.deviation).all():
                work = again
    found = (work.shift, work.deviation, work.correlation)
    shift, deviations, correlations = (values.cpu().numpy() for values in found)
    return start1 + shift, deviations, correlations


def similarities(records0: np.ndarray, records1: np.ndarray) -> np.ndarray:
    """(K, 2, 2) maps 0 -> 1 by the keypoints' scales and angles, the identity without these."""
    scales = np.stack([records0["scale"], records1["scale"]])
    scales[:, (scales <= 0).any(0)] = 1.0
    ratio = (scales[1] / scales[0]).astype(np.float64)
    rotation = np.radians((records1["angle"] - records0["angle"]).astype(np.float64))
    c = ratio * np.cos(rotation)
    s = ratio * np.sin(rotation)
    return np.stack([np.stack([c, -s], -1), np.stack([s, c], -1)], -2)


def _equally_sharp(
    gray0: np.ndarray, gray1: np.ndarray, work: _Work, first: bool, begin: Callable[..., _Work]
) -> Tuple[List[np.ndarray], float]:
    """Blur the sharper image, 0 if `first`, until patches of both have the same gradient energy.

    Returns both images, and the deviation of the added blur in samples.
    """
    pixel = float((work.step0 if first else work.step1).median())  # of the image to be blurred
    sharp = (gray0 if first else gray1).astype(np.float32)

    def blur(deviation: float) -> List[np.ndarray]:
        soft = cv2.GaussianBlur(sharp, (0, 0), deviation * pixel)
        return [soft, gray1] if first else [gray0, soft]

    least = 0.0
    most = MAX_BLUR
    while most - least > 0.15:
        middle = (least + most) / 2
        if (begin(*blur(middle)).sharpness() > 0) == first:
            least = middle
        else:
            most = middle
    middle = (least + most) / 2
    return blur(middle), middle


class _Work:
    """State of K matches: shift (K, 2) in px of image 1; deviation, plain and correlation (K,).

    These are NaN where unknown. plain: the deviation without regard to added blur.
    """

    def __init__(
        self,
        gray0: np.ndarray,
        gray1: np.ndarray,
        points0: np.ndarray,
        points1: np.ndarray,
        maps: np.ndarray,
        device: Device,
    ) -> None:
        numbers = np.column_stack([points0, points1, maps.reshape(-1, 4)])
        usable = np.all(np.isfinite(numbers), axis=1)
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
        levels = COARSER + int(np.ceil(octaves.max()))
        self.usable = torch.as_tensor(usable, device=device)
        self.step0 = to_tensor(step0, device)
        self.step1 = to_tensor(step0 * scale, device)
        frames = step0[:, None, None] * np.eye(2), step0[:, None, None] * maps
        self.sides = [
            _Side(
                to_tensor(points, device),
                to_tensor(frame, device),
                to_tensor(octave, device),
                Pyramid(gray, levels, device),
            )
            for gray, points, frame, octave in zip(
                (gray0, gray1), (points0, points1), frames, octaves
            )
        ]
        self.offsets, self.inner, self.weight = sample_patch(device)
        self.shift = torch.zeros_like(self.sides[1].points)
        self.deviation, self.plain, self.correlation = (
            torch.full_like(self.step1, float("nan")) for _ in range(3)
        )
        self.blur = 0.0

    def run(self, coarsest: Tensor, blur: float = 0.0) -> None:
        """Align each match from its coarsest level (K,) to the finest.

        Failures are aligned again from one level up. blur: deviation of the blur that was added to
        one image, in samples of the finest level.
        """
        self.blur = blur
        for level in range(COARSER, -1, -1):
            self._align(level, coarsest >= level)
        again = torch.isnan(self.deviation) & (coarsest == 0)
        self._align(1, again)
        self._align(0, again & ~torch.isnan(self.deviation))

    def sharpness(self) -> float:
        """Median log ratio of the gradient energies of both patches, per variance.

        Above 0, image 0 is sharper; 0 without patches inside both images. SIFT's positions are
        accurate enough for it.
        """
        usable = self.usable
        energies = []
        for side in self.sides:
            at, level = side.places(self.offsets)
            energies.append(energy(side.pyramid.read(side.pyramid.grid(at, level)), self.weight))
            usable = usable & side.pyramid.holds(at, level) & (energies[-1] > 0)
        ratios = torch.log(energies[0] / energies[1])[usable]
        return float(ratios.median()) if len(ratios) else 0.0

    def _align(self, level: int, chosen: Tensor) -> None:
        """Align the chosen matches (K,) on one level; keep the state of those that fail."""
        rows = torch.nonzero(chosen & self.usable).flatten()
        if not len(rows):
            return
        side0, side1 = self.sides
        pyramid = side1.pyramid
        at0, level0 = side0.places(self.offsets, rows, level)
        template = Template(side0.pyramid.read(side0.pyramid.grid(at0, level0)), self.weight)
        at1, level1 = side1.places(self.inner, rows, level, self.shift[rows])
        frame = side1.frame[rows] * 2.0**level
        grid = pyramid.grid(at1, level1)
        unit = pyramid.unit[level1]
        moved = _descend(template, pyramid, frame, grid, unit)
        shift = (frame @ moved[..., None])[..., 0]
        _, correlation = template.step(pyramid.read(grid + (shift * unit)[:, None]))
        inside = side0.pyramid.holds(at0, level0) & pyramid.holds(at1 + shift[:, None], level1)
        correlation = correlation.masked_fill(~inside, float("nan"))
        plain = template.deviation(correlation)
        deviation = template.deviation(correlation, self.blur / 2.0**level)
        good = (
            (correlation > MIN_CORRELATION)
            & (moved.norm(dim=1) < FARTHEST)
            & (plain < MAX_DEVIATION)
        )
        sample = self.step1[rows] * float(2**level)
        unset = torch.isnan(self.deviation[rows])
        self.correlation[rows] = torch.where(good | unset, correlation, self.correlation[rows])
        self.plain[rows] = torch.where(good, plain * sample, self.plain[rows])
        self.deviation[rows] = torch.where(good, deviation * sample, self.deviation[rows])
        self.shift[rows] += shift.masked_fill(~good[:, None], 0.0)


def _descend(
    template: Template, pyramid: Pyramid, frame: Tensor, grid: Tensor, unit: Tensor
) -> Tensor:
    """Gauss-Newton: how far (n, 2) patches of image 1 move, in samples of a level.

    frame: (n, 2, 2), a sample in px. grid: (n, s s, 2) where they start. unit: (n, 2), a px in the
    units of the grid.
    """
    moved = torch.zeros_like(unit)
    left = torch.arange(len(moved), device=moved.device)  # matches that have not converged
    of_left = [template, frame, grid, unit]
    for _ in range(ITERATIONS):
        patch, frame, grid, unit = of_left
        shift = (frame @ moved[left][..., None])[..., 0]
        step = patch.step(pyramid.read(grid + (shift * unit)[:, None]))[0]
        length = step.norm(dim=1, keepdim=True)
        moved[left] -= step * (LONGEST / length.clamp(min=LONGEST))
        moving = length[:, 0] > SETTLED
        if 2 * int(moving.sum()) < len(left):  # dropping fewer takes longer than moving them
            left = left[moving]
            of_left = [each[moving] for each in of_left]
        if not len(left):
            break
    return moved


class _Side(NamedTuple):
    """An image and K points in it.

    points: (K, 2) px. frame: (K, 2, 2), a sample in px. octave: (K,), log of a sample in px.
    """

    points: Tensor
    frame: Tensor
    octave: Tensor
    pyramid: Pyramid

    def places(
        self,
        offsets: Tensor,
        rows: Union[slice, Tensor] = slice(None),
        level: int = 0,
        shift: Union[float, Tensor] = 0.0,
    ) -> Tuple[Tensor, Tensor]:
        """Samples (n, s s, 2) px at `offsets` (s s, 2) from shifted points, and their level of the
        pyramid (n,).
        """
        frame = self.frame[rows] * 2.0**level
        at = (self.points[rows] + shift)[:, None] + offsets @ frame.transpose(1, 2)
        return at, (self.octave[rows] + level).round().long()
