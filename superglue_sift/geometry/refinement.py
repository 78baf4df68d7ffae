"""Refine matches to a fraction of a pixel by the pixels around them.

SIFT's positions scatter by some tenths of a pixel, and for large keypoints by several pixels. After
matching, a patch of 21x21 samples of image 0 is warped by the local affine map between the images,
and shifted until it fits image 1 best.

- Residual: both patches are normalized to weighted mean 0 and deviation 1, which removes gain and
  offset.
- Steps: Gauss-Newton finds the two numbers of the shift. Its Hessian is computed once, on the patch
  of image 0 (inverse compositional alignment; Baker and Matthews 2004). All matches are refined
  together, on any torch device.
- Scale: samples are one pixel of the coarser image apart. The finer image is sampled from the
  pyramid level of that resolution. Large keypoints, and matches that start far off, are refined on
  coarser levels first.
- Blur: if one image is blurred more (focus, motion), the other is blurred as much, and refined
  again. Patches of unequal sharpness have no common minimum. At 2 px of blur, this reduces errors
  to a fifth.
- Deviation: it comes from the covariance of the shift, sigma^2 (J^T J)^-1 (Gruen 1985). Along a
  direction without structure, as along a straight edge, the match does not move. Added blur makes
  residuals of neighboring samples alike, which the covariance takes into account.

Lengths are in pixels of the image that is read, which may be a reduced copy of the file. A larger
copy gives more exact positions.
"""

from __future__ import annotations

import copy
from typing import Sequence, Tuple, Union

import cv2
import numpy as np
import torch
from torch import Tensor

from superglue_sift.geometry import two_view
from superglue_sift.geometry.local_maps import fit_local_maps, map_by_orientation
from superglue_sift.torch_compat import sqrt

Device = Union[str, torch.device]
Pair = Tuple[np.ndarray, np.ndarray]  # One array of each image

# Patches
RADIUS = 10  # A patch has SIDE^2 samples
SIDE = 2 * RADIUS + 1
WIDTH = 5.0  # Deviation of the Gaussian that weighs the samples
SMOOTHING_PX = 0.7  # Gaussian blur of images before they are sampled
CORRELATED = 6.0  # Samples of a smoothed image that are worth one independent sample
FLAT = 0.5  # A patch below this standard deviation in gray levels has no structure
# A direction has no structure if its eigenvalue of the Hessian is below this part of the larger
# eigenvalue.
EDGE = 0.02
# The search
MAX_ZOOM = 8.0  # Maximum magnification between the images
COARSE_PX = 6.0  # A keypoint of twice this diameter starts one level up
COARSER = 3  # Maximum number of coarser levels
ITERATIONS = 8  # Maximum number of steps of Gauss-Newton
# These lengths are in samples of a patch, which are a pixel apart without magnification.
LONGEST = 1.0  # Longer steps are cut to this length
SETTLED = 0.003  # A match with a shorter step has converged
# A match is rejected if it moves farther than this on one level, has a larger deviation, or
# correlates less.
FARTHEST = 3.0
MAX_DEVIATION = 0.5
MIN_CORRELATION = 0.6
MAX_BLUR = 8.0  # Maximum deviation of the added blur
BLURRED = 0.35  # One image counts as blurred more above this log ratio of gradient energies
# The result with equal sharpness is kept if its deviations are below this part of the others.
SHARPER = 0.85


def refine(
    grays: Pair,
    points: Pair,
    scales: Pair,
    oris: Pair,
    sizes: Sequence[two_view.Size],
    device: Device = "cpu",
) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Refine K matches of keypoints. Any images and finite positions are accepted.

    Args:
        grays: (H, W) uint8, the pixels of both images, which may be reduced.
        points: (K, 2) px of both images. Entry k of one matches entry k of the other.
        scales: (K,) diameters in px of both images, or zeros.
        oris: (K,) degrees, orientations in both images.
        sizes: (width, height) in px of both images, not of their reduced pixels.
        device: torch device for the computation.

    Returns:
        Positions, deviations and correlations, as `refine_points` returns them, in px of image 1.
    """
    # Convert positions to the pixels that are read. All other code has pixels of the files.
    to_grays = [two_view.map_to_resized(size, gray.shape[::-1]) for size, gray in zip(sizes, grays)]
    gray_points0, gray_points1 = (
        two_view.transform(xy.astype(np.float64), to_gray) for xy, to_gray in zip(points, to_grays)
    )
    scales0, scales1 = (
        scale * np.float32(max(gray.shape) / max(size))
        for scale, gray, size in zip(scales, grays, sizes)
    )
    fallback = map_by_orientation((scales0, scales1), oris)
    maps = fit_local_maps(gray_points0, gray_points1, fallback)
    refined1, deviations, correlations = refine_points(
        grays, (gray_points0, gray_points1), maps, scales1, device
    )
    if tuple(sizes[1]) == grays[1].shape[::-1]:
        return refined1, deviations, correlations
    factor = np.float32(max(sizes[1]) / max(grays[1].shape))
    shift = (refined1 - gray_points1.astype(np.float32)) * factor
    return points[1] + shift, deviations * factor, correlations


def refine_points(
    grays: Pair,
    points: Pair,
    maps: np.ndarray,
    scales: Union[float, np.ndarray] = COARSE_PX,
    device: Device = "cpu",
) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Move points of image 1 to where the pixels are as around their partners in image 0.

    Args:
        grays: (H, W) uint8, both images.
        points: (K, 2) px of both images, points of any kind.
        maps: (K, 2, 2) local affine maps 0 -> 1.
        scales: (K,) diameters in px of image 1, which decide the coarsest level of a match.
        device: torch device for the computation.

    Returns:
        points1: (K, 2) float32 px.
        deviations: (K,) float32, the standard deviation in px of image 1 along each axis. It is NaN
            where refinement failed. The point has then not moved.
        correlations: (K,) float32 of both patches, from -1 to 1. It is NaN where a patch leaves its
            image or is flat.
    """
    start0, start1 = (np.asarray(xy, np.float32) for xy in points)
    if not len(start0):
        return start1, np.zeros(0, np.float32), np.zeros(0, np.float32)
    # Large keypoints start on a coarser level, one for each doubling of the diameter.
    octaves = np.log2(np.maximum(scales, COARSE_PX) / COARSE_PX)
    coarsest = np.broadcast_to(np.clip(octaves, 0, COARSER), len(start0))
    levels = torch.as_tensor(coarsest.astype(np.int64), device=device)
    with torch.no_grad():
        matches = _RefinedMatches(grays, (start0, start1), maps, device)
        matches.run(levels)
        if abs(matches.measure_sharpness()) > BLURRED:
            # One image is blurred more: refine again with equal sharpness, and keep the better
            # result.
            blurred = _equalize_sharpness(matches)
            blurred.run(levels)
            is_better = torch.nanmedian(blurred.plain / matches.deviation) < SHARPER
            if is_better or torch.isnan(matches.deviation).all():
                matches = blurred
    tensors = (matches.shift, matches.deviation, matches.correlation)
    shift, deviations, correlations = (tensor.cpu().numpy() for tensor in tensors)
    return start1 + shift, deviations, correlations


def _equalize_sharpness(matches: _RefinedMatches) -> _RefinedMatches:
    """Blur the sharper image until patches of both images have the same gradient energy.

    Returns:
        The same matches for images of equal sharpness. They are not refined yet.
    """
    sharper = 0 if matches.measure_sharpness() > 0 else 1
    low = 0.0
    high = MAX_BLUR
    # Bisect for the deviation of the blur.
    while high - low > 0.15:
        middle = (low + high) / 2
        still_sharper = matches.blur_image(sharper, middle).measure_sharpness() > 0
        if still_sharper == (sharper == 0):
            low = middle
        else:
            high = middle
    return matches.blur_image(sharper, (low + high) / 2)


class _RefinedMatches:
    """K matches while they are refined.

    `run` sets `shift`, `deviation`, `plain` and `correlation`. The last three are NaN where they
    are not known.

    Attributes:
        usable: (K,) bool, whether a match takes part.
        steps: (2, K), the distance of two samples in px of each image.
        blur: deviation of the blur that was added to one image, in samples of the finest level.
        shift: (K, 2) px of image 1, how far each match has moved.
        deviation: (K,) px of image 1, the standard deviation along each axis.
        plain: (K,), the deviation without regard to added blur.
        correlation: (K,), the correlation of both patches.
    """

    blur = 0.0

    def __init__(self, grays: Pair, points: Pair, maps: np.ndarray, device: Device) -> None:
        """Prepare matches for `run`.

        Args:
            grays: (H, W) uint8, both images.
            points: (K, 2) px, positions in both images.
            maps: (K, 2, 2) local affine maps 0 -> 1.
            device: torch device for the computation.
        """
        # Matches with an unusable map take no part, and get the identity.
        numbers = np.column_stack([*points, maps.reshape(-1, 4)])
        usable = np.all(np.isfinite(numbers), axis=1)
        maps = np.where(usable[:, None, None], maps, np.eye(2))
        # Magnification along the directions where it is largest and smallest
        zoom, min_zoom = np.linalg.svd(maps, compute_uv=False).T
        usable &= (zoom < MAX_ZOOM) & (zoom * MAX_ZOOM > 1.0) & (min_zoom * MAX_ZOOM > zoom)
        maps = np.where(usable[:, None, None], maps, np.eye(2))
        zoom = np.where(usable, zoom, 1.0)
        # Samples are one px of the coarser image apart. step0 is this distance in px of image 0.
        step0 = np.maximum(1.0, 1.0 / zoom)
        steps = np.stack([step0, step0 * zoom])
        octaves = np.log2(steps)
        # (K, 2, 2), the steps to the next sample on the right, and below, in px of each image
        frames = step0[:, None, None] * np.eye(2), step0[:, None, None] * maps
        self.usable = torch.as_tensor(usable, device=device)
        self.steps = to_tensor(steps, device)
        self.images = list(zip(grays, points, frames, octaves))
        self.levels = COARSER + int(np.ceil(octaves.max()))
        self.device = device
        self.views = [_SampledImage(*image, self.levels, device) for image in self.images]
        self.offsets, self.inner, self.weight = make_patch_offsets(device)

    def blur_image(self, image: int, blur: float) -> _RefinedMatches:
        """Return the matches with one image, 0 or 1, blurred by a deviation of `blur` samples."""
        blurred = copy.copy(self)
        blurred.blur = blur
        gray, points, frame, octave = self.images[image]
        deviation = blur * float(self.steps[image].median())
        gray = cv2.GaussianBlur(gray.astype(np.float32), (0, 0), deviation)
        blurred.views = [*self.views]
        blurred.views[image] = _SampledImage(gray, points, frame, octave, self.levels, self.device)
        return blurred

    def run(self, coarsest: Tensor) -> None:
        """Refine each match from its coarsest level (K,) to the finest.

        Matches that fail are refined again from the next coarser level.
        """
        self.shift = torch.zeros_like(self.views[1].points)
        self.deviation, self.plain, self.correlation = torch.full(
            (3, len(self.shift)), float("nan"), dtype=torch.float32, device=self.shift.device
        )
        for level in range(COARSER, -1, -1):
            self._refine(level, coarsest >= level)
        # Matches that started on the finest level may have been too far off.
        has_failed = torch.isnan(self.deviation) & (coarsest == 0)
        self._refine(1, has_failed)
        self._refine(0, has_failed & ~torch.isnan(self.deviation))

    def measure_sharpness(self) -> float:
        """Return the median log-ratio of gradient energy over variance.

        Above 0, image 0 is sharper. It is 0 if no patches lie inside both images. SIFT's positions
        are accurate enough for this.
        """
        usable = self.usable
        energies = []
        for view in self.views:
            positions, level = view.sample_positions(self.offsets)
            samples = view.read(view.to_grid(positions, level))
            energies.append(compute_gradient_energy(samples, self.weight))
            usable = usable & view.contains(positions, level) & (energies[-1] > 0)
        ratios = torch.log(energies[0] / energies[1])[usable]
        return float(ratios.median()) if len(ratios) else 0.0

    def _refine(self, level: int, takes_part: Tensor) -> None:
        """Refine matches on one level. Those that fail keep their state.

        Args:
            level: how many levels coarser than the finest one of a match.
            takes_part: (K,) bool, whether a match is refined.
        """
        rows = torch.nonzero(takes_part & self.usable).flatten()
        if not len(rows):
            return
        view0, view1 = self.views
        # Prepare the patches (n, (SIDE + 2)^2) of image 0, with a margin for the gradient.
        positions0, level0 = view0.sample_positions(self.offsets, rows, level)
        template = Template(view0.read(view0.to_grid(positions0, level0)), self.weight)
        # Shift the patches (n, SIDE^2) of image 1.
        positions1, level1 = view1.sample_positions(self.inner, rows, level, self.shift[rows])
        frame = view1.frame[rows] * 2.0**level
        grid = view1.to_grid(positions1, level1)
        unit = view1.unit[level1]
        moved = _descend(template, view1, frame, grid, unit)
        shift = multiply_vectors(frame, moved)
        # Measure how well the shifted patches fit.
        _, correlation = template.step(view1.read(grid + (shift * unit)[:, None]))
        is_inside = view0.contains(positions0, level0)
        is_inside &= view1.contains(positions1 + shift[:, None], level1)
        correlation = correlation.masked_fill(~is_inside, float("nan"))
        plain = template.compute_deviation(correlation)
        deviation = template.compute_deviation(correlation, self.blur / 2.0**level)
        succeeded = (
            (correlation > MIN_CORRELATION)
            & (moved.norm(dim=1) < FARTHEST)
            & (plain < MAX_DEVIATION)
        )
        # Write the state back, in px of image 1.
        sample = self.steps[1][rows] * float(2**level)
        unset = torch.isnan(self.deviation[rows])
        self.correlation[rows] = torch.where(succeeded | unset, correlation, self.correlation[rows])
        self.plain[rows] = torch.where(succeeded, plain * sample, self.plain[rows])
        self.deviation[rows] = torch.where(succeeded, deviation * sample, self.deviation[rows])
        self.shift[rows] += shift.masked_fill(~succeeded[:, None], 0.0)


def _descend(
    template: Template, view: _SampledImage, frame: Tensor, grid: Tensor, unit: Tensor
) -> Tensor:
    """Find by Gauss-Newton how far (n, 2) patches of image 1 move, in samples of a level.

    Args:
        template: n patches of image 0.
        view: image 1.
        frame: (n, 2, 2), a sample in px.
        grid: (n, SIDE^2, 2), where the patches start.
        unit: (n, 2), a px in the units of the grid.
    """
    moved = torch.zeros_like(unit)
    # Indices of the matches that have not converged, and their tensors
    rows = torch.arange(len(moved), device=moved.device)
    active = [template, frame, grid, unit]
    for _ in range(ITERATIONS):
        template, frame, grid, unit = active
        shift = multiply_vectors(frame, moved[rows])
        step = template.step(view.read(grid + (shift * unit)[:, None]))[0]
        length = step.norm(dim=1, keepdim=True)
        moved[rows] -= step * (LONGEST / length.clamp(min=LONGEST))
        is_moving = length[:, 0] > SETTLED
        # Dropping a few matches would take longer than moving them.
        if 2 * int(is_moving.sum()) < len(rows):
            rows = rows[is_moving]
            active = [tensor[is_moving] for tensor in active]
        if not len(rows):
            break
    return moved


class _SampledImage:
    """An image, and K points whose patches are sampled from it.

    The levels of the image, each half as large as the one before, lie one below another in one
    picture, so that patches of different levels are read together.

    Attributes:
        points: (K, 2) px.
        frame: (K, 2, 2), the steps to the next sample on the right, and below, in px.
        octave: (K,), log2 of a sample in px.
        last: (levels, 2), the last sample of each level, in px of the image.
        unit, begin: (levels, 2), a px of the image, and the first sample of each level, both in the
            units of grid_sample, which are from -1 to 1 over the picture.
    """

    def __init__(
        self,
        gray: np.ndarray,
        points: np.ndarray,
        frame: np.ndarray,
        octave: np.ndarray,
        levels: int,
        device: Device,
    ) -> None:
        self.points, self.frame, self.octave = (
            to_tensor(values, device) for values in (points, frame, octave)
        )
        pictures = [cv2.GaussianBlur(gray.astype(np.float32), (0, 0), SMOOTHING_PX)]
        for _ in range(levels):
            pictures.append(cv2.pyrDown(pictures[-1]))
        sizes = np.array([picture.shape[::-1] for picture in pictures])
        tops = np.cumsum(sizes[:, 1]) - sizes[:, 1]
        whole = np.zeros((sizes[:, 1].sum(), sizes[0, 0]), np.float32)
        for top, picture in zip(tops, pictures):
            whole[top : top + picture.shape[0], : picture.shape[1]] = picture
        self.picture = to_tensor(whole, device)[None, None]
        # grid_sample needs the units and positions of the levels in this picture.
        scale = 2.0 ** -np.arange(levels + 1)
        unit = 2.0 / np.maximum(np.array(whole.shape[::-1]) - 1, 1)
        self.last = to_tensor((sizes - 1) / scale[:, None], device)
        self.unit = to_tensor(scale[:, None] * unit, device)
        self.begin = to_tensor(np.stack([np.zeros(len(tops)), tops], 1) * unit - 1.0, device)

    def sample_positions(
        self,
        offsets: Tensor,
        rows: Union[slice, Tensor] = slice(None),
        level: int = 0,
        shift: Union[float, Tensor] = 0.0,
    ) -> Tuple[Tensor, Tensor]:
        """Compute the positions of the samples around shifted points.

        Args:
            offsets: (s s, 2), where samples lie from their point, in samples.
            rows: indices of n points.
            level: how many levels coarser than the finest one of a match.
            shift: (n, 2) px.

        Returns:
            The positions (n, s s, 2) px, and the level (n,) on which to read them.
        """
        frame = self.frame[rows] * 2.0**level
        positions = (self.points[rows] + shift)[:, None] + offsets @ frame.transpose(1, 2)
        return positions, (self.octave[rows] + level).round().long()

    def to_grid(self, points: Tensor, level: Tensor) -> Tensor:
        """Convert points (K, n, 2) px, on level (K,), to the units of grid_sample for `read`."""
        return points * self.unit[level][:, None] + self.begin[level][:, None]

    def read(self, grid: Tensor) -> Tensor:
        """Read the gray levels (K, n) at `grid` (K, n, 2), interpolated linearly."""
        sampled = torch.nn.functional.grid_sample(
            self.picture, grid[None], align_corners=True, padding_mode="border"
        )
        # (1, 1, K, n) -> (K, n)
        return sampled[0, 0]

    def contains(self, points: Tensor, level: Tensor) -> Tensor:
        """Return whether each patch lies inside the image on its level, (K,) bool.

        Args:
            points: (K, n, 2), the samples of each patch, in px of the image.
            level: (K,), the level of each patch.
        """
        width = round(points.shape[1] ** 0.5)
        corners = points[:, [0, width - 1, width * (width - 1), width * width - 1]]
        return ((corners >= 0) & (corners <= self.last[level][:, None])).flatten(1).all(1)


def multiply_vectors(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Multiply each matrix (n, i, j) by its vector (n, j); return (n, i)."""
    return (matrices @ vectors[..., None])[..., 0]


def to_tensor(values: np.ndarray, device: Device) -> Tensor:
    """Copy values to a float32 tensor on `device`."""
    return torch.as_tensor(values, dtype=torch.float32, device=device)


class Template:
    """Patches of image 0, prepared for Gauss-Newton.

    Samples are normalized to weighted mean 0 and deviation 1. Gain and offset are projected out of
    the gradient, so that the shift is solved for jointly with both.
    """

    def __init__(self, samples: Tensor, weight: Tensor) -> None:
        """Prepare patches.

        Args:
            samples: (n, (SIDE + 2)^2).
            weight: (SIDE^2,), as from `make_patch_offsets`.
        """
        self.weight = weight
        inner, x, y = compute_gradient(samples)
        self.mean = samples.mean(1, keepdim=True)
        # Normalize the samples to weighted mean 0 and deviation 1.
        centered = inner - self.mean
        centered = centered - (centered @ weight)[:, None]
        self.spread = sqrt((centered**2) @ weight)
        template = centered / self.spread.clamp(min=FLAT)[:, None]
        # Project offset and gain out of the gradient (n, 2, s s).
        gradient = torch.stack([x, y], 1) / self.spread.clamp(min=FLAT)[:, None, None]
        gradient = gradient - (gradient @ weight)[..., None]
        gradient = gradient - (gradient @ (template * weight)[..., None]) * template[:, None]
        # Invert the Hessian once. One product with `rows` then gives all sums of a step.
        weighted = gradient * weight
        self.inverse, self.unknown = _invert_hessians(weighted @ gradient.transpose(1, 2))
        others = torch.stack([template * weight, weight.expand_as(template)], 1)
        self.rows = torch.cat([weighted, others], 1)  # (n, 4, s s)

    def __getitem__(self, mask: Tensor) -> Template:
        """Return the patches where `mask` (n,) is True, for `step` only."""
        part = copy.copy(self)
        for name in ("mean", "spread", "inverse", "rows"):
            setattr(part, name, getattr(self, name)[mask])
        return part

    def step(self, samples: Tensor) -> Tuple[Tensor, Tensor]:
        """Compare the patches with samples of image 1 (n, s s).

        Returns:
            The shift (n, 2) to undo, and the correlation (n,) with the template.
        """
        samples = samples - self.mean
        # (n, 4, s s) and (n, s s, 1) -> (n, 4): sums with both gradients, the template, the weights
        sums = multiply_vectors(self.rows, samples)
        spread = sqrt(((samples**2) @ self.weight - sums[:, 3] ** 2).clamp(min=0))
        flat = (spread < FLAT) | (self.spread < FLAT)
        spread = spread.clamp(min=FLAT)
        correlation = (sums[:, 2] / spread).masked_fill(flat, float("nan"))
        return multiply_vectors(self.inverse, sums[:, :2] / spread[:, None]), correlation

    def compute_deviation(self, correlation: Tensor, blur: float = 0.0) -> Tensor:
        """Compute the standard deviation of the shift along each axis, (n,) in samples.

        Args:
            correlation: (n,), as from `step`, which gives the residual.
            blur: deviation of the blur added to one image, in samples. The residuals of two samples
                at a distance d correlate by exp(-d^2 / (4 s^2)), with s the deviation of all
                smoothing. The covariance sums over all pairs of samples. What samples have in
                common in the whole patch is not in the residual, since its mean was made 0. Without
                added blur, the covariance is CORRELATED times that of independent samples.
        """
        residual = (2.0 - 2.0 * correlation).clamp(min=0)  # Mean square difference
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
        # Along an edge, the pixels say nothing, and only SIFT's position is known.
        return sqrt((factor * residual * trace + two_view.SCATTER_PX**2 * self.unknown) / 2)


def make_patch_offsets(device: Device) -> Tuple[Tensor, Tensor, Tensor]:
    """Make the offsets of the samples of a patch, and their weights.

    Returns:
        Three tensors:
        - ((SIDE + 2)^2, 2), the offsets of the samples with a margin of one sample,
        - (SIDE^2, 2), the offsets without the margin,
        - (SIDE^2,), the weights of the samples without the margin. Their sum is 1.
    """
    # Samples are one unit apart, around the keypoint in the middle.
    line = torch.arange(-RADIUS - 1.0, RADIUS + 2.0, dtype=torch.float32, device=device)
    x = line.expand(len(line), -1)
    square = torch.stack([x, x.t()], 2)
    inner = torch.exp(-0.5 * (line[1:-1] / WIDTH) ** 2)
    weight = (inner[:, None] * inner).flatten()
    return square.flatten(0, 1), square[1:-1, 1:-1].flatten(0, 1), weight / weight.sum()


def compute_gradient(samples: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of patches (n, (SIDE + 2)^2) in x and y.

    Returns:
        The inner samples of the patches, and their gradients in x and y, (n, SIDE^2) each.
    """
    square = samples.view(-1, SIDE + 2, SIDE + 2)
    # Central differences need the margin of one sample.
    x = (square[:, 1:-1, 2:] - square[:, 1:-1, :-2]).flatten(1) / 2
    y = (square[:, 2:, 1:-1] - square[:, :-2, 1:-1]).flatten(1) / 2
    return square[:, 1:-1, 1:-1].flatten(1), x, y


def compute_gradient_energy(samples: Tensor, weight: Tensor) -> Tensor:
    """Compute gradient energy over variance (n,) of patches (n, (SIDE + 2)^2).

    It is 0 for flat patches.
    """
    inner, x, y = compute_gradient(samples)
    variance = (inner**2) @ weight - (inner @ weight) ** 2
    energies = ((x**2 + y**2) @ weight) / variance.clamp(min=FLAT**2)
    return energies.masked_fill(variance < FLAT**2, 0.0)


def _invert_hessians(hessian: Tensor) -> Tuple[Tensor, Tensor]:
    """Invert Hessians (n, 2, 2), except along directions without structure.

    Returns:
        The inverses (n, 2, 2), and how many directions of each have no structure, (n,) in the dtype
        of the Hessians.
    """
    values, vectors = torch.linalg.eigh(hessian)  # Eigenvalues ascend
    has_structure = values > (EDGE * values[:, 1:]).clamp(min=1e-6)
    inverse = (1.0 / values.clamp(min=1e-6)).masked_fill(~has_structure, 0.0)
    inverses = (vectors * inverse[:, None]) @ vectors.transpose(1, 2)
    return inverses, (~has_structure).sum(1).to(hessian.dtype)
