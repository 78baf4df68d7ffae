"""What a result says of its matches: the geometry that they fit."""

from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch
from made_pairs import records_at
from made_scenes import MILD

from superglue_sift import RequestError, drawing
from superglue_sift.features.features import Features
from superglue_sift.features.images import STORED, UPRIGHT
from superglue_sift.geometry import two_view
from superglue_sift.match_result import MatchResult
from superglue_sift.matches import Matches

SIZE = (1024, 768)


def made_result(enlarged, aligned=True):
    """150 matches that scatter by 0.7 px in images of SIZE, and 50 wrong ones; then enlarged."""
    rng = np.random.default_rng(0)
    points0 = rng.uniform(0, SIZE, (200, 2))
    points1 = two_view.transform(points0, MILD) + rng.normal(0, 0.7, (200, 2))
    points1[150:] = rng.uniform(0, SIZE, (50, 2))
    to_file = two_view.map_to_resized((1, 1), (enlarged, enlarged))
    sides = [two_view.transform(p, to_file).astype(np.float32) for p in (points0, points1)]
    size = (int(enlarged * SIZE[0]), int(enlarged * SIZE[1]))
    matches = np.stack([np.arange(200)] * 2, axis=1)
    result = MatchResult(*sides, Matches(matches, np.ones(200, np.float32)), size, size)
    deviations = np.full(200, 0.7 * enlarged, np.float32)
    return replace(result, deviations=deviations) if aligned else result


@pytest.mark.parametrize("aligned, enlarged", [(True, 2.5), (False, 8.0)])
def test_geometry_does_not_depend_on_the_resolution_of_a_file(aligned, enlarged):
    plain = made_result(1.0, aligned)
    large = made_result(enlarged, aligned)
    to_file = two_view.map_to_resized((1, 1), (enlarged, enlarged))
    for name in ("homography", "fundamental"):
        expected = getattr(plain, name)()
        found = getattr(large, name)()
        np.testing.assert_array_equal(found.inliers, expected.inliers)
        assert expected.inliers[:150].mean() > 0.95
    H = two_view.compose(two_view.inverse(to_file), large.homography().model, to_file)
    assert two_view.corner_error(H, plain.homography().model, SIZE) < 0.01
    K = np.diag([900.0, 900.0, 1.0])
    K[:2, 2] = (512, 384)
    poses = plain.relative_pose(K, K), large.relative_pose(to_file @ K, to_file @ K)
    np.testing.assert_array_equal(poses[0].inliers, poses[1].inliers)
    np.testing.assert_allclose(poses[0].R, poses[1].R, atol=1e-4)


def test_refinement_in_a_reduced_image_is_in_pixels_of_the_file(photo):
    """In the pixels that are compared, image 1 is image 0 moved by 0.4 px; the file is 2.5 times as
    large. A pixel centre x is there at 2.5 (x + 0.5) - 0.5.
    """
    gray0 = photo[:, :-2]
    gray1 = (0.6 * gray0 + 0.4 * photo[:, 1:-1]).round().astype(np.uint8)
    height, width = gray0.shape
    seen = Features(records_at(np.argwhere(np.ones((9, 6))) * 50.0 + 70.0), (width, height))
    file = seen.resize((5 * width // 2, 5 * height // 2))
    matches = Matches(np.stack([np.arange(54)] * 2, axis=1), np.ones(54, np.float32))
    small, large = (
        MatchResult.of(each, each, matches).refine(
            each._replace(gray=gray0), each._replace(gray=gray1)
        )
        for each in (seen, file)
    )
    moves = [result.points1 - result.keypoints1 for result in (small, large)]
    # The pixels do move most of the matches.
    assert np.isfinite(small.deviations).mean() > 0.5 and np.median(-moves[0][:, 0]) > 0.2
    # Positions of 1,500 px have a rounding unit of 1.2e-4 px.
    np.testing.assert_allclose(moves[1], 2.5 * moves[0], atol=0.01)
    np.testing.assert_allclose(large.deviations, 2.5 * small.deviations, rtol=0.01)


def test_a_threshold_that_is_named_is_in_pixels_of_the_file():
    large = made_result(8.0)
    for threshold in (8.0, 24.0):
        H, inliers = large.homography(threshold)
        off = two_view.transform(large.points0.astype(float), H) - large.points1
        np.testing.assert_array_equal(inliers, np.linalg.norm(off, axis=1) <= threshold)
    np.testing.assert_array_equal(inliers, large.homography().inliers)
    assert large.homography() is large.homography()  # computed once


def test_a_pose_is_of_cameras_with_images_of_different_sizes():
    """The second photograph is three times as large, and its camera moved to the right."""
    pytest.importorskip("poselib")
    rng = np.random.default_rng(0)
    points = np.column_stack([rng.uniform(-2, 2, (200, 2)), rng.uniform(4, 9, 200)])
    R = cv2.Rodrigues(np.array([0.02, 0.1, 0.05]))[0]
    t = np.array([-1.0, 0.1, 0.2])
    K0 = np.array([[800.0, 0, 512], [0, 800, 384], [0, 0, 1]])
    K1 = np.array([[2700.0, 0, 1500], [0, 2700, 1200], [0, 0, 1]])
    seen = points @ K0.T, (points @ R.T + t) @ K1.T
    keypoints = [(xyz[:, :2] / xyz[:, 2:]).astype(np.float32) for xyz in seen]
    matches = Matches(np.stack([np.arange(200)] * 2, axis=1), np.ones(200, np.float32))
    pose = MatchResult(*keypoints, matches, SIZE, (3072, 2304)).relative_pose(K0, K1)
    assert pose.inliers.all()
    np.testing.assert_allclose(pose.R, R, atol=1e-4)
    np.testing.assert_allclose(pose.t, t / np.linalg.norm(t), atol=1e-3)


def test_a_match_is_listed_at_the_keypoint_of_either_image():
    matches = Matches(np.array([[0, 2], [1, 0]]), np.float32([0.5, 0.9]))
    result = MatchResult(np.zeros((2, 2)), np.zeros((4, 2)), matches, SIZE, SIZE)
    for image, indices, scores in ((0, [2, 0], [0.5, 0.9]), (1, [1, -1, 0, -1], [0.9, 0, 0.5, 0])):
        found = result.dense(image)
        assert found[0].tolist() == indices
        np.testing.assert_array_equal(found[1], np.float32(scores))


@pytest.mark.parametrize("count", [0, 3, 7])
def test_too_few_matches_fit_nothing(count):
    few = made_result(1.0).only(np.arange(count))
    assert few.fundamental().model is None and few.fundamental().inliers.shape == (count,)
    assert (few.homography().model is None) == (count < 4)
    assert not few.fundamental().supported


def test_matches_without_a_geometry_are_said_to_have_none():
    points = np.random.default_rng(0).uniform(0, SIZE, (2, 300, 2)).astype(np.float32)
    found = Matches(np.stack([np.arange(300)] * 2, axis=1), np.ones(300, np.float32))
    result = MatchResult(*points, found, SIZE, SIZE)
    assert "300 matches, which support no camera motion and no plane" in result.summarize()
    assert not result.homography().supported
    assert "of 200 matches fit one camera motion" in made_result(1.0).summarize()


def test_a_wallpaper_supports_no_model():
    """Its matches follow three different shifts: a third fits each, far more than by chance."""
    points0 = np.random.default_rng(0).uniform(0, (900, 700), (300, 2)).astype(np.float32)
    shifts = np.repeat(np.float32([[96, 0], [0, 64], [-96, -128]]), 100, axis=0)
    found = Matches(np.stack([np.arange(300)] * 2, axis=1), np.ones(300, np.float32))
    plane = MatchResult(points0, points0 + shifts, found, SIZE, SIZE).homography()
    assert plane.inliers.sum() == 100 and plane.significance > 100 and not plane.supported


def test_a_result_stays_consistent():
    image = np.random.default_rng(0).integers(0, 256, (240, 320)).astype(np.uint8)
    records = [records_at(np.random.default_rng(1).uniform(30, 200, (50, 2)))] * 2
    sides = [Features(each, (320, 240), image) for each in records]
    scores = np.linspace(0, 0.98, len(records[0])).astype(np.float32)
    indices = np.stack([np.arange(len(records[0]))] * 2, 1)
    found = MatchResult.of(*sides, Matches(indices, scores))
    assert found.refined1 is None and found.refine(sides[0], sides[1]._replace(gray=None)) is found
    aligned = found.refine(*sides)
    few = aligned.above(0.5)
    np.testing.assert_array_equal(few.points1, aligned.refined1[scores > 0.5])
    assert len(few.refined0) == len(few.deviations) == len(few.correlations) == len(few.matches)


def test_a_photograph_and_a_view_of_a_rotated_camera_show_no_parallax(untrained, photo):
    pytest.importorskip("poselib")
    height, width = photo.shape
    K = np.array([[width, 0, width / 2], [0, width, height / 2], [0, 0, 1.0]])
    R = cv2.Rodrigues(np.array([0.02, 0.1, 0.05]))[0]
    rotated = cv2.warpPerspective(photo, K @ R @ np.linalg.inv(K), (width, height))
    for other, expected in ((photo, np.eye(3)), (rotated, R)):
        pose = untrained.match(photo, other).relative_pose(K, K)
        assert pose.t is None and pose.inliers.mean() > 0.8
        assert np.abs(pose.R - expected).max() < 0.002  # an angle of a pixel


def test_a_result_shows_its_picture_in_colour(untrained, color_photo, tmp_path):
    bgr = np.ascontiguousarray(color_photo[..., ::-1])
    path = tmp_path / "a.png"
    cv2.imwrite(str(path), bgr)
    found = untrained.match(path, torch.from_numpy(color_photo.copy()).permute(2, 0, 1))
    picture = found.only(np.arange(200)).show()
    assert repr(picture).startswith(f"Picture({2 * 451 + drawing.GAP}x")
    assert picture._repr_jpeg_()[:2] == b"\xff\xd8"
    picture.save(tmp_path / "new/m.png")
    np.testing.assert_array_equal(cv2.imread(str(tmp_path / "new/m.png")), picture.pixels)


def test_features_without_their_image_are_shown_with_one_that_is_named(untrained, photo):
    own = untrained.extract(photo)._replace(image=None)
    found = untrained.match(own, photo)
    with pytest.raises(RequestError, match=r"pass them, show\(image0, image1\)"):
        found.show()
    assert found.show(photo).pixels.any()


def test_a_result_of_stored_and_upright_features_is_of_stored_pixels():
    """In either order: the pixels of an image without EXIF rotation are both."""
    upright = Features(records_at([[1, 2]]), SIZE)
    stored = upright._replace(frame=STORED)
    none = Matches(np.zeros((0, 2), np.int64), np.zeros(0, np.float32))
    for pair in ((upright, stored), (stored, upright), (stored, stored)):
        assert MatchResult.of(*pair, none).frame == STORED
    assert MatchResult.of(upright, upright, none).frame == UPRIGHT
