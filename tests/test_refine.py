"""Alignment of matches to a fraction of a pixel, on views whose homographies are known exactly."""

from __future__ import annotations

import functools
import threading

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superglue_sift import Matcher, geometry, local_maps, refine
from superglue_sift.features import Features
from superglue_sift.match_result import MatchResult
from superglue_sift.sift import KEYPOINT
from superglue_sift.tracks import refine_tracks

SIZE = (320, 240)
TURN = np.array([[0.92, -0.26, 50], [0.26, 0.92, -20], [1e-4, -5e-5, 1]])
SHIFT = np.array([[1.0, 0, 6.3], [0, 1, -4.6], [0, 0, 1]])


def texture(H: np.ndarray, seed: int = 0, waves: int = 150) -> np.ndarray:
    """(240, 320) uint8: what a camera at H (3, 3) sees of a sum of sines, exact at every place,
    rounded once.
    """
    rng = np.random.default_rng(seed)
    frequency = rng.normal(0, 0.35, (waves, 2))
    phase = rng.uniform(0, 2 * np.pi, waves)
    x, y = np.meshgrid(np.arange(SIZE[0]), np.arange(SIZE[1]))
    seen = geometry.transform(np.stack([x.ravel(), y.ravel()], 1).astype(float), np.linalg.inv(H))
    values = np.sin(seen @ frequency.T + phase).sum(1) / np.sqrt(waves / 2)
    return np.clip(128 + 45 * values, 0, 255).round().astype(np.uint8).reshape(SIZE[::-1])


def scattered(H: np.ndarray, count: int = 150, scatter: float = 0.5, seed: int = 1):
    """Points (K, 2) of image 0 whose patches both images hold, where they are in image 1, and
    SIFT-like records.
    """
    rng = np.random.default_rng(seed)
    points = rng.uniform(20, np.array(SIZE) - 21, (4 * count, 2))
    truth = geometry.transform(points, H)
    inside = ((truth > 20) & (truth < np.array(SIZE) - 21)).all(1)
    points = points[inside][:count]
    truth = truth[inside][:count]
    return (
        points,
        truth,
        (records_at(points), records_at(truth + rng.normal(0, scatter, truth.shape))),
    )


def records_at(points: np.ndarray) -> np.ndarray:
    records = np.zeros(len(points), KEYPOINT)
    records["x"], records["y"] = points.T
    records["scale"] = 4.0
    return records


def errors(found: refine.Aligned, H: np.ndarray) -> np.ndarray:
    return np.linalg.norm(
        geometry.transform(found.aligned0.astype(float), H) - found.aligned1, axis=1
    )


@pytest.mark.parametrize(
    "H", [np.eye(3), SHIFT, TURN, geometry.compose(np.diag([1.6, 1.6, 1]), SHIFT)]
)
def test_matches_of_views_without_noise_are_right_to_a_tenth_of_a_pixel(H):
    _, truth, records = scattered(H)
    found = refine.align(texture(np.eye(3)), texture(H), *records)
    start = np.linalg.norm(np.stack([records[1]["x"], records[1]["y"]], 1) - truth, axis=1)
    aligned = np.isfinite(found.deviations)
    assert start.mean() > 0.5 and aligned.mean() > 0.9
    assert errors(found, H)[aligned].mean() < 0.05
    assert (found.correlations[aligned] > 0.9).all()


def test_a_smaller_view_is_aligned_without_aliasing():
    H = np.diag([0.5, 0.5, 1.0])
    points, truth, _ = scattered(np.eye(3), 200)
    keep = (points < np.array(SIZE) - 40).all(1) & (points > 50).all(1)
    half = cv2.resize(texture(np.eye(3)), (160, 120), interpolation=cv2.INTER_AREA)
    exact = geometry.resizing(SIZE, (160, 120))
    truth = geometry.transform(points[keep], exact)
    rng = np.random.default_rng(3)
    records = records_at(points[keep]), records_at(truth + rng.normal(0, 0.4, truth.shape))
    found = refine.align(texture(np.eye(3)), half, *records)
    aligned = np.isfinite(found.deviations)
    assert aligned.mean() > 0.8 and errors(found, exact)[aligned].mean() < 0.1
    assert H.shape == exact.shape
    back = refine.align(half, texture(np.eye(3)), *records[::-1])
    aligned = np.isfinite(back.deviations)
    assert aligned.mean() > 0.8 and errors(back, np.linalg.inv(exact))[aligned].mean() < 0.2


@pytest.mark.parametrize(
    "change",
    [
        lambda image: cv2.convertScaleAbs(image, alpha=0.5, beta=60),
        lambda image: cv2.LUT(image, (255 * (np.arange(256) / 255) ** 1.5).astype(np.uint8)),
        lambda image: cv2.GaussianBlur(image, (0, 0), 1.2),
        lambda image: np.clip(
            image + np.random.default_rng(0).normal(0, 5, image.shape), 0, 255
        ).astype(np.uint8),
    ],
    ids=["gain and offset", "gamma", "blur", "noise"],
)
def test_light_blur_and_noise_leave_it_right(change):
    _, _, records = scattered(TURN)
    found = refine.align(texture(np.eye(3)), change(texture(TURN)), *records)
    aligned = np.isfinite(found.deviations)
    assert aligned.mean() > 0.85 and errors(found, TURN)[aligned].mean() < 0.1


@pytest.mark.parametrize("deviation, limit_px", [(2.0, 0.05), (4.0, 0.2)])
@pytest.mark.parametrize("which", [0, 1], ids=["image 0", "image 1"])
def test_where_one_image_is_blurred_the_other_is_blurred_alike(
    which, deviation, limit_px, monkeypatch
):
    """Without that errors are several times as large, as the last line shows."""
    _, _, records = scattered(TURN, 150)
    images = [texture(np.eye(3)), texture(TURN)]
    images[which] = cv2.GaussianBlur(images[which], (0, 0), deviation)
    found = refine.align(*images, *records)
    aligned = np.isfinite(found.deviations)
    assert aligned.mean() > 0.85
    error = np.median(errors(found, TURN)[aligned])
    assert error < limit_px
    monkeypatch.setattr(refine, "BLURRED", 100.0)
    assert np.median(errors(refine.align(*images, *records), TURN)[aligned]) > 2 * error


def test_the_deviation_is_the_size_of_the_error():
    rng = np.random.default_rng(5)
    _, _, records = scattered(TURN, 400)
    noisy = [
        np.clip(texture(H) + rng.normal(0, 12, SIZE[::-1]), 0, 255).astype(np.uint8)
        for H in (np.eye(3), TURN)
    ]
    found = refine.align(*noisy, *records)
    aligned = np.isfinite(found.deviations)
    ratio = (
        np.sqrt((errors(found, TURN)[aligned] ** 2).mean() / 2) / found.deviations[aligned].mean()
    )
    assert 0.5 < ratio < 2.0


@pytest.mark.parametrize("blur", [1, 2, 3, 4])
def test_the_deviation_is_the_size_of_the_error_under_blur(blur):
    rng = np.random.default_rng(5)
    _, _, records = scattered(TURN, 250)
    images = [np.clip(texture(H) + rng.normal(0, 3, SIZE[::-1]), 0, 255) for H in (np.eye(3), TURN)]
    images[1] = cv2.GaussianBlur(images[1], (0, 0), blur)
    images = [image.astype(np.uint8) for image in images]
    assert 1 / 1.7 < calibration(images, records, TURN) < 1.7


@pytest.mark.parametrize("blur", [2, 3, 4])
def test_the_deviation_is_the_size_of_the_error_between_blurred_photographs(shared_data, blur):
    """With the keypoints of the matcher, which finds large ones alone in a blurred photograph."""
    turn = np.array([[0.92, -0.16, 40], [0.14, 0.9, -12], [1e-4, -5e-5, 1]])
    matcher = Matcher.load(device="cpu")
    ratios = []
    for path in sorted((shared_data / "coco" / "val").glob("*.jpg"))[:3]:
        image = cv2.imread(str(path), cv2.IMREAD_GRAYSCALE)
        view = cv2.warpPerspective(image, turn, image.shape[::-1], flags=cv2.INTER_CUBIC)
        found = matcher.match(image, cv2.GaussianBlur(view, (0, 0), blur))
        off = np.linalg.norm(
            geometry.transform(found.aligned0.astype(float), turn) - found.aligned1, axis=1
        )
        ratios.append((off / found.deviations)[np.isfinite(found.deviations) & (off < 3)])
    assert 1 / 1.7 < np.median(np.concatenate(ratios)) / RAYLEIGH < 1.7


RAYLEIGH = np.sqrt(2 * np.log(2))  # median length of an error with deviation 1 along each axis


def calibration(images, records, H: np.ndarray) -> float:
    """Median error of aligned matches over their deviations; 1 where the deviations are right."""
    found = refine.align(*images, *records)
    aligned = np.isfinite(found.deviations)
    assert aligned.mean() > 0.9
    return float(np.median(errors(found, H)[aligned] / found.deviations[aligned]) / RAYLEIGH)


@functools.lru_cache(maxsize=1)
def unshifted():
    """Points, their start in image 1, maps, both images and the answer that shifts are compared
    with.
    """
    points, _, records = scattered(SHIFT, 40)
    images = (texture(np.eye(3)), texture(SHIFT))
    maps = np.tile(np.eye(2), (len(points), 1, 1))
    start = np.stack([records[1]["x"], records[1]["y"]], 1).astype(float)
    return points, start, maps, images, refine.align_points(*images, points, start, maps)


@settings(max_examples=15, deadline=None)
@given(st.integers(-7, 7), st.integers(-7, 7))
def test_shifting_an_image_by_whole_pixels_shifts_the_answer(dx, dy):
    points, start, maps, (image0, image1), before = unshifted()
    rolled = np.roll(image1, (dy, dx), (0, 1))
    moved = start + np.array([dx, dy])
    inside = ((moved > 17) & (moved < np.array(SIZE) - 18) & (start > 17)).all(1)
    after = refine.align_points(image0, rolled, points, moved, maps)
    np.testing.assert_allclose(
        after.aligned1[inside] - [dx, dy], before.aligned1[inside], atol=2e-3
    )


def test_along_a_straight_edge_a_match_moves_along_the_normal_alone():
    x = np.arange(SIZE[0])
    step = (60 + 120 / (1 + np.exp(-(x - 160.0)))).round().astype(np.uint8)
    image = np.tile(step, (SIZE[1], 1))
    start = np.array([[160.8, 100.7], [159.1, 141.4]])
    points = np.array([[160.0, 100.0], [160.0, 140.0]])
    found = refine.align_points(image, image, points, start, np.tile(np.eye(2), (2, 1, 1)))
    np.testing.assert_allclose(found.aligned1[:, 0], 160, atol=0.02)
    np.testing.assert_allclose(found.aligned1[:, 1], start[:, 1], atol=0.02)
    assert (found.deviations > 0.2).all()  # along the edge nothing is known but SIFT's position


def test_repeated_texture_does_not_jump_to_the_next_repeat():
    x, y = np.meshgrid(np.arange(SIZE[0]), np.arange(SIZE[1]))
    image = (128 + 60 * np.sin(x * 2 * np.pi / 9) * np.sin(y * 2 * np.pi / 9)).astype(np.uint8)
    points = np.random.default_rng(2).uniform(30, 200, (60, 2))
    start = points + np.random.default_rng(3).uniform(-1.2, 1.2, points.shape)
    found = refine.align_points(image, image, points, start, np.tile(np.eye(2), (60, 1, 1)))
    assert np.linalg.norm(found.aligned1 - points, axis=1).max() < 0.1


def test_at_a_depth_discontinuity_a_match_is_aligned_to_its_own_side_or_stays():
    """The right half lies nearer and is shifted by 5 px more than the left: no match lands between
    the two.
    """
    near = texture(np.array([[1.0, 0, 5], [0, 1, 0], [0, 0, 1]]))
    image0 = texture(np.eye(3))
    image1 = np.where(np.arange(SIZE[0])[None] >= 160, near, image0).astype(np.uint8)
    rng = np.random.default_rng(4)
    y = rng.uniform(20, 219, 120)
    points = np.stack(
        [np.where(np.arange(120) % 2, rng.uniform(100, 156, 120), rng.uniform(164, 220, 120)), y], 1
    )
    truth = points + np.where(points[:, :1] >= 160 - 5, [[5.0, 0]], [[0.0, 0]])
    keep = (np.abs(truth[:, 0] - 160) > 3) & (np.abs(points[:, 0] - 157.5) > 6)
    points = points[keep]
    truth = truth[keep]
    start = truth + rng.normal(0, 0.4, truth.shape)
    found = refine.align(image0, image1, records_at(points), records_at(start))
    before, after = (np.linalg.norm(p - truth, axis=1) for p in (start, found.aligned1))
    assert after.mean() < 0.5 * before.mean()
    assert (after[np.isfinite(found.deviations)] < 1.0).mean() > 0.97


def test_what_cannot_be_aligned_stays_where_sift_put_it():
    flat = np.full(SIZE[::-1], 90, np.uint8)
    image = texture(np.eye(3))
    points = np.array([[100.0, 100.0], [3.0, 100.0], [200.0, 100.0]])
    # Fits; its patch leaves the image; is wrong
    start = np.array([[100.0, 100.0], [3.5, 100.0], [60.0, 160.0]])
    maps = np.tile(np.eye(2), (3, 1, 1))
    found = refine.align_points(image, image, points, start, maps)
    assert np.isfinite(found.deviations).tolist() == [True, False, False]
    np.testing.assert_array_equal(found.aligned1[1:], start[1:].astype(np.float32))
    assert np.isnan(found.correlations[1]) and found.correlations[2] < 0.6
    without = refine.align_points(flat, image, points, start, maps)
    np.testing.assert_array_equal(without.aligned1, start.astype(np.float32))
    assert np.isnan(without.deviations).all() and np.isnan(without.correlations).all()


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (300, 1), (2, 3)])
@pytest.mark.parametrize("count", [0, 1, 9])
def test_images_of_any_size_and_any_number_of_matches(shape, count):
    image = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    points = np.random.default_rng(1).uniform(0, 1, (count, 2)) * (np.array(shape[::-1]) - 1)
    found = refine.align(image, image, records_at(points), records_at(points))
    np.testing.assert_array_equal(found.aligned1, points.astype(np.float32))
    assert np.isnan(found.deviations).all() and found.correlations.shape == (count,)


def test_wrong_maps_and_positions_harm_nobody():
    image = texture(np.eye(3))
    points = np.array([[100.0, 100.0]] * 6)
    maps = np.tile(np.eye(2), (6, 1, 1))
    maps[0] = np.nan
    maps[1] = 0.0
    maps[2] = 1e6 * np.eye(2)
    start = points.copy()
    start[3] = np.nan
    start[4] = 1e30
    found = refine.align_points(image, image, points, start, maps)
    assert np.isfinite(found.deviations).tolist() == [False] * 5 + [True]


def test_sixteen_threads_at_once_give_the_same():
    _, _, records = scattered(TURN, 60)
    images = (texture(np.eye(3)), texture(TURN))
    found = {}

    def work(number: int) -> None:
        found[number] = refine.align(*images, *records)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(16):
        np.testing.assert_array_equal(found[number].aligned1, found[0].aligned1)


def result(keypoints0, keypoints1, H, deviation=0.05) -> MatchResult:
    """All keypoints matched in order; aligned exactly as H says."""
    count = len(keypoints0)
    numbers = np.arange(count)
    made = MatchResult(
        keypoints0, keypoints1, np.stack([numbers] * 2, 1), np.ones(count, np.float32), SIZE, SIZE
    )
    aligned1 = geometry.transform(keypoints0.astype(float), H).astype(np.float32)
    return made._replace(
        aligned0=keypoints0, aligned1=aligned1, deviations=np.full(count, deviation, np.float32)
    )


def test_positions_of_a_track_agree_after_refinement():
    rng = np.random.default_rng(0)
    points = rng.uniform(0, 300, (80, 2))
    cameras = [np.eye(3), SHIFT, TURN]
    truth = [geometry.transform(points, H) for H in cameras]
    keypoints = [(p + rng.normal(0, 0.5, p.shape)).astype(np.float32) for p in truth]
    maps = {
        (i, j): cameras[j] @ np.linalg.inv(cameras[i]) for i in range(3) for j in range(3) if i < j
    }
    found = [(i, j, result(keypoints[i], keypoints[j], H)) for (i, j), H in maps.items()]
    refined = refine_tracks(keypoints, iter(found))

    def disagreement(given):
        return np.mean(
            [
                np.linalg.norm(geometry.transform(given[i], H) - given[j], axis=1)
                for (i, j), H in maps.items()
            ]
        )

    assert disagreement(keypoints) > 0.8 and disagreement(refined) < 0.05
    assert [one.dtype for one in refined] == [np.float32] * 3
    away = [np.linalg.norm(p - q, axis=1).mean() for p, q in zip(refined, truth)]
    assert np.mean(away) < 0.45  # the mean of three: 0.63 px / sqrt(3)


def test_tracks_of_photographs_three_times_as_large_are_the_same():
    rng = np.random.default_rng(0)
    points = rng.uniform(0, 1200, (80, 2))
    keypoints = [
        (geometry.transform(points, H) + rng.normal(0, 0.5, points.shape))
        for H in (np.eye(3), SHIFT)
    ]
    enlarge = np.diag([3.0, 3.0, 1.0])
    refined = []
    for unit, H in ((1, SHIFT), (3, geometry.compose(enlarge, SHIFT, np.linalg.inv(enlarge)))):
        sides = [(unit * side).astype(np.float32) for side in keypoints]
        size = (1600 * unit, 1200 * unit)
        found = result(*sides, H, 0.05 * unit)._replace(size0=size, size1=size)
        refined.append([side / unit for side in refine_tracks(sides, [(0, 1, found)])])
    for one, other in zip(*refined):
        np.testing.assert_allclose(one, other, atol=2e-3)


def test_tracks_without_alignment_stay_as_they_are():
    keypoints = [
        np.random.default_rng(i).uniform(0, 100, (n, 2)).astype(np.float32)
        for i, n in enumerate((5, 0, 7))
    ]
    none = result(keypoints[0], keypoints[2][:5], np.eye(3))._replace(deviations=None)
    for pairs in (
        [],
        [(0, 2, none)],
        [(0, 2, result(keypoints[0], keypoints[2][:5], np.eye(3), np.nan))],
    ):
        for before, after in zip(keypoints, refine_tracks(keypoints, pairs)):
            np.testing.assert_array_equal(before, after)


def test_a_homography_trusts_sure_matches():
    """Half of the matches scatter by 1 px and say so: the fit is nearly as good as of the exact
    half alone.
    """
    rng = np.random.default_rng(0)
    points = rng.uniform(0, 300, (60, 2))
    deviations = np.where(np.arange(60) % 2, 0.02, 1.0)
    seen = geometry.transform(points, TURN) + rng.normal(0, 1, (60, 2)) * deviations[:, None]
    plain, weighted = (
        geometry.corner_error(geometry.fit_ransac(points, seen, deviations=given), TURN, SIZE)
        for given in (None, deviations)
    )
    assert weighted < 0.1 and weighted < plain / 2


def test_a_result_stays_consistent():
    _, _, records = scattered(SHIFT, 50)
    sides = (
        Features(records[0], SIZE, texture(np.eye(3))),
        Features(records[1], SIZE, texture(SHIFT)),
    )
    scores = np.linspace(0, 0.98, len(records[0])).astype(np.float32)
    found = MatchResult.of(*sides, np.arange(len(records[0])), scores)
    assert found.aligned1 is None and found.align(sides[0], sides[1]._replace(gray=None)) is found
    aligned = found.align(*sides)
    np.testing.assert_array_equal(aligned.keypoints1, found.keypoints1)
    np.testing.assert_array_equal(aligned.points1, aligned.aligned1)
    few = aligned.above(0.5)
    assert (
        len(few.aligned0)
        == len(few.aligned1)
        == len(few.deviations)
        == len(few.correlations)
        == len(few.matches)
    )
    np.testing.assert_array_equal(few.points1, aligned.aligned1[found.scores > 0.5])


def test_local_maps_are_a_homographys_though_most_matches_are_wrong():
    """Of raw nearest neighbours two thirds are wrong; those that agree still lie on one plane."""
    rng = np.random.default_rng(0)
    H = np.array([[1.2, 0.1, 5.0], [-0.05, 0.9, -3.0], [1e-4, 2e-4, 1.0]])
    points0 = rng.uniform(0, 300, (180, 2))
    points1 = geometry.transform(points0, H)
    points1[60:] = rng.uniform(0, 300, (120, 2))
    maps = local_maps.local_maps(points0, points1, np.zeros((180, 2, 2)))
    np.testing.assert_allclose(maps[:60], geometry.jacobians(H, points0[:60]), atol=1e-3)
