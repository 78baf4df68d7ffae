"""Refinement of matches to a fraction of a pixel, on views whose homographies are known exactly."""

import cv2
import numpy as np
import pytest
import torch
from made_scenes import IDENTITY, MILD, map_to_photograph

from superglue_sift import Matcher
from superglue_sift.geometry import refinement, two_view

SIZE = (320, 240)
TURN = np.array([[0.92, -0.26, 50], [0.26, 0.92, -20], [1e-4, -5e-5, 1]])
SHIFT = np.array([[1.0, 0, 6.3], [0, 1, -4.6], [0, 0, 1]])
RAYLEIGH = np.sqrt(2 * np.log(2))  # median length of an error with deviation 1 along each axis


def draw_texture(H):
    """(240, 320) uint8: what a camera at H sees of a sum of sines, exact at every place."""
    rng = np.random.default_rng(0)
    frequency = rng.normal(0, 0.35, (150, 2))
    phase = rng.uniform(0, 2 * np.pi, 150)
    places = map_to_photograph(H, SIZE).reshape(2, -1).T
    values = np.sin(places @ frequency.T + phase).sum(1) / np.sqrt(75)
    return np.clip(128 + 45 * values, 0, 255).round().astype(np.uint8).reshape(SIZE[::-1])


def make_matches(H, count=150, noise_px=0.5):
    """Positions (K, 2) in both images, whose patches lie inside, with noise in image 1."""
    rng = np.random.default_rng(1)
    points0 = rng.uniform(20, np.array(SIZE) - 21, (6 * count, 2))
    points1 = two_view.transform(points0, H)
    is_inside = ((points1 > 20) & (points1 < np.array(SIZE) - 21)).all(1)
    points0, points1 = points0[is_inside][:count], points1[is_inside][:count]
    return points0, points1 + rng.normal(0, noise_px, points1.shape)


def refine(grays, points, sizes=(SIZE, SIZE)):
    """Refine matches of keypoints of one scale and one orientation."""
    points = tuple(xy.astype(np.float32) for xy in points)
    ones = np.ones(len(points[0]), np.float32)
    return refinement.refine(grays, points, (4 * ones, 4 * ones), (0 * ones, 0 * ones), sizes)


def refine_and_measure(grays, H, noise_px=0.5):
    """Return the errors (k,) px of refined matches, and how many of all matches are refined."""
    points = make_matches(H, noise_px=noise_px)
    refined1, deviations, _ = refine(grays, points)
    is_refined = np.isfinite(deviations)
    errors = np.linalg.norm(two_view.transform(points[0], H) - refined1, axis=1)
    return errors[is_refined], is_refined.mean()


def add_noise(image, deviation):
    noise = np.random.default_rng(int(image[0, 0])).normal(0, deviation, image.shape)
    return np.clip(image + noise, 0, 255).astype(np.uint8)


CHANGES = {
    "nothing": lambda image: image,
    "gamma": lambda image: cv2.LUT(image, (255 * (np.arange(256) / 255) ** 1.5).astype(np.uint8)),
    "blur": lambda image: cv2.GaussianBlur(image, (0, 0), 1.2),
    "noise": lambda image: add_noise(image, 5),
}


@pytest.mark.parametrize(
    "H, change",
    [
        (two_view.compose(np.diag([1.6, 1.6, 1]), SHIFT), "nothing"),
        *((TURN, change) for change in CHANGES),
    ],
)
def test_matches_are_exact_to_a_tenth_of_a_pixel(H, change):
    images = draw_texture(IDENTITY), CHANGES[change](draw_texture(H))
    errors, refined_part = refine_and_measure(images, H)
    assert refined_part > 0.85
    assert errors.mean() < (0.05 if change == "nothing" else 0.1)  # 0.6 before


def test_matches_that_start_far_off_are_refined_from_a_coarser_level():
    images = draw_texture(IDENTITY), draw_texture(TURN)
    errors, refined_part = refine_and_measure(images, TURN, noise_px=2.0)
    assert refined_part > 0.9  # 0.7 without
    assert errors.mean() < 0.1


@pytest.mark.parametrize("blurred, deviation, limit_px", [(0, 2.0, 0.05), (1, 4.0, 0.2)])
def test_the_sharper_image_is_blurred(blurred, deviation, limit_px, monkeypatch):
    """Without it errors are several times as large, as the last line shows."""
    images = [draw_texture(IDENTITY), draw_texture(TURN)]
    images[blurred] = cv2.GaussianBlur(images[blurred], (0, 0), deviation)
    errors, refined_part = refine_and_measure(images, TURN)
    assert refined_part > 0.85 and np.median(errors) < limit_px
    monkeypatch.setattr(refinement, "BLURRED", 100.0)
    plain_errors, _ = refine_and_measure(images, TURN)
    assert np.median(plain_errors) > 2 * np.median(errors)


@pytest.mark.parametrize(
    "blur, count", [(3, 3), *(pytest.param(n, 20, marks=pytest.mark.slow) for n in (0, 4))]
)
def test_deviations_are_right_for_photographs(shared_data, blur, count):
    """Also for blurred views, in which SIFT finds large keypoints alone.

    The view has noise of two gray levels: it is warped from the same exposure, so that noise would
    be equal in both images, which it never is in two photographs.
    """
    matcher = Matcher.load(device="cpu")
    random = np.random.default_rng(0)
    ratios = []
    for path in sorted((shared_data / "coco/val").glob("*.jpg"))[:count]:
        image = cv2.imread(str(path), cv2.IMREAD_GRAYSCALE)
        view = cv2.warpPerspective(image, MILD, image.shape[::-1], flags=cv2.INTER_CUBIC)
        view = cv2.GaussianBlur(view, (0, 0), blur) if blur else view
        view = (view + random.normal(0, 2, view.shape)).round().clip(0, 255).astype(np.uint8)
        result = matcher.match(image, view)
        result = result.select(np.isfinite(result.deviations))
        offsets = two_view.transform(result.points0.astype(float), MILD) - result.points1
        errors = np.linalg.norm(offsets, axis=1)
        ratios.append((errors / result.deviations)[errors < 3])
    assert 1 / 1.7 < np.median(np.concatenate(ratios)) / RAYLEIGH < 1.7


def test_reduced_pixels_give_positions_in_px_of_the_file():
    """A center x of a pixel is at 2.5 (x + 0.5) - 0.5 in a file of 2.5 times the size."""
    grays = draw_texture(IDENTITY), draw_texture(TURN)
    points = make_matches(TURN)
    small = refine(grays, points)
    file_points = tuple(2.5 * (xy + 0.5) - 0.5 for xy in points)
    large = refine(grays, file_points, [(800, 600)] * 2)
    np.testing.assert_allclose(large[0], 2.5 * (small[0] + 0.5) - 0.5, atol=0.01)
    np.testing.assert_allclose(large[1], 2.5 * small[1], rtol=0.02)


def test_along_a_straight_edge_a_match_moves_along_the_normal_alone():
    step = (60 + 120 / (1 + np.exp(160.0 - np.arange(SIZE[0])))).round().astype(np.uint8)
    image = np.tile(step, (SIZE[1], 1))
    start = np.array([[160.8, 100.7], [159.1, 141.4]])
    points = np.array([[160.0, 100.0], [160.0, 140.0]])
    maps = np.tile(np.eye(2), (2, 1, 1))
    refined1, deviations, _ = refinement.refine_points((image, image), (points, start), maps)
    np.testing.assert_allclose(refined1[:, 0], 160, atol=0.02)
    np.testing.assert_allclose(refined1[:, 1], start[:, 1], atol=0.02)
    assert (deviations > 0.2).all()  # along the edge nothing is known but SIFT's position


def test_a_match_that_cannot_be_refined_keeps_its_position():
    image = draw_texture(IDENTITY)
    points = np.tile([[100.0, 100.0]], (9, 1))
    points[1, 0] = 3.0  # its patch leaves the image
    start = points.copy()
    start[2] = (60, 160)  # wrong
    start[3] = np.nan
    start[4] = 1e30
    maps = np.tile(np.eye(2), (9, 1, 1))
    maps[5:8] *= np.array([np.nan, 0.0, 1e6])[:, None, None]
    refined1, deviations, _ = refinement.refine_points((image, image), (points, start), maps)
    assert np.isfinite(deviations).tolist() == [True, *[False] * 7, True]
    np.testing.assert_array_equal(refined1[1:8], start[1:8].astype(np.float32))
    flat = np.full(SIZE[::-1], 90, np.uint8)
    _, deviations, _ = refinement.refine_points((flat, image), (points, points), maps)
    assert np.isnan(deviations).all()


@pytest.mark.parametrize("shape, count", [((1, 1), 1), ((1, 300), 9), ((300, 1), 0)])
def test_in_images_without_room_for_a_patch_matches_keep_their_positions(shape, count):
    image = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    points = np.random.default_rng(1).uniform(0, 1, (count, 2)) * (np.array(shape[::-1]) - 1)
    sizes = [shape[::-1]] * 2
    refined1, deviations, correlations = refine((image, image), (points, points), sizes)
    np.testing.assert_array_equal(refined1, points.astype(np.float32))
    assert np.isnan(deviations).all() and correlations.shape == (count,)


@pytest.mark.parametrize("blur", [1.0, 3.0])
def test_with_added_blur_the_covariance_sums_over_all_pairs_of_samples(blur):
    """Residuals at a distance d correlate by exp(-d^2 / (4 s^2)). The mean square residual is 2 - 2
    times the correlation.
    """
    _, inner, weight = refinement.make_patch_offsets("cpu")
    patch = np.random.default_rng(0).uniform(0, 255, (refinement.SIDE + 2,) * 2)
    samples = torch.from_numpy(cv2.GaussianBlur(patch, (0, 0), 2.0)).float().reshape(1, -1)
    template = refinement.Template(samples, weight)
    squared_distances = ((inner[:, None] - inner) ** 2).sum(2)
    alike = torch.exp(-squared_distances / (4 * (refinement.SMOOTHING_PX**2 + blur**2)))
    pull = template.inverse[0] @ template.rows[0, :2]  # the shift per residual of each sample
    independent = 1 - weight @ alike @ weight
    variance = (2 - 2 * 0.9) * (pull @ alike @ pull.T) / independent
    deviation = template.compute_deviation(torch.tensor([0.9]), blur)
    assert deviation.item() == pytest.approx(float(variance.trace() / 2) ** 0.5, rel=1e-3)
