"""The matches of two images: their positions, the geometry they fit, and a picture of them."""

from __future__ import annotations

from typing import Callable, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple, TypeVar

import numpy as np

from superglue_sift import drawing, geometry, refine, stamps
from superglue_sift.errors import RequestError
from superglue_sift.features import Features, Image, photo_of
from superglue_sift.images import UPRIGHT, Photo
from superglue_sift.sift import positions

FIT_NAMES = {"homography": "homography", "fundamental": "fundamental matrix"}  # keys of `fits`
INLIER_PX = 3.0  # distance up to which a match fits a homography or an epipolar line
POSE_PX = 1.0  # the same for an essential matrix
Fitted = TypeVar("Fitted", geometry.Fit, geometry.Pose)


class MatchResult(NamedTuple):
    """Matches of two images, in the order of image 0's keypoints.

    keypoints0 (M, 2), keypoints1 (N, 2): float32 pixels of the original images, in `frame`.
    matches: (K, 2) int64, index into keypoints0 and into keypoints1; each index at most once.
    scores: (K,) float32, probability of each match.
    size0, size1: (width, height).

    After alignment by the pixels (`refine.align`), else None: aligned0, aligned1: (K, 2) float32
    px, aligned positions of each match; SIFT's where alignment failed.
    deviations: (K,) float32, standard deviation in px of image 1 along each axis; NaN where
    alignment failed.
    correlations: (K,) float32, -1 to 1, of both patches; NaN where a patch leaves its image or is
    flat.
    pair_score: number of strict matches that agree with one geometry (`Matcher.load(scene=True)`),
        -1 of a pair that was skipped; None without `scene`.

    threshold: all scores exceed it; None if it is not known.
    frame: "upright", pixels rotated according to EXIF, or "stored" (`images`); turned: the EXIF
        orientation of each image that was undone.
    images: the matched images, for `show`; None for features without their image.
    """

    keypoints0: np.ndarray
    keypoints1: np.ndarray
    matches: np.ndarray
    scores: np.ndarray
    size0: Tuple[int, int]
    size1: Tuple[int, int]
    aligned0: Optional[np.ndarray] = None
    aligned1: Optional[np.ndarray] = None
    deviations: Optional[np.ndarray] = None
    correlations: Optional[np.ndarray] = None
    pair_score: Optional[int] = None
    threshold: Optional[float] = None
    frame: str = UPRIGHT
    turned: Tuple[int, int] = (1, 1)
    images: Tuple[Optional[Image], Optional[Image]] = (None, None)

    def __repr__(self) -> str:
        sides = ", ".join(
            f"{size[0]}x{size[1]} px with {len(keypoints)} keypoints"
            for size, keypoints in ((self.size0, self.keypoints0), (self.size1, self.keypoints1))
        )
        above = "" if self.threshold is None else f" above {self.threshold:.2f}"
        scene = "" if self.pair_score is None else f", pair score {self.pair_score}"
        return f"MatchResult({len(self.matches)} matches{above}{scene}; {sides})"

    @property
    def points0(self) -> np.ndarray:
        """(K, 2) float32: positions of the matches in image 0, aligned if available, else the
        keypoints.
        """
        return self.keypoints0[self.matches[:, 0]] if self.aligned0 is None else self.aligned0

    @property
    def points1(self) -> np.ndarray:
        """(K, 2) float32: the same in image 1."""
        return self.keypoints1[self.matches[:, 1]] if self.aligned1 is None else self.aligned1

    @classmethod
    def of(
        cls, features0: Features, features1: Features, matches: np.ndarray, scores: np.ndarray
    ) -> MatchResult:
        """Build a result from `matches` (K, 2) and `scores` (K,), or both (M,) as `dense` returns
        them.
        """
        if matches.ndim == 1:
            index0 = np.flatnonzero(matches >= 0)
            matches = np.stack([index0, matches[index0]], axis=1)
            scores = scores[index0]
        result = cls(
            features0.keypoints,
            features1.keypoints,
            matches,
            scores,
            features0.size,
            features1.size,
        )
        turned = (features0.turned, features1.turned)
        images = (features0.image, features1.image)
        return result._replace(frame=features0.frame, turned=turned, images=images)

    def dense(self, side: int = 0) -> Tuple[np.ndarray, np.ndarray]:
        """Partner of each keypoint of image `side` in the other image, or -1, int64; and its score,
        or 0, float32.
        """
        count = len(self.keypoints1 if side else self.keypoints0)
        partners = np.full(count, -1, np.int64)
        scores = np.zeros(count, np.float32)
        index = self.matches[:, side]
        partners[index] = self.matches[:, 1 - side]
        scores[index] = self.scores
        return partners, scores

    def above(self, threshold: float) -> MatchResult:
        """The matches with a score above `threshold`."""
        highest = threshold if self.threshold is None else max(threshold, self.threshold)
        return self.only(self.scores > threshold)._replace(threshold=highest)

    def only(self, chosen: np.ndarray) -> MatchResult:
        """The chosen matches only. chosen: (K,) bool, or indices."""
        by_match = ("matches", "scores", "aligned0", "aligned1", "deviations", "correlations")
        given = {name: getattr(self, name) for name in by_match}
        return self._replace(
            **{name: None if values is None else values[chosen] for name, values in given.items()}
        )

    def align(self, features0: Features, features1: Features, device: str = "cpu") -> MatchResult:
        """Align the positions by the pixels of both images (`refine.align`); without pixels, return
        self.
        """
        if features0.gray is None or features1.gray is None:
            return self
        gray0 = features0.gray
        gray1 = features1.gray
        small0 = features0.resized((gray0.shape[1], gray0.shape[0]))
        small1 = features1.resized((gray1.shape[1], gray1.shape[0]))
        records0 = small0.records[self.matches[:, 0]]
        records1 = small1.records[self.matches[:, 1]]
        aligned = refine.align(gray0, gray1, records0, records1, device=device)
        if features0.size == small0.size and features1.size == small1.size:
            return self._replace(**aligned._asdict())
        points0 = self.keypoints0[self.matches[:, 0]]
        points1 = self.keypoints1[self.matches[:, 1]]
        unit = np.float32(max(features1.size) / max(small1.size))
        points1 = points1 + (aligned.aligned1 - positions(records1)) * unit
        return self._replace(
            aligned0=points0,
            aligned1=points1,
            deviations=aligned.deviations * unit,
            correlations=aligned.correlations,
        )

    @property
    def accepted(self) -> bool:
        """False if a pair of a scene was rejected."""
        return self.pair_score is None or len(self.matches) > 0

    def stamped(self) -> np.ndarray:
        """(K,) bool: matches of a date bar, a logo or a watermark of both images (`stamps`).

        No geometry uses them.
        """
        sides = (self.points0, self.points1, self.keypoints0, self.keypoints1)
        return stamps.find_stamps(*sides, self.size0, self.size1)

    def homography(self, threshold_px: float = INLIER_PX) -> geometry.Fit:
        """Robust homography from pixels of image 0 to image 1; its model is None for fewer than
        four matches.

        None, too, where matches only fit a mirror image. threshold_px: distance in image 1 up to
        which a match is an inlier. See `geometry.fit_homography`.
        """
        return self._fit(
            lambda r: geometry.fit_homography(r.points0, r.points1, threshold_px, r.deviations)
        )

    def fundamental(self, threshold_px: float = INLIER_PX) -> geometry.Fit:
        """Robust fundamental matrix F, x1^T F x0 = 0; its model is None for fewer than eight
        matches.

        threshold_px: distance from epipolar lines. See `geometry.fit_fundamental`.
        """
        return self._fit(lambda r: geometry.fit_fundamental(r.points0, r.points1, threshold_px))

    def _fit(self, fit: Callable[[MatchResult], Fitted]) -> Fitted:
        """`fit` of the matches that lie on no stamp; the others are outliers."""
        kept = ~self.stamped()
        found = fit(self.only(kept))
        inliers = np.zeros(len(kept), bool)
        inliers[kept] = found.inliers
        return found._replace(inliers=inliers)

    def fits(self) -> Dict[str, geometry.Fit]:
        """The robust homography and fundamental matrix, by name."""
        return {"homography": self.homography(), "fundamental": self.fundamental()}

    def relative_pose(
        self, K0: np.ndarray, K1: np.ndarray, threshold_px: float = POSE_PX
    ) -> geometry.Pose:
        """Relative pose of two cameras with intrinsics K0, K1 (3, 3) in pixels; R and t are None
        without a solution.

        threshold_px: inlier distance, in pixels of the mean focal length. Raises ValueError for
        intrinsics of another shape. See `geometry.relative_pose`.
        """
        return self._fit(
            lambda r: geometry.relative_pose(
                r.points0, r.points1, K0, K1, threshold_px, r.deviations
            )
        )

    def show(
        self, image0: Optional[Image] = None, image1: Optional[Image] = None
    ) -> drawing.Picture:
        """Draw the matches (`drawing`); a notebook shows the picture, `.save("matches.png")` writes
        it.

        image0, image1: needed if features without their images were matched. Raises RequestError if
        an image is missing or cannot be read.
        """
        return self.drawn(self.fits(), self.photos(image0, image1))

    def drawn(
        self, fitted: Mapping[str, geometry.Fit], photos: Tuple[Photo, Photo]
    ) -> drawing.Picture:
        """`show` with given fits and photos."""
        picture = drawing.draw(photos[0].pixels, photos[1].pixels, [self.panel(fitted, photos)])
        return drawing.Picture(picture)

    def photos(
        self, image0: Optional[Image] = None, image1: Optional[Image] = None
    ) -> Tuple[Photo, Photo]:
        """Both images upright, for drawing. Raises RequestError as `show`."""
        first, second = (
            kept if given is None else given for given, kept in zip((image0, image1), self.images)
        )
        if first is None or second is None:
            raise RequestError("the images are not known: pass them, show(image0, image1)")
        return photo_of(first, self.frame), photo_of(second, self.frame)

    def panel(self, fitted: Mapping[str, geometry.Fit], photos: Sequence[Photo]) -> drawing.Panel:
        """The matches for `drawing.draw`; red: outliers of the fit with more inliers."""
        heading = f"{len(self.matches)} matches: "
        heading += ", ".join(
            f"{int(fit.inliers.sum())} fit one {FIT_NAMES[name]}" for name, fit in fitted.items()
        )
        off, means = self.left_out(fitted)
        points = [
            geometry.transform(points.astype(np.float64), photo.to_shown)
            for points, photo in zip((self.points0, self.points1), photos)
        ]
        return drawing.Panel(heading, points[0], points[1], self.scores, off, means)

    def left_out(self, fitted: Mapping[str, geometry.Fit]) -> Tuple[Optional[np.ndarray], str]:
        """(K,) bool, the outliers of the fit with more inliers, or None without a fit; and a legend
        for them.
        """
        name = max(fitted, key=lambda key: int(fitted[key].inliers.sum()))
        fit = fitted[name]
        return None if fit.model is None else ~fit.inliers, f"does not fit the {FIT_NAMES[name]}"
