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

from typing import Callable, List, NamedTuple, Tuple, Union

import cv2
import numpy as np
import torch
from torch import Tensor

from superglue_sift import geometry, patches
from superglue_sift.sift import positions

MAX_ZOOM = 8.0  # maximum magnification between the images
COARSE_PX = 6.0  # a keypoint of twice this diameter starts one level up
COARSER = 3  # maximum number of coarser levels
ITERATIONS = 8  # of Gauss-Newton
# Samples of a patch, which are a pixel apart without magnification
LONGEST = 1.0  # step
SETTLED = 0.003  # a match with a shorter step has converged
FARTHEST = 3.0  # a match that moves farther is rejected,
MAX_DEVIATION = 0.5  # and one with a larger deviation,
MIN_CORRELATION = 0.6  # or a smaller correlation
MAX_BLUR = 8.0  # maximum deviation of the added blur
BLURRED = 0.35  # log ratio of gradient energies above which one image counts as blurred more
# Ratio of deviations, with and without equal sharpness, below which the former is kept
SHARPER = 0.85
# Local maps
NEIGHBOURS = 10  # matches to fit a map to
NEAR_PX = 30.0  # distance at which a neighbour has half the weight
PRIOR_PX = 5.0  # weight of the global map: that of one neighbour at this distance
GEOMETRY_PX = 3.0  # inlier distance of the geometry
PLANAR = 0.6  # minimum fraction of inliers of a homography whose derivatives are used
MIN_AGREEING = 6  # inliers; with fewer, maps come from scale and angle


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
    device: Union[str, torch.device] = "cpu",
) -> Aligned:
    """Align K matches of two images. Does not raise for any images or matches.

    gray0, gray1: (H, W) uint8. records0, records1: (K,) keypoint records (`sift.KEYPOINT`); entry k
    of one matches entry k of the other.
    """
    points0, points1 = (positions(records).astype(np.float64) for records in (records0, records1))
    maps = local_maps(points0, points1, similarities(records0, records1))
    return align_points(gray0, gray1, points0, points1, maps, records1["scale"], device)


def align_points(
    gray0: np.ndarray,
    gray1: np.ndarray,
    points0: np.ndarray,
    points1: np.ndarray,
    maps: np.ndarray,
    scales: Union[float, np.ndarray] = COARSE_PX,
    device: Union[str, torch.device] = "cpu",
) -> Aligned:
    """Align points (K, 2) px of any kind. maps: (K, 2, 2) local affine maps 0 -> 1.

    scales: (K,) diameters in px of image 1, which choose the coarsest level of a match.
    """
    start0, start1 = (np.asarray(points, np.float32) for points in (points0, points1))
    if not len(start0):
        return Aligned(start0, start1, np.zeros(0, np.float32), np.zeros(0, np.float32))
    octaves = np.log2(np.maximum(scales, COARSE_PX) / COARSE_PX)
    coarsest = np.broadcast_to(np.clip(octaves, 0, COARSER), len(start0))
    levels = torch.as_tensor(coarsest.astype(np.int64), device=device)

    def begin(image0: np.ndarray, image1: np.ndarray) -> _Work:
        return _Work(image0, image1, start0, start1, np.asarray(maps, np.float64), device)

    with torch.no_grad():
        work = begin(gray0, gray1)
        work.run(levels)
        sharpness = work.sharpness()
        if abs(sharpness) > BLURRED:
            images, blur = _equally_sharp(gray0, gray1, work, sharpness > 0, begin)
            again = begin(*images)
            again.run(levels, blur)
            better = torch.nanmedian(again.plain / work.deviation) < SHARPER
            if better or torch.isnan(work.deviation).all():
                work = again
    found = (work.shift, work.deviation, work.correlation)
    shift, deviations, correlations = (values.cpu().numpy() for values in found)
    return Aligned(start0, start1 + shift, deviations, correlations)


def similarities(records0: np.ndarray, records1: np.ndarray) -> np.ndarray:
    """(K, 2, 2) maps 0 -> 1 by the keypoints' scales and angles, the identity without these."""
    scales = np.stack([records0["scale"], records1["scale"]])
    scales[:, (scales <= 0).any(0)] = 1.0
    ratio = (scales[1] / scales[0]).astype(np.float64)
    rotation = np.radians((records1["angle"] - records0["angle"]).astype(np.float64))
    c = ratio * np.cos(rotation)
    s = ratio * np.sin(rotation)
    return np.stack([np.stack([c, -s], -1), np.stack([s, c], -1)], -2)


def local_maps(points0: np.ndarray, points1: np.ndarray, fallback: np.ndarray) -> np.ndarray:
    """(K, 2, 2) local affine maps 0 -> 1 at K matches.

    For inliers of a homography that fits most matches, its derivative. For others, the
    least-squares affine map of the nearest inliers of one homography or epipolar geometry; without
    these, `fallback` (K, 2, 2).
    """
    given = points0.astype(np.float32), points1.astype(np.float32)
    H, planar = geometry.fit_homography(*given, GEOMETRY_PX)
    agreeing = planar
    if planar.sum() < PLANAR * len(planar):
        agreeing = planar | geometry.fit_fundamental(*given, GEOMETRY_PX).inliers
    if agreeing.sum() < MIN_AGREEING:
        return fallback
    maps = nearest_affine(points0, points1, agreeing)
    if H is not None and planar.sum() >= PLANAR * agreeing.sum():
        maps[planar] = geometry.jacobians(H, points0[planar])
    return maps


def nearest_affine(points0: np.ndarray, points1: np.ndarray, agreeing: np.ndarray) -> np.ndarray:
    """(K, 2, 2) affine maps of the nearest matches among `agreeing` (K,) bool, at least one.

    Each is regularized by the map of all of these.
    """
    from scipy.spatial import KDTree

    own = points0[agreeing]
    theirs = points1[agreeing]
    count = min(NEIGHBOURS, len(own))
    distance, index = KDTree(own).query(points0, count)
    weight = 1.0 / (NEAR_PX + distance)
    weight = weight / weight.sum(1, keepdims=True)
    p, q = (
        points[index] - (weight[..., None] * points[index]).sum(1, keepdims=True)
        for points in (own, theirs)
    )
    whole = np.linalg.lstsq(own - own.mean(0), theirs - theirs.mean(0), rcond=None)[0]
    normal = np.einsum("kn,kni,knj->kij", weight, p, p) + PRIOR_PX**2 * np.eye(2)
    right = np.einsum("kn,kni,knj->kij", weight, p, q) + PRIOR_PX**2 * whole
    return np.linalg.solve(normal, right).swapaxes(1, 2)


def _equally_sharp(
    gray0: np.ndarray,
    gray1: np.ndarray,
    work: _Work,
    first: bool,
    begin: Callable[[np.ndarray, np.ndarray], _Work],
) -> Tuple[List[np.ndarray], float]:
    """Blur the sharper image, 0 if `first`, until patches of both have the same gradient energy.

    Returns both images, and the deviation of the added blur in samples.
    """
    # Of a sample, in the image to be blurred
    pixel = float((work.frame0[:, 0, 0] if first else work.step1).median())
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
        device: Union[str, torch.device],
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
        self.usable = torch.as_tensor(usable, device=device)
        self.step1 = patches.to_tensor(step0 * scale, device)
        self.octaves = patches.to_tensor(octaves, device)
        # One sample, in px of each image
        self.frame0 = patches.to_tensor(step0[:, None, None] * np.eye(2), device)
        self.frame1 = patches.to_tensor(step0[:, None, None] * maps, device)
        self.points0 = patches.to_tensor(points0, device)
        self.points1 = patches.to_tensor(points1, device)
        levels = COARSER + int(np.round(octaves.max()))
        self.pyramid0, self.pyramid1 = (
            patches.Pyramid(gray, levels, device) for gray in (gray0, gray1)
        )
        self.offsets, self.weight = patches.patch(device)
        self.shift = torch.zeros_like(self.points1)
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
        for points, frame, octave, pyramid in (
            (self.points0, self.frame0, self.octaves[0], self.pyramid0),
            (self.points1, self.frame1, self.octaves[1], self.pyramid1),
        ):
            level = octave.round().long()
            at = points[:, None] + self.offsets @ frame.transpose(1, 2)
            energies.append(patches.energy(pyramid.read(pyramid.grid(at, level)), self.weight))
            usable = usable & pyramid.holds(at, level) & (energies[-1] > 0)
        ratios = torch.log(energies[0] / energies[1])[usable]
        return float(ratios.median()) if len(ratios) else 0.0

    def _align(self, level: int, chosen: Tensor) -> None:
        """Align the chosen matches (K,) on one level; keep the state of those that fail."""
        rows = torch.nonzero(chosen & self.usable).flatten()
        if not len(rows):
            return
        new = self._descend(level, rows)
        good = (
            (new.correlation > MIN_CORRELATION)
            & (new.moved < FARTHEST)
            & (new.plain < MAX_DEVIATION)
        )
        sample = self.step1[rows] * float(2**level)
        unset = torch.isnan(self.deviation[rows])
        self.correlation[rows] = torch.where(good | unset, new.correlation, self.correlation[rows])
        self.plain[rows] = torch.where(good, new.plain * sample, self.plain[rows])
        self.deviation[rows] = torch.where(good, new.deviation * sample, self.deviation[rows])
        self.shift[rows] = torch.where(good[:, None], new.shift, self.shift[rows])

    def _descend(self, level: int, rows: Tensor) -> _Descent:
        level0, level1 = (self.octaves[:, rows] + level).round().long()
        frame0 = self.frame0[rows] * 2.0**level
        frame1 = self.frame1[rows] * 2.0**level
        at0 = self.points0[rows][:, None] + self.offsets @ frame0.transpose(1, 2)
        samples = self.pyramid0.read(self.pyramid0.grid(at0, level0))
        template = patches.Template(samples, self.weight)
        start = self.points1[rows] + self.shift[rows]
        at1 = start[:, None] + self.offsets[template.inner] @ frame1.transpose(1, 2)
        grid1 = self.pyramid1.grid(at1, level1)
        unit1 = self.pyramid1.unit[level1]
        moved = torch.zeros_like(start)
        left = torch.arange(len(rows), device=start.device)  # matches that have not converged
        patch = template
        frame = frame1
        grid = grid1
        unit = unit1
        for _ in range(ITERATIONS):
            shift = (frame @ moved[left][..., None])[..., 0]
            step = patch.step(self.pyramid1.read(grid + (shift * unit)[:, None]))[0]
            length = step.norm(dim=1, keepdim=True)
            moved[left] -= step * (LONGEST / length.clamp(min=LONGEST))
            moving = length[:, 0] > SETTLED
            if 2 * int(moving.sum()) < len(left):  # dropping fewer takes longer than moving them
                left = left[moving]
                patch = patch[moving]
                frame = frame[moving]
                grid = grid[moving]
                unit = unit[moving]
            if not len(left):
                break
        shift = (frame1 @ moved[..., None])[..., 0]
        _, correlation = template.step(self.pyramid1.read(grid1 + (shift * unit1)[:, None]))
        inside = self.pyramid0.holds(at0, level0)
        inside &= self.pyramid1.holds(at1 + shift[:, None], level1)
        correlation = correlation.masked_fill(~inside, float("nan"))
        plain = template.deviation(correlation)
        deviation = template.deviation(correlation, self.blur / 2.0**level)
        return _Descent(self.shift[rows] + shift, moved.norm(dim=1), plain, deviation, correlation)


class _Descent(NamedTuple):
    """Alignment of n matches on one level.

    shift: (n, 2) px of image 1, from SIFT's position. moved: (n,) samples of this level. plain,
    deviation: (n,) of the same unit, without and with regard to added blur. correlation: (n,), NaN
    outside the image or without structure.
    """

    shift: Tensor
    moved: Tensor
    plain: Tensor
    deviation: Tensor
    correlation: Tensor
