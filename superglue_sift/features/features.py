"""The one type for keypoints with descriptors: of an image, and of a batch of images."""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Optional, Tuple, Union

import numpy as np

from superglue_sift.errors import RequestError
from superglue_sift.features.descriptors import to_sift
from superglue_sift.features.images import STORED, UPRIGHT

SIFT_DIM = 128  # Number of entries of a SIFT descriptor
TYPICAL_SCORE = 0.03  # Contrast of a typical SIFT keypoint, for keypoints of unknown contrast
# A keypoint of another program may lie outside of the image by this part of its size, since some
# programs store positions as floats of 16 bits.
OUTSIDE = 1e-3
# The fields of `Features` that have a row for each keypoint, which are the first ones
KEYPOINT_FIELDS = ("keypoints", "scales", "oris", "scores", "descriptors")


class Features(NamedTuple):
    """N keypoints of an image with their descriptors, or those of B images.

    A keypoint has O orientations, 1 or 2, and a descriptor for each. A missing second orientation
    has a descriptor of zeros. The shapes are those of an image, whose values are arrays. A batch
    (`network.batch.make_batch`) has the same fields as tensors with a leading B, and its images are
    padded to the same N.

    Attributes:
        keypoints: (N, 2) float32, px of the image: x right, y down. The center of the first pixel
            is (0, 0).
        scales: (N,) float32, px, the diameter of the neighborhood (OpenCV's `size`). Zeros if the
            keypoints have no scale. In a batch, they are in px of the image that SIFT saw.
        oris: (N, O) float32, degrees, clockwise as seen on the screen (OpenCV's `angle`).
        scores: (N,) float32, 0 or more (OpenCV's `response`).
        descriptors: (N, O, 128) uint8 for SIFT, or (N, O, D) float32 of any length.
        image_size: (width, height) px. In a batch (B, 2) float32.
        mask: (B, N) bool, True for keypoints and False for padding, which follows them. None for an
            image, and for a batch without padding, so that the host knows this without a wait for
            the GPU.
        gray: (H, W) uint8, the pixels for refinement, which may be reduced. None if there are none.
        image: the image, to draw matches on it. None if it is not known.
        frame: whether pixels are upright or stored (`images`).
        turned: the EXIF orientation that was undone.
        sift_scale: px of the image that SIFT saw per px of the image. SIFT may see it reduced or
            enlarged. None if it is not known.
    """

    keypoints: Any
    scales: Any
    oris: Any
    scores: Any
    descriptors: Any
    image_size: Any
    mask: Any = None
    gray: Optional[np.ndarray] = None
    image: Any = None  # Optional[Image]
    frame: str = UPRIGHT
    turned: int = 1
    sift_scale: Optional[float] = None

    def __repr__(self) -> str:
        shape = self.keypoints.shape
        if len(shape) == 3:
            return f"Features({shape[0]} images with up to {shape[1]} keypoints)"
        width, height = self.image_size
        return f"Features({shape[0]} keypoints; {width}x{height} px)"

    @property
    def is_sift(self) -> bool:
        """Return whether the descriptors of an image are SIFT."""
        return self.descriptors.dtype == np.uint8

    def select(self, index: Union[slice, np.ndarray]) -> Features:
        """Keep some keypoints of an image.

        Args:
            index: a slice, or the indices (n,) of the keypoints, in the new order.
        """
        arrays: Any = self[: len(KEYPOINT_FIELDS)]
        if isinstance(index, slice):
            selected = [array[index] for array in arrays]
        else:
            # `take` is two to three times as fast as indexing by an array.
            selected = [array.take(index, 0) for array in arrays]
        return Features._make([*selected, *self[len(arrays) :]])

    def resize(self, size: Tuple[int, int]) -> Features:
        """Return the keypoints in pixels of the image resized to `size` (width, height) px."""
        if tuple(size) == tuple(self.image_size):
            return self
        factor = np.divide(size, self.image_size)
        # Pixel centers are at whole numbers, so the edge of the image is at -0.5.
        keypoints = (self.keypoints + np.float32(0.5)) * factor.astype(np.float32) - np.float32(0.5)
        longer = max(size) / max(self.image_size)
        return self._replace(
            keypoints=keypoints,
            scales=self.scales * np.float32(longer),
            image_size=tuple(size),
            sift_scale=None if self.sift_scale is None else self.sift_scale / longer,
        )

    @classmethod
    def of(
        cls,
        keypoints: np.ndarray,
        scales: np.ndarray,
        oris: np.ndarray,
        scores: np.ndarray,
        descriptors: np.ndarray,
        image_size: Tuple[int, int],
    ) -> Features:
        """Create features from your own SIFT, in the same order.

        Several keypoints may have one position, as in OpenCV, if their scales or orientations
        differ.

        Args:
            keypoints: (N, 2) px of the image.
            scales: (N,) diameters in px, OpenCV's `size`.
            oris: (N,) degrees, OpenCV's `angle`.
            scores: (N,), OpenCV's `response`.
            descriptors: (N, 128) SIFT with entries from 0 to 255, as from OpenCV.
            image_size: (width, height) of the image in px.

        Raises:
            RequestError: For a wrong shape or range, or a keypoint that occurs twice.

        Example:
            >>> keypoints = np.array([[10.0, 20.0], [30.0, 5.0]])
            >>> one = np.ones(2)
            >>> descriptors = np.full((2, 128), 45)
            >>> features = Features.of(keypoints, 4 * one, 90 * one, one, descriptors, (64, 48))
            >>> features.keypoints.tolist()
            [[10.0, 20.0], [30.0, 5.0]]
            >>> features.oris.shape, features.descriptors.shape
            ((2, 1), (2, 1, 128))
        """
        features = _make_sift(keypoints, scales, oris, scores, descriptors, image_size)
        geometry = np.hstack([features.keypoints, features.scales[:, None], features.oris])
        repeated = len(geometry) - len(np.unique(geometry, axis=0))
        if repeated:
            reason = "have the position, scale and orientation of another"
            raise RequestError(f"keypoints: {repeated} of them {reason}; give each keypoint once")
        return features

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], image_size: Tuple[int, int]) -> Features:
        """Create features of another extractor than SIFT, in the same order.

        Args:
            values: arrays by name, or tensors on the CPU: `keypoints` (N, 2) px, `scores` (N,),
                `descriptors` (N, D) float32 of any length, and both or neither of `scales` (N,) px
                and `oris` (N,) degrees.
            image_size: (width, height) of the image in px.

        Raises:
            RequestError: For a wrong shape, type or range.
        """
        keys = ["keypoints", "scores", "descriptors"]
        keys += [key for key in ("scales", "oris") if key in values]
        if len(keys) == 4:
            raise RequestError("must have scales and oris, or neither")
        try:
            arrays = {key: np.asarray(values[key]) for key in keys}
            descriptors = arrays["descriptors"]
            count, _ = descriptors.shape
            shapes = {"keypoints": (count, 2), "descriptors": descriptors.shape}
            arrays = {
                key: array.reshape(shapes.get(key, (count,))).astype(np.float32)
                for key, array in arrays.items()
            }
        except (KeyError, TypeError, ValueError) as error:
            rule = "keypoints (N, 2), scores (N,) and descriptors (N, D)"
            raise RequestError(f"must have {rule}: {error}") from error
        # Bits in bytes, such as ORB's, would look like numbers.
        if descriptors.dtype.kind != "f":
            raise RequestError(f"descriptors of {descriptors.dtype}: must be float32")
        for key, array in arrays.items():
            if not np.isfinite(array).all():
                raise RequestError(f"{key} must be finite")
        zeros = np.zeros(count, np.float32)
        scales = arrays.get("scales", zeros)
        if (arrays["scores"] < 0).any() or ("scales" in arrays and (scales <= 0).any()):
            raise RequestError("scores must be 0 or more, and scales above 0")
        return cls(
            arrays["keypoints"],
            scales,
            arrays.get("oris", zeros)[:, None],
            arrays["scores"],
            arrays["descriptors"][:, None],
            tuple(image_size),
        )

    @classmethod
    def of_colmap(
        cls, keypoints: np.ndarray, descriptors: np.ndarray, image_size: Tuple[int, int]
    ) -> Features:
        """Create features from those of a COLMAP database, in the same order, in stored pixels.

        COLMAP's SIFT is the same as OpenCV's except for rounding. It stores no response, so all
        keypoints get the typical one. Two orientations of a point are two keypoints.

        Args:
            keypoints: (N, 4) x, y, sigma, radians, or (N, 6) x, y and the affine shape, from the
                corner of the first pixel, as `pycolmap.Database.read_keypoints` returns them.
            descriptors: (N, 128) uint8, RootSIFT times 512, as `read_descriptors(...).data` returns
                them.
            image_size: (width, height) of the image in px.

        Raises:
            RequestError: For a wrong shape or range, such as a keypoint outside of the image.
        """
        keypoints = np.asarray(keypoints, np.float32)
        if keypoints.ndim != 2 or keypoints.shape[1] not in (4, 6):
            raise RequestError(f"keypoints of shape {keypoints.shape}: must be (N, 4) or (N, 6)")
        if keypoints.shape[1] == 4:
            sigma, angle = keypoints[:, 2:].T
        else:
            # The scale of an affine shape is the mean length of its columns.
            a11, a12, a21, a22 = keypoints[:, 2:].T
            sigma = (np.hypot(a11, a21) + np.hypot(a12, a22)) / 2
            angle = np.arctan2(a21, a11)
        features = _make_sift(
            keypoints[:, :2] - 0.5,  # COLMAP's coordinates start at a corner
            2 * sigma,  # OpenCV's size is a diameter
            np.rad2deg(angle) % 360,
            np.full(len(keypoints), TYPICAL_SCORE, np.float32),
            to_sift(np.asarray(descriptors) / np.float32(512)),
            image_size,
        )
        return features._replace(frame=STORED)


def _make_sift(
    keypoints: np.ndarray,
    scales: np.ndarray,
    oris: np.ndarray,
    scores: np.ndarray,
    descriptors: np.ndarray,
    image_size: Tuple[int, int],
) -> Features:
    """Create features as `Features.of`, where keypoints may occur twice."""
    if len(image_size) != 2 or min(image_size) < 1:
        raise RequestError(f"size {image_size}: must be (width, height), 1 px or more")
    values = {"keypoints": keypoints, "scales": scales, "oris": oris, "scores": scores}
    values["descriptors"] = np.asarray(descriptors, np.float32)
    features = Features.from_dict(values, image_size)
    descriptors = features.descriptors
    if len(descriptors):
        if descriptors.shape[2] != SIFT_DIM:
            raise RequestError(f"descriptors of {descriptors.shape[2]} entries: SIFT has 128")
        if not (descriptors.min() >= 0 and 1 < descriptors.max() <= 255):
            raise RequestError("descriptors must be whole numbers from 0 to 255, not normalized")
    # Keypoints must lie in the image, up to a margin.
    sides = np.array(image_size)
    margin = 0.5 + OUTSIDE * sides
    positions = features.keypoints
    outside = ((positions < -margin) | (positions > sides - 1 + margin)).any(axis=1)
    if outside.any():
        x, y = positions[outside][0]
        reason = f"outside of the image of {sides[0]}x{sides[1]} px"
        fix = "give pixels, and (width, height) of the image in which they were found"
        raise RequestError(f"keypoints: {outside.sum()} lie {reason}, as ({x:g}, {y:g}); {fix}")
    descriptors = np.rint(descriptors).reshape(-1, 1, SIFT_DIM).astype(np.uint8)
    return features._replace(descriptors=descriptors)
