"""Alignment of matches to a fraction of a pixel, on views whose homographies are known exactly."""

import cv2
import numpy as np
import pytest
from made_pairs import records_at
from made_scenes import IDENTITY, MILD, places_shown

from superglue_sift import Matcher
from superglue_sift.features import sift
from superglue_sift.geometry import refinement, two_view
from superglue_sift.match_result import MatchResult
from superglue_sift.matches import Matches

SIZE = (320, 240)
TURN = np.array([[0.92, -0.26, 50], [0.26, 0.92, -20], [1e-4, -5e-5, 1]])
SHIFT = np.array([[1.0, 0, 6.3], [0, 1, -4.6], [0, 0, 1]])
RAYLEIGH = np.sqrt(2 * np.log(2))  # median length of an error with deviation 1 along each axis


def texture(H):
    """(240, 320) uint8: what a camera at H sees of a sum of sines, exact at every place."""
    rng = np.random.default_rng(0)
    frequency = rng.normal(0, 0.35, (150, 2))
    phase = rng.uniform(0, 2 * np.pi, 150)
    seen = places_shown(H, SIZE).reshape(2, -1).T
    values = np.sin(seen @ frequency.T + phase).sum(1) / np.sqrt(75)
    return np.clip(128 + 45 * values, 0, 255).round().astype(np.uint8).reshape(SIZE[::-1])


def scatter(H, count=150, px=0.5):
    """Records of points whose patches both images hold, and of their places by H, off by `px`."""
    rng = np.random.default_rng(1)
    points = rng.uniform(20, np.array(SIZE) - 21, (6 * count, 2))
    truth = two_view.transform(points, H)
    inside = ((truth > 20) & (truth < np.array(SIZE) - 21)).all(1)
    truth = truth[inside][:count]
    return records_at(points[inside][:count]), records_at(truth + rng.normal(0, px, truth.shape))


def refine(*inputs):
    """`refinement.refine` as a result: refined positions beside those of image 0."""
    moved, deviations, correlations = refinement.refine(*inputs)
    points0 = sift.positions(inputs[2])
    found = Matches(np.stack([np.arange(len(moved))] * 2, 1), np.ones(len(moved), np.float32))
    return MatchResult(points0, moved, found, SIZE, SIZE, points0, moved, deviations, correlations)


def errors_of(found, H):
    """(K,) px, without matches that were not refined."""
    off = two_view.transform(found.points0.astype(float), H) - found.points1
    return np.linalg.norm(off, axis=1)[np.isfinite(found.deviations)]


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
def test_matches_are_right_to_a_tenth_of_a_pixel(H, change):
    found = refine(texture(IDENTITY), CHANGES[change](texture(H)), *scatter(H))
    assert np.isfinite(found.deviations).mean() > 0.85
    assert errors_of(found, H).mean() < (0.05 if change == "nothing" else 0.1)  # 0.6 before
    assert np.nanmedian(found.correlations) > 0.9


def test_matches_that_start_far_off_are_refined_from_a_coarser_level():
    found = refine(texture(IDENTITY), texture(TURN), *scatter(TURN, px=2.0))
    assert np.isfinite(found.deviations).mean() > 0.9  # 0.7 without
    assert errors_of(found, TURN).mean() < 0.1


@pytest.mark.parametrize("which, deviation, limit_px", [(0, 2.0, 0.05), (1, 4.0, 0.2)])
def test_where_one_image_is_blurred_the_other_is_blurred_alike(
    which, deviation, limit_px, monkeypatch
):
    """Without that errors are several times as large, as the last line shows."""
    images = [texture(IDENTITY), texture(TURN)]
    images[which] = cv2.GaussianBlur(images[which], (0, 0), deviation)
    found = refine(*images, *scatter(TURN))
    error = np.median(errors_of(found, TURN))
    assert np.isfinite(found.deviations).mean() > 0.85 and error < limit_px
    monkeypatch.setattr(refinement, "BLURRED", 100.0)
    assert np.median(errors_of(refine(*images, *scatter(TURN)), TURN)) > 2 * error


@pytest.mark.parametrize(
    "blur, count", [(3, 3), *(pytest.param(n, 20, marks=pytest.mark.slow) for n in (0, 4))]
)
def test_deviations_of_photographs(shared_data, blur, count):
    """Deviations are right for photographs and blurred views of them, in which SIFT finds large
    keypoints alone.

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
        found = matcher.match(image, view)
        errors = errors_of(found, MILD)
        ratios.append((errors / found.deviations[np.isfinite(found.deviations)])[errors < 3])
    assert 1 / 1.7 < np.median(np.concatenate(ratios)) / RAYLEIGH < 1.7


def test_along_a_straight_edge_a_match_moves_along_the_normal_alone():
    step = (60 + 120 / (1 + np.exp(160.0 - np.arange(SIZE[0])))).round().astype(np.uint8)
    image = np.tile(step, (SIZE[1], 1))
    start = np.array([[160.8, 100.7], [159.1, 141.4]])
    points = np.array([[160.0, 100.0], [160.0, 140.0]])
    maps = np.tile(np.eye(2), (2, 1, 1))
    moved, deviations, _ = refinement.refine_points(image, image, points, start, maps)
    np.testing.assert_allclose(moved[:, 0], 160, atol=0.02)
    np.testing.assert_allclose(moved[:, 1], start[:, 1], atol=0.02)
    assert (deviations > 0.2).all()  # along the edge nothing is known but SIFT's position


def test_what_cannot_be_refined_stays_where_sift_put_it():
    image = texture(IDENTITY)
    points = np.tile([[100.0, 100.0]], (9, 1))
    points[1, 0] = 3.0  # its patch leaves the image
    start = points.copy()
    start[2] = (60, 160)  # wrong
    start[3] = np.nan
    start[4] = 1e30
    maps = np.tile(np.eye(2), (9, 1, 1))
    maps[5:8] *= np.array([np.nan, 0.0, 1e6])[:, None, None]
    moved, deviations, _ = refinement.refine_points(image, image, points, start, maps)
    assert np.isfinite(deviations).tolist() == [True, *[False] * 7, True]
    np.testing.assert_array_equal(moved[1:8], start[1:8].astype(np.float32))
    flat = np.full(SIZE[::-1], 90, np.uint8)
    assert np.isnan(refinement.refine_points(flat, image, points, points, maps)[1]).all()


@pytest.mark.parametrize("shape, count", [((1, 1), 1), ((1, 300), 9), ((300, 1), 0)])
def test_images_of_any_size_and_any_number_of_matches(shape, count):
    image = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    points = np.random.default_rng(1).uniform(0, 1, (count, 2)) * (np.array(shape[::-1]) - 1)
    found = refine(image, image, records_at(points), records_at(points))
    np.testing.assert_array_equal(found.refined1, points.astype(np.float32))
    assert np.isnan(found.deviations).all() and found.correlations.shape == (count,)


def test_without_a_geometry_the_map_is_that_of_scales_and_angles():
    one = records_at(np.zeros((1, 2)))
    other = one.copy()
    other["angle"] += 90
    other["scale"] *= 2
    np.testing.assert_allclose(
        refinement.map_by_scale_and_angle(one, other), [[[0, -2], [2, 0]]], atol=1e-6
    )
