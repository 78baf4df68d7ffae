"""A date bar, a logo or a watermark does not make unrelated photographs one place, nor hides what
they show.
"""

import itertools

import cv2
import numpy as np
import pytest
from made_pairs import records_at
from made_scenes import MILD
from made_stamps import STAMPS

from superglue_sift.features.features import Features
from superglue_sift.geometry import scenes, two_view
from superglue_sift.matches import Matches

SIZE = (640, 480)


def matched(points0, points1):
    """All these points matched in order, among 600 other keypoints anywhere in both images."""
    others = np.random.default_rng(7).uniform(0, np.array(SIZE) - 1, (2, 600, 2))
    sides = [np.concatenate(each).astype(np.float32) for each in zip((points0, points1), others)]
    matches = np.stack([np.arange(len(points0))] * 2, 1)
    found = Matches(matches, np.ones(len(matches)))
    return [Features(records_at(side), SIZE) for side in sides], found


def stamps_of(points0, points1):
    return scenes.find_stamps(*matched(points0, points1))


def points_in(left, top, right, bottom, count, seed=0):
    return np.random.default_rng(seed).uniform([left, top], [right, bottom], (count, 2))


def scatter(points, seed=1):
    return points + np.random.default_rng(seed).normal(0, 0.3, points.shape)


@pytest.mark.parametrize(
    "box",
    [
        (8, 4, 320, 28),
        (8, 452, 320, 476),
        (370, 450, 636, 472),
        (560, 10, 630, 110),
        (190, 200, 450, 280),
    ],
    ids=["bar at the top", "bar at the bottom", "corner", "logo", "middle"],
)
def test_matches_at_one_place_in_a_small_part_of_both_images_are_a_stamps(box):
    stamp = points_in(*box, 60)
    right = points_in(60, 60, 580, 420, 60, seed=3)
    moved = two_view.transform(right, MILD)
    low = np.array(box[:2]) - 20
    high = np.array(box[2:]) + 20
    covered = [((points > low) & (points < high)).all(1) for points in (right, moved)]
    right = right[~covered[0] & ~covered[1]][:30]  # nothing is seen under a stamp
    moved = two_view.transform(right, MILD)
    stamped = stamps_of(np.concatenate([stamp, right]), np.concatenate([scatter(stamp), moved]))
    assert len(right) == 30 and stamped[:60].mean() > 0.95 and not stamped[60:].any()
    assert stamps_of(stamp, scatter(stamp)).mean() > 0.95


@pytest.mark.parametrize("count", [15, 60, 400])
def test_photographs_of_one_tripod_have_no_stamp(count):
    points = points_in(5, 5, 634, 474, count)
    assert not stamps_of(points, scatter(points)).any()


def test_where_a_moving_camera_sees_a_place_stand_still_is_no_stamp():
    """Around the fixed point of a zoom matches stay where they were, but those beside them move a
    little.
    """
    zoom = two_view.compose(
        np.array([[1, 0, -320.0], [0, 1, -240], [0, 0, 1]]),
        np.diag([1.06, 1.06, 1]),
        np.array([[1, 0, 320.0], [0, 1, 240], [0, 0, 1]]),
    )
    points = points_in(5, 5, 634, 474, 600)
    assert not stamps_of(points, scatter(two_view.transform(points, zoom))).any()


def test_no_matches_have_no_stamp():
    assert stamps_of(np.zeros((0, 2)), np.zeros((0, 2))).shape == (0,)


# Mirror images


def test_a_mirror_image_has_no_homography(monkeypatch):
    points = points_in(5, 5, 634, 474, 80)
    mirrored = scatter(points * [-1, 1] + [639, 0])
    assert two_view.fit_ransac(points, mirrored) is None
    assert two_view.fit_homography(points, mirrored).model is None
    # two thirds wrong, and the rest is no mirror image
    mixed = np.concatenate(
        [two_view.transform(points, MILD), points_in(0, 0, 639, 479, 160, seed=5)]
    )
    both = np.concatenate([points, points_in(0, 0, 639, 479, 160, seed=6)])
    found = two_view.fit_homography(both, mixed)
    assert two_view.corner_error(found.model, MILD, SIZE) < 0.5
    # nor where OpenCV finds one
    mirror = np.array([[-1.0, 0, 639], [0, 1, 0], [0, 0, 1]])
    monkeypatch.setattr(cv2, "findHomography", lambda *_: (mirror, None))
    assert two_view.fit_ransac(points, mirrored) is None


# Real photographs


def photographs(shared_data, count):
    paths = sorted((shared_data / "coco/val").glob("*.jpg"))[:count]
    return [cv2.imread(str(path), cv2.IMREAD_GRAYSCALE) for path in paths]


@pytest.mark.parametrize("name", ["bar", pytest.param("corner", marks=pytest.mark.slow)])
def test_unrelated_photographs_with_one_stamp_are_not_accepted(shared_data, place, name):
    sides = [
        place.extract(STAMPS[name](image, n))
        for n, image in enumerate(photographs(shared_data, 7)[3:])
    ]
    for one, other in itertools.combinations(sides, 2):
        found = place.match(one, other)
        assert not found.accepted and found.pair_score < 0.2
        assert one.size != other.size or place.match(one, one).accepted
