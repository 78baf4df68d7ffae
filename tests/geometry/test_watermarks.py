"""Which matches lie on a watermark."""

import numpy as np
import pytest
from made_scenes import MILD

from superglue_sift.geometry import two_view
from superglue_sift.geometry.watermarks import find_watermarks

SIZE = (640, 480)


def sample_points(left, top, right, bottom, count, seed=0):
    return np.random.default_rng(seed).uniform([left, top], [right, bottom], (count, 2))


def add_noise(points, seed=1):
    return points + np.random.default_rng(seed).normal(0, 0.3, points.shape)


def find(points0, points1, size1=SIZE):
    """Whether matches are on a watermark, among 600 other keypoints all over both images."""
    unmatched = sample_points(0, 0, 639, 479, 1200, seed=7) * (np.array(size1) / SIZE)
    keypoints = [
        np.concatenate([points0, unmatched[:600]]),
        np.concatenate([points1, unmatched[600:]]),
    ]
    matches = np.stack([np.arange(len(points0))] * 2, axis=1)
    return find_watermarks(keypoints, matches, (SIZE, size1))


@pytest.mark.parametrize(
    "box",
    [(8, 452, 320, 476), (560, 10, 630, 110), (190, 200, 450, 280)],
    ids=["bar at the bottom", "logo", "middle"],
)
def test_matches_of_a_watermark_are_found_and_others_are_not(box):
    mark = sample_points(*box, 60)
    right = sample_points(20, 60, 150, 420, 30, seed=3)  # the place that moved
    moved = two_view.transform(right, MILD)
    is_marked = find(np.concatenate([mark, right]), np.concatenate([add_noise(mark), moved]))
    assert is_marked[:60].mean() > 0.95 and not is_marked[60:].any()
    assert find(mark, add_noise(mark)).mean() > 0.95


def test_a_match_with_one_end_on_a_watermark_does_not_belong_to_it():
    mark = sample_points(190, 200, 450, 280, 60)
    background = sample_points(20, 60, 150, 420, 10, seed=3)
    points0 = np.concatenate([mark, background, mark[:10]])
    points1 = np.concatenate([add_noise(mark), mark[:10], background])
    is_marked = find(points0, points1)
    assert is_marked[:60].mean() > 0.95 and not is_marked[60:].any()


@pytest.mark.parametrize("scale", [1.0, 2.0], ids=["in pixels", "grown with the image"])
def test_a_watermark_at_the_edges_of_a_larger_image(scale):
    """It lies at the right and lower edge of both images."""
    size1 = (1280, 960)
    mark = sample_points(560, 400, 630, 470, 60)
    mark1 = add_noise(np.array(size1) - scale * (np.array(SIZE) - mark))
    assert find(mark, mark1, size1).mean() > 0.95


@pytest.mark.parametrize("count", [0, 15, 60, 400])
def test_photographs_of_one_tripod_have_no_watermark(count):
    points = sample_points(5, 5, 634, 474, count)
    assert not find(points, add_noise(points)).any()


def test_the_fixed_point_of_a_zoom_is_no_watermark():
    """Matches around it stay where they were, but those beside them move a little."""
    points = sample_points(5, 5, 634, 474, 600)
    zoomed = (points - [320, 240]) * 1.06 + [320, 240]
    assert not find(points, add_noise(zoomed)).any()
