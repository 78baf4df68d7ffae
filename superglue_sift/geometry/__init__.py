"""Points in two images: homographies, and the geometry of two cameras.

    plane         3x3 homographies as maps of the plane
    homography    fit one to matches
    epipolar      fit a fundamental matrix or a relative pose to matches

Points are in pixels: x right, y down, centre of the first pixel at (0, 0). H_a_to_b maps points of
frame a to frame b: p_b ~ H_a_to_b @ p_a.
"""

from superglue_sift.geometry.epipolar import (
    Pose,
    epipolar_distances,
    fit_fundamental,
    relative_pose,
)
from superglue_sift.geometry.homography import (
    CONFIDENCE,
    MIN_POINTS,
    SCATTER_PX,
    Fit,
    fit_dlt,
    fit_homography,
    fit_ransac,
    refine_homography,
)
from superglue_sift.geometry.plane import (
    REFERENCE_PX,
    compose,
    corner_error,
    corners,
    inverse,
    jacobians,
    mirrored_part,
    normalized,
    resizing,
    through_four_points,
    transform,
    unit_of,
)

__all__ = [
    "CONFIDENCE",
    "MIN_POINTS",
    "REFERENCE_PX",
    "SCATTER_PX",
    "Fit",
    "Pose",
    "compose",
    "corner_error",
    "corners",
    "epipolar_distances",
    "fit_dlt",
    "fit_fundamental",
    "fit_homography",
    "fit_ransac",
    "inverse",
    "jacobians",
    "mirrored_part",
    "normalized",
    "refine_homography",
    "relative_pose",
    "resizing",
    "through_four_points",
    "transform",
    "unit_of",
]
