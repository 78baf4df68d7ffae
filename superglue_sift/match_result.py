"""The matches of two images: their positions, the geometry they fit, and a picture of them."""

from __future__ import annotations

import itertools
from typing import Any, Callable, Dict, Iterator, Mapping, NamedTuple, Optional, Tuple

import numpy as np

from superglue_sift import drawing
from superglue_sift.errors import RequestError
from superglue_sift.features.features import Features, Image, photo_of
from superglue_sift.features.images import STORED, UPRIGHT, Photo
from superglue_sift.features.sift import positions
from superglue_sift.geometry import refinement, two_view
from superglue_sift.geometry.pose import POSE_PX, Pose, relative_pose
from superglue_sift.geometry.two_view import Size

FIT_NAMES = {"homography": "homography", "fundamental": "fundamental matrix"}  # keys of `fits`
# Distances up to which a match is an inlier, in pixels of an image of `two_view.REFERENCE_PX`
INLIER_PX = 3.0  # of a homography or a fundamental matrix
# Of stamps (`find_stamps`), also in pixels of such an image
SAME_PX = 1.5  # scatter of the translations of one stamp
PLACE_PX = 10.0  # maximum distance from the same place in both images
AROUND_PX = 16.0  # letters this far from a stamp's matches belong to it
FEWEST = 4  # matches of a stamp
BORDER = 0.12  # width of the border, of the shorter side
# Ratio of areas: 0.16 for a plate in the middle, 0.42 for a copy as JPEG of quality 10
SPREAD = 0.28
# True motion is smooth: a few matches share a translation, and many more have similar ones.
ALONE = 2.0  # minimum ratio of a stamp's matches to those
SIMILAR = 4.0  # times SAME_PX: limit of similar translations


class MatchResult(NamedTuple):
    """Matches of two images, in the order of image 0's keypoints.

    keypoints0 (M, 2), keypoints1 (N, 2): float32 pixels of the original images, in `frame`.
    matches: (K, 2) int64, index into keypoints0 and into keypoints1; each index at most once.
    scores: (K,) float32, probability of each match; of one that the network did not see, the mean
        of those around it, or with `scene` 1 - the ratio of distances.
    size0, size1: (width, height).

    After alignment by the pixels (`refinement.align`), else None: aligned0, aligned1: (K, 2)
    float32 px, aligned positions of each match; SIFT's where alignment failed.
    deviations: (K,) float32, standard deviation in px of image 1 along each axis; NaN where
    alignment failed.
    correlations: (K,) float32, -1 to 1, of both patches; NaN where a patch leaves its image or is
    flat.
    pair_score: probability that both show one place (`Matcher.load(scene=True)`), 0 of a pair that
        was skipped; None without `scene`.

    threshold: all scores of the network exceed it; None if it is not known.
    frame: "upright", pixels rotated according to EXIF, or "stored" (`images`); turned: the EXIF
        orientation of each image that was undone.
    images: the matched images, for `show`; None for features without their image.
    """

    keypoints0: np.ndarray
    keypoints1: np.ndarray
    matches: np.ndarray
    scores: np.ndarray
    size0: Size
    size1: Size
    aligned0: Optional[np.ndarray] = None
    aligned1: Optional[np.ndarray] = None
    deviations: Optional[np.ndarray] = None
    correlations: Optional[np.ndarray] = None
    pair_score: Optional[float] = None
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
        scene = "" if self.pair_score is None else f", pair score {self.pair_score:.2f}"
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
        return cls(
            features0.keypoints,
            features1.keypoints,
            matches,
            scores,
            features0.size,
            features1.size,
            frame=STORED if STORED in (features0.frame, features1.frame) else UPRIGHT,
            turned=(features0.turned, features1.turned),
            images=(features0.image, features1.image),
        )

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
        names = ("matches", "scores", *refinement.Aligned._fields)
        given = {name: getattr(self, name) for name in names}
        return self._replace(
            **{name: values[chosen] for name, values in given.items() if values is not None}
        )

    def align(self, features0: Features, features1: Features, device: str = "cpu") -> MatchResult:
        """Align the positions by the pixels of both images (`refinement.align`).

        Without pixels, return self.
        """
        gray0 = features0.gray
        gray1 = features1.gray
        if gray0 is None or gray1 is None:
            return self
        small0 = features0.resize(gray0.shape[::-1])
        small1 = features1.resize(gray1.shape[::-1])
        records0 = small0.records[self.matches[:, 0]]
        records1 = small1.records[self.matches[:, 1]]
        aligned = refinement.align(gray0, gray1, records0, records1, device)
        if features0.size == small0.size and features1.size == small1.size:
            return self._replace(**aligned._asdict())
        unit = np.float32(max(features1.size) / max(small1.size))
        points1 = self.keypoints1[self.matches[:, 1]]
        return self._replace(
            aligned0=self.keypoints0[self.matches[:, 0]],
            aligned1=points1 + (aligned.aligned1 - positions(records1)) * unit,
            deviations=aligned.deviations * unit,
            correlations=aligned.correlations,
        )

    @property
    def accepted(self) -> bool:
        """False for a pair of a scene without matches: it was rejected, or none were kept."""
        return self.pair_score is None or len(self.matches) > 0

    def find_stamps(self) -> np.ndarray:
        """(K,) bool: matches of date bars, logos and watermarks, which no geometry uses.

        A stamp lies at the same place in both images, so its matches share one translation, and any
        F = [e]x fits them: two unrelated photographs with one date bar would show the same place.
        COLMAP's watermark test looks for a translation among matches near the border. Here those in
        the middle count too: photographs that are identical, or of one tripod, agree all over the
        picture, a stamp in a small part of it.
        """
        found = np.zeros(len(self.matches), bool)
        sizes = (self.size0, self.size1)
        for stamp in _translations(self.points0, self.points1, sizes):
            place0 = self.points0[stamp]
            place1 = self.points1[stamp]
            spread0 = _spread(place0, self.keypoints0, self.size0)
            spread1 = _spread(place1, self.keypoints1, self.size1)
            if min(spread0, spread1) < SPREAD:
                # wrong matches between two letters of the stamp, which lie on one line, also fit F
                on_both = near_stamp(self.points0, place0, sizes)
                found |= on_both & near_stamp(self.points1, place1, sizes)
        return found

    def homography(self, threshold_px: Optional[float] = None) -> two_view.Fit:
        """Robust homography from pixels of image 0 to image 1 (`two_view.fit_homography`).

        Its model is None for fewer than four matches, and where matches only fit a mirror image.
        threshold_px: distance in image 1 up to which a match is an inlier; None: 3 px, in images
        larger than 1,024 px as much more as they are larger.
        """
        to0, to1 = self._reductions()
        fit = self._fit(
            lambda r, px: two_view.fit_homography(r.points0, r.points1, px, r.deviations),
            INLIER_PX,
            threshold_px,
        )
        if fit.model is None:
            return fit
        return fit._replace(model=two_view.compose(two_view.inverse(to1), fit.model, to0))

    def fundamental(self, threshold_px: Optional[float] = None) -> two_view.Fit:
        """Robust fundamental matrix F, x1^T F x0 = 0 (`two_view.fit_fundamental`).

        Its model is None for fewer than eight matches. threshold_px: distance from epipolar lines,
        in pixels of image 1; None: as for `homography`.
        """
        to0, to1 = self._reductions()
        fit = self._fit(
            lambda r, px: two_view.fit_fundamental(r.points0, r.points1, px),
            INLIER_PX,
            threshold_px,
        )
        return fit if fit.model is None else fit._replace(model=to1.T @ fit.model @ to0)

    def relative_pose(
        self, K0: np.ndarray, K1: np.ndarray, threshold_px: Optional[float] = None
    ) -> Pose:
        """Relative pose of cameras with intrinsics K0, K1 (3, 3) in px (`pose.relative_pose`).

        R and t are None without a solution. threshold_px: distance from epipolar lines, in pixels
        of image 1; None: 0.6 px, in larger images as for `homography`. Raises ValueError for
        intrinsics of another shape, RequestError without PoseLib.
        """
        to0, to1 = self._reductions()
        return self._fit(
            lambda r, px: relative_pose(r.points0, r.points1, to0 @ K0, to1 @ K1, px),
            POSE_PX,
            threshold_px,
        )

    def _reductions(self) -> Tuple[np.ndarray, np.ndarray]:
        """(3, 3) maps from pixels of both images to those at which lengths were chosen."""
        to0, to1 = (
            two_view.resizing((unit, unit), (1, 1))
            for unit in map(two_view.unit_of, (self.size0, self.size1))
        )
        return to0, to1

    def _fit(
        self,
        fit: Callable[[MatchResult, float], Any],
        usual_px: float,
        threshold_px: Optional[float],
    ) -> Any:
        """`fit` of the reduced matches that lie on no stamp, and of the limit for them; the others
        are outliers. usual_px: the limit if `threshold_px` is None.
        """
        kept = ~self.find_stamps()
        to0, to1 = self._reductions()
        few = self.only(kept)
        found = fit(
            few._replace(
                aligned0=two_view.transform(few.points0, to0),
                aligned1=two_view.transform(few.points1, to1),
                deviations=None if few.deviations is None else few.deviations * to1[0, 0],
            ),
            usual_px if threshold_px is None else threshold_px * to1[0, 0],
        )
        inliers = np.zeros(len(kept), bool)
        inliers[kept] = found.inliers
        return found._replace(inliers=inliers)

    def fits(self) -> Dict[str, two_view.Fit]:
        """The robust homography and fundamental matrix, by name."""
        return {"homography": self.homography(), "fundamental": self.fundamental()}

    def summarize(self, fits: Mapping[str, two_view.Fit]) -> str:
        """Numbers of keypoints, matches, inliers and aligned matches, in two or three lines."""
        keypoints = f"keypoints {len(self.keypoints0)} and {len(self.keypoints1)}"
        inliers = (f"{name} inliers {int(fit.inliers.sum())}" for name, fit in fits.items())
        lines = [f"{keypoints}, matches {len(self.matches)}", ", ".join(inliers)]
        if self.deviations is not None:
            known = self.deviations[np.isfinite(self.deviations)]
            lines.append(f"aligned {len(known)} of {len(self.matches)} matches")
            if len(known):
                lines[-1] += f", by their deviations to {np.median(known):.2f} px at the median"
        return "\n".join(lines)

    def show(
        self,
        image0: Optional[Image] = None,
        image1: Optional[Image] = None,
        fits: Optional[Mapping[str, two_view.Fit]] = None,
    ) -> drawing.Picture:
        """Draw the matches (`drawing`), outliers of the fit with more inliers in red.

        A notebook shows the picture, `.save("matches.png")` writes it. image0, image1: needed if
        features without their images were matched. fits: of `fits`, if known. Raises RequestError
        if an image is missing or cannot be read.
        """
        photos = self.photos(image0, image1)
        fits = fits or self.fits()
        heading = f"{len(self.matches)} matches: " + ", ".join(
            f"{int(fit.inliers.sum())} fit one {FIT_NAMES[name]}" for name, fit in fits.items()
        )
        points0, points1 = (
            two_view.transform(points.astype(np.float64), photo.to_shown)
            for points, photo in zip((self.points0, self.points1), photos)
        )
        name = max(fits, key=lambda each: int(fits[each].inliers.sum()))
        off = ~fits[name].inliers & (fits[name].model is not None)
        means = f"does not fit the {FIT_NAMES[name]}"
        panel = drawing.Panel(heading, points0, points1, self.scores, off, means)
        return drawing.Picture(drawing.draw(photos[0].pixels, photos[1].pixels, [panel]))

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


def near_stamp(points: np.ndarray, stamp: np.ndarray, sizes: Tuple[Size, Size]) -> np.ndarray:
    """(n,) bool: points (n, 2) of one image on the stamp whose matches are at `stamp` (k, 2).

    sizes: of both images.
    """
    from scipy.spatial import KDTree

    if not len(stamp):
        return np.zeros(len(points), bool)
    limit = AROUND_PX * max(map(two_view.unit_of, sizes))
    return KDTree(stamp).query(points, distance_upper_bound=limit)[0] < np.inf


def _translations(
    points0: np.ndarray, points1: np.ndarray, sizes: Tuple[Size, Size]
) -> Iterator[np.ndarray]:
    """(K,) bool each: at least FEWEST matches that share one translation, of a stamp at a fixed
    place from two edges or the centre.

    It is drawn in pixels, or grows with the image that it is drawn on.
    """
    size0, size1 = sizes
    unit = max(map(two_view.unit_of, sizes))
    for scale in dict.fromkeys((1.0, max(size1) / max(size0))):
        shifts = points1 - scale * points0
        wider = size1[0] - scale * size0[0]
        higher = size1[1] - scale * size0[1]
        places = itertools.product((0, wider / 2, wider), (0, higher / 2, higher))
        for place in dict.fromkeys(places):
            stamp = _one_translation(shifts, np.array(place), unit)
            if stamp.sum() >= FEWEST:
                yield stamp


def _one_translation(shifts: np.ndarray, place: np.ndarray, unit: float) -> np.ndarray:
    """(K,) bool: shifts (K, 2) like the most frequent one near `place`, if it stands out."""
    from scipy.spatial import KDTree

    none = np.zeros(len(shifts), bool)
    here = shifts[np.linalg.norm(shifts - place, axis=1) <= PLACE_PX * unit]
    if len(here) < FEWEST:
        return none
    counts = KDTree(here).query_ball_point(here, SAME_PX * unit / 2, return_length=True)
    distance = np.linalg.norm(shifts - here[counts.argmax()], axis=1)
    same = distance <= SAME_PX * unit
    similar = (distance <= SIMILAR * SAME_PX * unit) & ~same
    return same if same.sum() >= ALONE * similar.sum() else none


def _spread(stamp: np.ndarray, every: np.ndarray, size: Size) -> float:
    """Area over which `stamp` (k, 2) scatters, over that of all keypoints `every` (n, 2).

    An area is the square root of the determinant of the covariance. What lies at the border does
    not count; 0 if no match is left.
    """
    border = BORDER * min(size)
    high = np.array(size) - 1 - border
    stamp = stamp[((stamp >= border) & (stamp <= high)).all(1)]
    every = every[((every >= border) & (every <= high)).all(1)]
    if len(stamp) < 3:
        return 0.0
    area = np.linalg.det(np.cov(stamp.T))
    return float(np.sqrt(max(area, 0.0) / max(np.linalg.det(np.cov(every.T)), 1e-12)))
