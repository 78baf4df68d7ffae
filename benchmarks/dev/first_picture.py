"""Draw the first picture of the README: one hard pair by SuperGlue and by the ratio test.

    python -m benchmarks.dev.first_picture docs/matches.jpg

The photograph is NASA's portrait of Eileen Collins, in the public domain, which comes inside
scikit-image. It was not used in training. The second view is synthetic: rotated by 130 degrees,
tilted, blurred, darker, with noise. The pair was chosen because it is hard; docs/results.md has the
averages.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Optional, Sequence, Tuple

import cv2
import numpy as np

from pipeline.evaluate.matchers import RATIO_TEST, RATIO_THRESHOLD, match_baselines
from pipeline.evaluate.scoring import compute_reprojection_errors
from superglue_sift import Matcher, drawing
from superglue_sift.match_result import MatchResult
from superglue_sift.network.batch import choose_orientations_of_pair

CORRECT_PX = 3.0
QUALITY = 85  # of the JPEG
ROWS = 400  # of the photograph, from its top


def make_views() -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the photograph (H, W, 3) uint8 BGR, the synthetic view, and the homography."""
    from skimage import data

    photo = np.ascontiguousarray(data.astronaut()[:ROWS, :, ::-1])
    height, width = photo.shape[:2]
    # Rotate, tilt and shrink about the middle.
    middle = np.array([[1, 0, (width - 1) / 2], [0, 1, (height - 1) / 2], [0, 0, 1]])
    cos = np.cos(np.radians(130.0))
    sin = np.sin(np.radians(130.0))
    turn = np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]])
    tilt = np.array([[1 / 2.5, 0, 0], [0, 1, 0], [0.001, 0, 1]])
    H = middle @ np.diag([1.0, 1.0, 1.0 / 0.9]) @ tilt @ turn @ np.linalg.inv(middle)
    warped = cv2.warpPerspective(photo, H, (width, height), flags=cv2.INTER_AREA)
    # Blur, darken and add noise.
    blurred = cv2.GaussianBlur(warped, (0, 0), 1.0)
    noise = np.random.default_rng(0).normal(0, 4, blurred.shape)
    dark = 0.8 * 255 * (blurred / 255.0) ** 1.5 + noise
    return photo, np.clip(np.rint(dark), 0, 255).astype(np.uint8), H


def make_panel(name: str, result: MatchResult, H_0to1: np.ndarray) -> drawing.Panel:
    """Draw the matches of a matcher. Those with an error of CORRECT_PX or more are wrong."""
    wrong = compute_reprojection_errors(result.points0, result.points1, H_0to1) >= CORRECT_PX
    heading = f"{name}: {int((~wrong).sum())} of {len(wrong)} matches right"
    return drawing.Panel(heading, result.points0, result.points1, result.scores, wrong)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("out", type=Path, help="the picture, for instance docs/matches.jpg")
    out = parser.parse_args(argv).out
    matcher = Matcher.load(device="cpu")
    image0, image1, H = make_views()
    features0 = matcher.extract(image0)
    features1 = matcher.extract(image1)
    # The baseline of the evaluation, from the same keypoints
    pair = choose_orientations_of_pair(features0, features1)
    ratio_matches = match_baselines(pair)[RATIO_TEST].keep_above(RATIO_THRESHOLD)
    baseline = MatchResult.of(features0, features1, ratio_matches).refine(features0, features1)
    panels = [
        make_panel("SuperGlue", matcher.match(features0, features1), H),
        make_panel("ratio test", baseline, H),
    ]
    picture = drawing.draw_panels(image0, image1, panels)
    cv2.imwrite(str(out), picture, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])
    print(f"{out}: {'; '.join(panel.heading for panel in panels)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
