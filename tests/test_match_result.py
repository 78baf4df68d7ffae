"""A result: positions, the geometries that its matches support, pictures."""

from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch
from made_matches import match_range
from made_pairs import make_features_at
from made_scenes import MILD

from superglue_sift import Matcher, RequestError, drawing
from superglue_sift.features.images import STORED, UPRIGHT
from superglue_sift.geometry import two_view
from superglue_sift.match_result import MatchResult
from superglue_sift.matches import Matches

SIZE = (1024, 768)


def make_result(factor, is_refined=True):
    """150 matches that scatter by 0.7 px in images of SIZE, and 50 wrong ones; then enlarged."""
    rng = np.random.default_rng(0)
    points0 = rng.uniform(0, SIZE, (200, 2))
    points1 = two_view.transform(points0, MILD) + rng.normal(0, 0.7, (200, 2))
    points1[150:] = rng.uniform(0, SIZE, (50, 2))
    to_file = two_view.map_to_resized((1, 1), (factor, factor))
    keypoints = [two_view.transform(p, to_file).astype(np.float32) for p in (points0, points1)]
    size = (int(factor * SIZE[0]), int(factor * SIZE[1]))
    result = MatchResult(*keypoints, match_range(0, 200, 1.0), size, size)
    deviations = np.full(200, 0.7 * factor, np.float32)
    return replace(result, deviations=deviations) if is_refined else result


@pytest.mark.parametrize("is_refined, factor", [(True, 2.5), (False, 8.0)])
def test_geometry_does_not_depend_on_the_resolution_of_a_file(is_refined, factor):
    small = make_result(1.0, is_refined)
    large = make_result(factor, is_refined)
    to_file = two_view.map_to_resized((1, 1), (factor, factor))
    for name in ("fit_homography", "fit_fundamental"):
        expected = getattr(small, name)()
        fit = getattr(large, name)()
        np.testing.assert_array_equal(fit.inliers, expected.inliers)
        assert expected.inliers[:150].mean() > 0.95 and fit.supported
    H = two_view.compose(two_view.inverse(to_file), large.fit_homography().model, to_file)
    assert two_view.compute_corner_error(H, small.fit_homography().model, SIZE) < 0.01
    K = np.array([[900.0, 0, 512], [0, 900, 384], [0, 0, 1]])
    expected = small.estimate_relative_pose(K, K)
    pose = large.estimate_relative_pose(to_file @ K, to_file @ K)
    np.testing.assert_array_equal(pose.inliers, expected.inliers)
    np.testing.assert_allclose(pose.R, expected.R, atol=1e-4)


def test_refinement_in_a_reduced_image_is_in_pixels_of_the_file(photo):
    """In the pixels that are compared, image 1 is image 0 moved by 0.4 px; the file is 2.5 times as
    large. The center x of a pixel is there at 2.5 (x + 0.5) - 0.5.
    """
    gray0 = photo[:, :-2]
    gray1 = (0.6 * gray0 + 0.4 * photo[:, 1:-1]).round().astype(np.uint8)
    height, width = gray0.shape
    features = make_features_at(np.argwhere(np.ones((9, 6))) * 50.0 + 70.0, (width, height))
    enlarged = features.resize((5 * width // 2, 5 * height // 2))
    small, large = (
        MatchResult.of(view, view, match_range(0, 54, 1.0)).refine(
            view._replace(gray=gray0), view._replace(gray=gray1)
        )
        for view in (features, enlarged)
    )
    moves = [result.points1 - result.keypoints1 for result in (small, large)]
    # The pixels do move most of the matches.
    assert np.isfinite(small.deviations).mean() > 0.5 and np.median(-moves[0][:, 0]) > 0.2
    # Positions of 1,500 px have a rounding unit of 1.2e-4 px.
    np.testing.assert_allclose(moves[1], 2.5 * moves[0], atol=0.01)
    np.testing.assert_allclose(large.deviations, 2.5 * small.deviations, rtol=0.01)


def test_a_threshold_is_in_pixels_of_the_file():
    large = make_result(8.0)
    for threshold in (8.0, 24.0):
        H, inliers, _ = large.fit_homography(threshold)
        distances = np.linalg.norm(
            two_view.transform(large.points0.astype(float), H) - large.points1, axis=1
        )
        np.testing.assert_array_equal(inliers, distances <= threshold)
    np.testing.assert_array_equal(inliers, large.fit_homography().inliers)
    assert large.fit_homography() is large.fit_homography()  # computed once


# Relative poses

CAMERA = np.array([[800.0, 0, 512], [0, 800, 384], [0, 0, 1]])
ROTATION = cv2.Rodrigues(np.array([0.02, 0.1, 0.05]))[0]
TRANSLATION = np.array([-1.0, 0.1, 0.2])


def view_points(K1, noise_px=0.0):
    """A result of 200 points in two images of SIZE, or of the size that belongs to K1."""
    rng = np.random.default_rng(0)
    points = np.column_stack([rng.uniform(-2, 2, (200, 2)), rng.uniform(4, 9, 200)])
    views = points @ CAMERA.T, (points @ ROTATION.T + TRANSLATION) @ K1.T
    keypoints = [(xyz[:, :2] / xyz[:, 2:]).astype(np.float32) for xyz in views]
    scale = K1[0, 0] / CAMERA[0, 0]
    keypoints[1] += scale * rng.normal(0, noise_px, (200, 2)).astype(np.float32)
    size1 = int(scale * SIZE[0]), int(scale * SIZE[1])
    return MatchResult(*keypoints, match_range(0, 200, 1.0), SIZE, size1)


def test_a_pose_of_cameras_with_images_of_different_sizes():
    """The second photograph is three times as large, and its camera moved to the right."""
    pytest.importorskip("poselib")
    K1 = np.diag([3.0, 3, 1]) @ CAMERA
    pose = view_points(K1).estimate_relative_pose(CAMERA, K1)
    assert pose.inliers.all() and pose.supported
    np.testing.assert_allclose(pose.R, ROTATION, atol=1e-4)
    np.testing.assert_allclose(pose.t, TRANSLATION / np.linalg.norm(TRANSLATION), atol=1e-3)


@pytest.mark.parametrize("scale", [1, 4])
def test_the_threshold_of_a_pose_is_in_pixels_of_the_file(scale):
    """4 px of a file of 4,096 px are 1 px of the image reduced to 1,024 px."""
    pytest.importorskip("poselib")
    K = np.diag([scale, scale, 1]) @ CAMERA
    small = view_points(CAMERA, noise_px=0.7)
    keypoints = [scale * small.keypoints0, scale * small.keypoints1]
    size = scale * SIZE[0], scale * SIZE[1]
    large = replace(small, keypoints0=keypoints[0], keypoints1=keypoints[1], size0=size, size1=size)
    counts = []
    for px in (0.3, 1.0, 3.0):
        pose = large.estimate_relative_pose(K, K, scale * px)
        expected = small.estimate_relative_pose(CAMERA, CAMERA, px)
        np.testing.assert_array_equal(pose.inliers, expected.inliers)
        counts.append(int(pose.inliers.sum()))
    assert counts[0] < 120 < counts[1] < counts[2]


def test_random_points_support_no_pose():
    pytest.importorskip("poselib")
    for seed in range(12):
        points = np.random.default_rng(seed).uniform(0, SIZE, (2, 60, 2)).astype(np.float32)
        result = MatchResult(*points, match_range(0, 60, 1.0), SIZE, SIZE)
        pose = result.estimate_relative_pose(CAMERA, CAMERA)
        assert pose.R is not None and not pose.supported


def test_unrelated_photographs_support_no_pose(photo, shared_data):
    pytest.importorskip("poselib")
    path = min((shared_data / "coco/val").glob("*.jpg"))
    matcher = Matcher.load(device="cpu", threshold=0.0)
    result = matcher.match(photo, path)
    assert len(result.matches) > 20
    pose = result.estimate_relative_pose(CAMERA, CAMERA)
    assert not pose.supported and not result.fit_fundamental().supported


def test_a_photograph_and_a_view_of_a_rotated_camera_show_no_parallax(untrained, photo):
    pytest.importorskip("poselib")
    height, width = photo.shape
    K = np.array([[width, 0, width / 2], [0, width, height / 2], [0, 0, 1.0]])
    rotated = cv2.warpPerspective(photo, K @ ROTATION @ np.linalg.inv(K), (width, height))
    for view, expected in ((photo, np.eye(3)), (rotated, ROTATION)):
        pose = untrained.match(photo, view).estimate_relative_pose(K, K)
        assert pose.t is None and pose.inliers.mean() > 0.8 and pose.supported
        assert np.abs(pose.R - expected).max() < 0.002  # an angle of a pixel


# Matches and support


def test_dense_matches_are_by_keypoint_of_either_image():
    matches = Matches(np.array([[0, 2], [1, 0]]), np.float32([0.5, 0.9]))
    result = MatchResult(np.zeros((2, 2)), np.zeros((4, 2)), matches, SIZE, SIZE)
    for image, indices, scores in ((0, [2, 0], [0.5, 0.9]), (1, [1, -1, 0, -1], [0.9, 0, 0.5, 0])):
        dense_indices, dense_scores = result.to_dense(image)
        assert dense_indices.tolist() == indices
        np.testing.assert_array_equal(dense_scores, np.float32(scores))


@pytest.mark.parametrize("count", [0, 3, 7])
def test_too_few_matches_fit_nothing(count):
    few = make_result(1.0).select(np.arange(count))
    assert few.fit_fundamental().model is None and few.fit_fundamental().inliers.shape == (count,)
    assert (few.fit_homography().model is None) == (count < 4)
    assert not few.fit_fundamental().supported


def test_random_matches_support_no_geometry():
    points = np.random.default_rng(0).uniform(0, SIZE, (2, 300, 2)).astype(np.float32)
    result = MatchResult(*points, match_range(0, 300, 1.0), SIZE, SIZE)
    assert not result.fit_homography().supported and not result.fit_fundamental().supported
    right = make_result(1.0)
    assert right.fit_homography().supported and right.fit_fundamental().supported


def test_a_wallpaper_supports_no_plane():
    """Its matches follow three different shifts: a third fits each, far more than by chance."""
    points0 = np.random.default_rng(0).uniform(0, (900, 700), (300, 2)).astype(np.float32)
    shifts = np.repeat(np.float32([[96, 0], [0, 64], [-96, -128]]), 100, axis=0)
    result = MatchResult(points0, points0 + shifts, match_range(0, 300, 1.0), SIZE, SIZE)
    plane = result.fit_homography()
    assert plane.inliers.sum() == 100 and not plane.supported


def test_selected_matches_keep_their_refined_positions():
    image = np.random.default_rng(0).integers(0, 256, (240, 320)).astype(np.uint8)
    points = np.random.default_rng(1).uniform(30, 200, (50, 2))
    features = make_features_at(points)._replace(gray=image)
    scores = np.linspace(0, 0.98, 50).astype(np.float32)
    matches = Matches(match_range(0, 50, 1.0).indices, scores)
    result = MatchResult.of(features, features, matches)
    assert result.refined1 is None
    assert result.refine(features, features._replace(gray=None)) is result
    refined = result.refine(features, features)
    few = refined.keep_above(0.5)
    np.testing.assert_array_equal(few.points1, refined.refined1[scores > 0.5])
    assert len(few.refined0) == len(few.deviations) == len(few.correlations) == len(few.matches)


# Pictures


def test_a_picture_has_the_colors_of_both_images(untrained, color_photo, tmp_path):
    bgr = np.ascontiguousarray(color_photo[..., ::-1])
    path = tmp_path / "a.png"
    cv2.imwrite(str(path), bgr)
    result = untrained.match(path, torch.from_numpy(color_photo.copy()).permute(2, 0, 1))
    picture = result.select(np.arange(200)).show()
    assert repr(picture).startswith(f"Picture({2 * 451 + drawing.GAP}x")
    assert picture._repr_jpeg_()[:2] == b"\xff\xd8"
    picture.save(tmp_path / "new/m.png")
    np.testing.assert_array_equal(cv2.imread(str(tmp_path / "new/m.png")), picture.pixels)


def test_a_picture_of_features_without_pixels_needs_the_image(untrained, photo):
    features = untrained.extract(photo)._replace(image=None)
    result = untrained.match(features, photo)
    with pytest.raises(RequestError):
        result.show()
    assert result.show(photo).pixels.any()


def test_a_result_of_stored_and_upright_features_is_of_stored_pixels():
    """In either order: the pixels of an image without EXIF rotation are both."""
    upright = make_features_at([[1, 2]], SIZE)
    stored = upright._replace(frame=STORED)
    for pair in ((upright, stored), (stored, upright), (stored, stored)):
        assert MatchResult.of(*pair, Matches.none()).frame == STORED
    assert MatchResult.of(upright, upright, Matches.none()).frame == UPRIGHT
