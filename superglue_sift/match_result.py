"""Hold the matches of two images, fit geometries to them, and draw them.

Positions are in pixels of the files. The limits of inliers were chosen in images of about
`two_view.REFERENCE_PX`, and are multiplied for larger files (`two_view.compute_reduction_factor`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Dict, NamedTuple, Optional, Tuple

import numpy as np

from superglue_sift.drawing import Panel, Picture, draw_panels, write_legend
from superglue_sift.features.extraction import Image, load_photo_for_drawing
from superglue_sift.features.features import Features
from superglue_sift.features.images import STORED, UPRIGHT, Photo
from superglue_sift.geometry import refinement, two_view
from superglue_sift.geometry.pose import (
    MIN_ESSENTIAL,
    POSE_PX,
    ROTATION_SAMPLE,
    estimate_relative_pose,
)
from superglue_sift.geometry.two_view import Size
from superglue_sift.matches import Matches

FIT_NAMES = {"homography": "plane", "fundamental": "camera motion"}  # Names of `fits` in pictures
# Attributes that are None unless the positions of the matches were refined
REFINED = ("refined0", "refined1", "deviations", "correlations")
# A match is an inlier of a homography or a fundamental matrix up to this distance, in pixels of an
# image reduced to `two_view.REFERENCE_PX`.
FIT_PX = 3.0


class Fit(NamedTuple):
    """A homography or fundamental matrix that was fitted robustly to K matches.

    Attributes:
        model: (3, 3) float64, or None.
        inliers: (K,) bool.
        supported: whether most matches agree with the model, and more than by chance.
    """

    model: Optional[np.ndarray]
    inliers: np.ndarray
    supported: bool


class Pose(NamedTuple):
    """Pose of camera 1 relative to camera 0: x1 = R x0 + s t. The scale s is not known.

    If t is None and R is not, the matches show no parallax: a camera that only rotates explains
    them, so the direction in which it moved cannot be known, and no depth either.

    Attributes:
        R: (3, 3) rotation, or None.
        t: (3,) of length 1, or None.
        inliers: (K,) bool.
        supported: whether most matches agree with the pose, and more than by chance.
    """

    R: Optional[np.ndarray]
    t: Optional[np.ndarray]
    inliers: np.ndarray
    supported: bool


@dataclass(frozen=True, eq=False, repr=False)
class MatchResult:
    """Matches of two images, in the order of image 0's keypoints.

    The attributes `refined0`, `refined1`, `deviations` and `correlations` describe refined
    positions (`refinement.refine`). They are None if the result was not refined.

    Attributes:
        keypoints0, keypoints1: (M, 2) and (N, 2) float32 px of the files, in `frame`.
        scored_matches: the K matches, see `matches` and `scores`.
        size0, size1: (width, height) of the files in px.
        refined0, refined1: (K, 2) float32 px, refined positions of each match. Where refinement
            failed, they are SIFT's.
        deviations: (K,) float32, standard deviation in px of image 1 along each axis. It is NaN
            where refinement failed.
        correlations: (K,) float32, from -1 to 1, of both patches. It is NaN where a patch leaves
            its image or is flat.
        pair_score: probability that both images show one place (`Matcher.load(scene=True)`). It is
            0 for a pair that was skipped, and None without `scene`.
        threshold: a number that all scores exceed. It is None if it is not known.
        frame: "upright" for pixels rotated according to EXIF, or "stored" (`images`).
        turned: the EXIF orientation that was undone, of each image.
        images: the matched images, for `show`, or None for features without their image.

    Example:
        >>> keypoints0 = np.float32([[10, 10], [90, 20], [70, 80], [20, 60], [50, 40]])
        >>> indices = np.array([[0, 0], [1, 1], [2, 2], [3, 3]])
        >>> matches = Matches(indices, np.float32([1, 0.9, 0.5, 0.4]))
        >>> result = MatchResult(keypoints0, keypoints0 + 5, matches, (100, 100), (100, 100))
        >>> result
        MatchResult(4 matches; 100x100 px with 5 keypoints, 100x100 px with 5 keypoints)
        >>> result.points1[0].tolist()
        [15.0, 15.0]
        >>> result.keep_above(0.8).matches.tolist()
        [[0, 0], [1, 1]]
        >>> result.to_dense()[0].tolist()
        [0, 1, 2, 3, -1]
        >>> H = result.fit_homography().model
        >>> bool(np.allclose(H, [[1, 0, 5], [0, 1, 5], [0, 0, 1]], atol=1e-3))
        True
        >>> result.fit_homography().supported  # any four matches fit a homography
        False
    """

    keypoints0: np.ndarray
    keypoints1: np.ndarray
    scored_matches: Matches
    size0: Size
    size1: Size
    refined0: Optional[np.ndarray] = None
    refined1: Optional[np.ndarray] = None
    deviations: Optional[np.ndarray] = None
    correlations: Optional[np.ndarray] = None
    pair_score: Optional[float] = None
    threshold: Optional[float] = None
    frame: str = UPRIGHT
    turned: Tuple[int, int] = (1, 1)
    images: Tuple[Optional[Image], Optional[Image]] = (None, None)
    _fits: Dict[Any, Any] = field(default_factory=dict, init=False)

    def __repr__(self) -> str:
        images = ", ".join(
            f"{size[0]}x{size[1]} px with {len(keypoints)} keypoints"
            for size, keypoints in ((self.size0, self.keypoints0), (self.size1, self.keypoints1))
        )
        above = "" if self.threshold is None else f" above {self.threshold:.2f}"
        scene = "" if self.pair_score is None else f", pair score {self.pair_score:.2f}"
        return f"MatchResult({len(self.matches)} matches{above}{scene}; {images})"

    @property
    def matches(self) -> np.ndarray:
        """Return the matches, (K, 2) int64 indices into keypoints0 and keypoints1.

        Each index occurs at most once.
        """
        return self.scored_matches.indices

    @property
    def scores(self) -> np.ndarray:
        """Return the probability of each match, (K,) float32.

        A guided match has the mean of the matches around it. With `scene`, a match of the ratio
        test has one minus the ratio of distances.
        """
        return self.scored_matches.scores

    @property
    def points0(self) -> np.ndarray:
        """Return the positions of the matches in image 0, (K, 2) float32 px.

        They are refined if they can be.
        """
        return self.keypoints0[self.matches[:, 0]] if self.refined0 is None else self.refined0

    @property
    def points1(self) -> np.ndarray:
        """Return the positions of the matches in image 1, (K, 2) float32 px.

        They are refined if they can be.
        """
        return self.keypoints1[self.matches[:, 1]] if self.refined1 is None else self.refined1

    @classmethod
    def of(cls, features0: Features, features1: Features, matches: Matches) -> MatchResult:
        """Build a result from the matches of two images' features.

        Args:
            features0, features1: features of both images.
            matches: the matches of their keypoints.
        """
        return cls(
            features0.keypoints,
            features1.keypoints,
            matches,
            features0.image_size,
            features1.image_size,
            frame=STORED if STORED in (features0.frame, features1.frame) else UPRIGHT,
            turned=(features0.turned, features1.turned),
            images=(features0.image, features1.image),
        )

    def to_dense(self, image: int = 0) -> Tuple[np.ndarray, np.ndarray]:
        """Return the match of each keypoint of one image in the other, and its score.

        Args:
            image: the image, 0 or 1.

        Returns:
            The index of the match, int64, or -1 without a match, and the score, float32, or 0
            without a match. Both are (M,) for image 0, and (N,) for image 1.
        """
        # For image 1, the columns of the indices change places.
        if image == 0:
            return self.scored_matches.to_dense(len(self.keypoints0))
        return Matches(self.matches[:, ::-1], self.scores).to_dense(len(self.keypoints1))

    def keep_above(self, threshold: float) -> MatchResult:
        """Keep the matches with a score above `threshold`."""
        highest = max(threshold, self.threshold or 0.0)
        return replace(self.select(self.scores > threshold), threshold=highest)

    def select(self, index: np.ndarray) -> MatchResult:
        """Keep some of the matches.

        Args:
            index: (K,) bool, whether each match is kept, or (k,) indices of the matches.
        """
        arrays = {name: getattr(self, name) for name in REFINED}
        refined = {name: array[index] for name, array in arrays.items() if array is not None}
        return replace(self, scored_matches=self.scored_matches.select(index), **refined)

    def refine(self, features0: Features, features1: Features, device: str = "cpu") -> MatchResult:
        """Refine the positions by the pixels of both images (`refinement.refine`).

        Args:
            features0, features1: the features of both images that were matched.
            device: torch device for the computation.

        Returns:
            The refined result, or this one if the features have no pixels.
        """
        if features0.gray is None or features1.gray is None:
            return self
        index0, index1 = self.matches.T
        refined0 = self.keypoints0[index0]
        refined1, deviations, correlations = refinement.refine(
            (features0.gray, features1.gray),
            (refined0, self.keypoints1[index1]),
            (features0.scales[index0], features1.scales[index1]),
            (features0.oris[index0, 0], features1.oris[index1, 0]),
            (self.size0, self.size1),
            device,
        )
        return replace(
            self,
            refined0=refined0,
            refined1=refined1,
            deviations=deviations,
            correlations=correlations,
        )

    @property
    def accepted(self) -> bool:
        """Return whether a pair has matches of one place.

        It is False for a pair of a scene that was rejected, or of which no matches were kept. It is
        always True without `scene`.
        """
        return self.pair_score is None or len(self.matches) > 0

    def fit_homography(self, threshold_px: Optional[float] = None) -> Fit:
        """Fit a robust homography from pixels of image 0 to image 1 (`two_view.fit_homography`).

        Args:
            threshold_px: maximum distance of an inlier, in pixels of image 1. If None, it is 3 px
                of the image reduced to 1,024 px. Smaller images are not reduced.

        Returns:
            The fit. Its model is None for fewer than four matches, and where matches only fit a
            mirror image. `supported` says whether most matches agree with it, and more than by
            chance.

        Example:
            >>> keypoints0 = np.random.default_rng(0).uniform(0, 500, (50, 2))
            >>> keypoints1 = 2 * keypoints0 + [10, 20]
            >>> matches = Matches(np.stack([np.arange(50)] * 2, axis=1), np.ones(50))
            >>> result = MatchResult(keypoints0, keypoints1, matches, (500, 500), (1010, 1020))
            >>> fit = result.fit_homography()
            >>> bool(np.allclose(fit.model, [[2, 0, 10], [0, 2, 20], [0, 0, 1]], atol=1e-3))
            True
            >>> int(fit.inliers.sum()), fit.supported
            (50, True)
        """
        return self._fit("homography", threshold_px)

    def fit_fundamental(self, threshold_px: Optional[float] = None) -> Fit:
        """Fit a robust fundamental matrix F, x1^T F x0 = 0 (`two_view.fit_fundamental`).

        Args:
            threshold_px: maximum distance of an inlier from epipolar lines, in pixels of image 1.
                If None, it is 3 px of the image reduced to 1,024 px. Smaller images are not
                reduced.

        Returns:
            The fit. Its model is None for fewer than eight matches. `supported` says whether most
            matches agree with it, and more than by chance.

        Example:
            >>> keypoints0 = np.random.default_rng(0).uniform(0, 500, (50, 2))
            >>> keypoints1 = keypoints0.copy()
            >>> keypoints1[:, 0] -= 100 / np.linspace(1, 5, 50)  # a step to the right
            >>> matches = Matches(np.stack([np.arange(50)] * 2, axis=1), np.ones(50))
            >>> fit = MatchResult(
            ...     keypoints0, keypoints1, matches, (500, 500), (500, 500)
            ... ).fit_fundamental()
            >>> distances = two_view.compute_epipolar_distances(fit.model, keypoints0, keypoints1)
            >>> bool(distances.max() < 0.1), fit.supported
            (True, True)
        """
        return self._fit("fundamental", threshold_px)

    def _fit(self, name: str, threshold_px: Optional[float]) -> Fit:
        """Fit a model once for each threshold, since a result does not change."""
        if (name, threshold_px) in self._fits:
            return self._fits[name, threshold_px]
        factors = self._limit_factors
        limit = FIT_PX if threshold_px is None else threshold_px / factors[1]
        points = self.points0.astype(np.float64), self.points1.astype(np.float64)
        is_line = name == "fundamental"
        if is_line:
            sample = two_view.FUNDAMENTAL_SAMPLE
            model, inliers = two_view.fit_fundamental(*points, limit, factors)
        else:
            sample = two_view.MIN_POINTS
            model, inliers = two_view.fit_homography(*points, limit, self.deviations, factors[1])
        limit *= factors[1]
        supported = two_view.is_supported(inliers, limit, self.size1, sample, is_line)
        fit = Fit(model, inliers, supported)
        self._fits[name, threshold_px] = fit
        return fit

    @property
    def _limit_factors(self) -> Tuple[float, float]:
        """Return px of each file per px of the image for which limits were chosen."""
        factor0, factor1 = map(two_view.compute_reduction_factor, (self.size0, self.size1))
        return factor0, factor1

    def estimate_relative_pose(
        self, K0: np.ndarray, K1: np.ndarray, threshold_px: Optional[float] = None
    ) -> Pose:
        """Estimate the relative pose of both cameras (`pose.estimate_relative_pose`).

        Args:
            K0, K1: (3, 3) px of the files, intrinsics of the cameras.
            threshold_px: maximum distance of an inlier from epipolar lines, in pixels of image 1.
                If None, it is 0.6 px of the image reduced to 1,024 px. Smaller images are not
                reduced.

        Returns:
            The pose. R and t are None without a solution. If t alone is None, the matches show no
            parallax: the images are identical, or the camera only rotated.

        Raises:
            RequestError: If PoseLib is not installed.

        Example:
            >>> K = np.array([[400.0, 0, 250], [0, 400, 250], [0, 0, 1]])
            >>> keypoints0 = np.random.default_rng(0).uniform(0, 500, (50, 2))
            >>> keypoints1 = keypoints0.copy()
            >>> keypoints1[:, 0] -= 100 / np.linspace(1, 5, 50)  # a step to the right
            >>> matches = Matches(np.stack([np.arange(50)] * 2, axis=1), np.ones(50))
            >>> result = MatchResult(keypoints0, keypoints1, matches, (500, 500), (500, 500))
            >>> pose = result.estimate_relative_pose(K, K)
            >>> bool(np.allclose(pose.R, np.eye(3), atol=1e-3))
            True
            >>> bool(np.allclose(pose.t, [-1, 0, 0], atol=1e-3))  # its length is not known
            True
        """
        K0, K1 = (np.asarray(K, np.float64) for K in (K0, K1))
        points = self.points0.astype(np.float64), self.points1.astype(np.float64)
        factors = self._limit_factors
        limit = POSE_PX if threshold_px is None else threshold_px / factors[1]
        R, t, inliers = estimate_relative_pose(*points, K0, K1, limit, factors)
        if R is None:
            return Pose(R, t, inliers, False)
        # Supported are poses whose homography, or fundamental matrix, is supported.
        if t is None:
            H = K1 @ R @ np.linalg.inv(K0)
            distances = np.linalg.norm(two_view.transform(points[0], H) - points[1], axis=1)
            is_near = distances <= FIT_PX * factors[1]
        else:
            E = two_view.compute_essential_matrix(R, t)
            F = np.linalg.inv(K1).T @ E @ np.linalg.inv(K0)
            is_near = two_view.compute_epipolar_distances(F, *points, factors) <= FIT_PX
        sample = ROTATION_SAMPLE if t is None else MIN_ESSENTIAL
        limit = FIT_PX * factors[1]
        supported = two_view.is_supported(is_near, limit, self.size1, sample, t is not None)
        return Pose(R, t, inliers, supported)

    def fit_models(self) -> Dict[str, Fit]:
        """Return the robust homography and fundamental matrix, by name."""
        return {"homography": self.fit_homography(), "fundamental": self.fit_fundamental()}

    def describe_fits(self) -> str:
        """Describe how many matches fit one camera motion, and how many of these one plane.

        A model is left out if the matches do not support it (`Fit.supported`).
        """
        # A rigid scene supports F; a plane supports H as well.
        total = len(self.matches)
        motion = self.fit_fundamental()
        plane = self.fit_homography()
        if not motion.supported and not plane.supported:
            return f"{total} matches, which support no camera motion and no plane"
        # Count the matches that fit both models, or the plane alone without a camera motion.
        in_plane = int((plane.inliers & (motion.inliers | (not motion.supported))).sum())
        if not motion.supported:
            return f"{in_plane} of {total} matches fit one plane"
        text = f"{int(motion.inliers.sum())} of {total} matches fit one camera motion"
        return f"{text}, {in_plane} of them one plane" if plane.supported else text

    def summarize(self) -> str:
        """Describe in two lines what the matches fit, and how many there are.

        The second line has the numbers of keypoints and of refined matches, and whether a pair of a
        scene was accepted.
        """
        parts = [f"keypoints {len(self.keypoints0)} and {len(self.keypoints1)}"]
        if self.deviations is not None:
            deviations = self.deviations[np.isfinite(self.deviations)]
            parts.append(f"{len(deviations)} matches refined")
            if len(deviations):
                parts[-1] += f", to {np.median(deviations):.2f} px at the median"
        if self.pair_score is not None:
            verdict = "accepted" if self.accepted else "not accepted"
            parts.append(f"one place with probability {self.pair_score:.2f}: {verdict}")
        return f"{self.describe_fits()}\n{'; '.join(parts)}"

    def show(
        self,
        image0: Optional[Image] = None,
        image1: Optional[Image] = None,
        *,
        captions: bool = True,
    ) -> Picture:
        """Draw the matches (`drawing`). Outliers of the fit with more inliers are red.

        Args:
            image0, image1: the images, if features without their images were matched.
            captions: whether to write lines of text into the picture. A page may have them as text.

        Returns:
            The picture. A notebook shows it, and `.save("matches.png")` writes it.

        Raises:
            RequestError: If an image is missing or cannot be read.

        Example:
            >>> keypoints = np.float32([[10, 10], [90, 20], [70, 80], [20, 60]])
            >>> matches = Matches(np.stack([np.arange(4)] * 2, axis=1), np.ones(4))
            >>> result = MatchResult(keypoints, keypoints, matches, (100, 100), (100, 100))
            >>> image = np.zeros((100, 100), np.uint8)
            >>> result.show(image, image, captions=False)  # 8 px between the images
            Picture(208x100 px; .save(path) writes it)
        """
        photos = self.load_photos(image0, image1)
        points0, points1 = (
            two_view.transform(points.astype(np.float64), photo.to_shown)
            for points, photo in zip((self.points0, self.points1), photos)
        )
        # Only a model that the matches support tells which of them are wrong.
        fits = self.fit_models()
        name = max(fits, key=lambda name: int(fits[name].inliers.sum()))
        fit = fits[name]
        is_outlier = ~fit.inliers & fit.supported
        wrong_means = f"matches that do not fit the {FIT_NAMES[name]}"
        panel = Panel(self.describe_fits(), points0, points1, self.scores, is_outlier, wrong_means)
        pixels = draw_panels(photos[0].pixels, photos[1].pixels, [panel], captions)
        return Picture(pixels, write_legend([panel]))

    def load_photos(
        self, image0: Optional[Image] = None, image1: Optional[Image] = None
    ) -> Tuple[Photo, Photo]:
        """Return both images upright, for drawing.

        Args:
            image0, image1: the images, if features without their images were matched.

        Raises:
            RequestError: If an image is missing or cannot be read.
        """
        images: Any = [
            matched if image is None else image
            for matched, image in zip(self.images, (image0, image1))
        ]
        photo0, photo1 = (load_photo_for_drawing(image, self.frame) for image in images)
        return photo0, photo1
