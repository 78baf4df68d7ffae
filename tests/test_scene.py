"""Scenes: which matches a pair gets, and which real photographs are accepted."""

import csv
import dataclasses
import itertools

import cv2
import numpy as np
import pytest
from made_matches import (
    concatenate,
    join,
    make_wrong_matches,
    match_range,
    slide_along_lines,
    view_surface,
)
from made_pairs import make_features_at

from benchmarks.dev import scenes as benchmark
from superglue_sift import Matcher, errors, scene
from superglue_sift.apps import cli
from superglue_sift.geometry import two_view
from superglue_sift.matches import Matches

SIZE = (640, 480)


def verify(points, network_matches, mutual_matches, accept=0.5, factors=(1.0, 1.0)):
    pair = [
        make_features_at(factor * xy, (int(factor * SIZE[0]), int(factor * SIZE[1])))
        for factor, xy in zip(factors, points)
    ]
    return scene.verify_pair(pair, network_matches, mutual_matches, factors, 0.28, accept)


# Made matches


def test_all_matches_that_agree_with_the_geometry_are_added():
    points = concatenate(view_surface(200), make_wrong_matches(100))
    # The other 160 are left to the ratio test.
    network_matches = join(match_range(0, 40, 0.6), match_range(200, 220, 0.4))
    matches, score = verify(points, network_matches, match_range(0, 300, 0.5))
    assert 0.5 < score < 1
    is_right = matches.indices[:, 0] < 200
    # Of 100 at random places few lie on their lines.
    assert is_right.sum() == 200 and (~is_right).sum() < 6
    assert (np.diff(matches.indices[:, 0]) > 0).all()
    assert (matches.scores[:40] == np.float32(0.6)).all() and matches.scores[50] == 0.5
    without_ratio_test, _ = verify(points, network_matches, Matches.none())
    assert (without_ratio_test.indices[:, 0] < 200).sum() == 40


def test_a_pair_below_the_limit_has_no_matches():
    points = make_wrong_matches(200)
    matches, score = verify(points, match_range(0, 200, 0.6), match_range(0, 200, 0.5), accept=0.9)
    assert 0 < score < 0.9 and len(matches) == 0
    matches, score = verify(points, Matches.none(), Matches.none(), accept=0.0)
    assert len(matches) == 0 and score > scene.SKIPPED


@pytest.mark.parametrize("factors", [(4.0, 4.0), (4.0, 1.0)])
def test_limits_are_multiplied_in_larger_files(factors):
    """Files of four times the size have the same matches, since SIFT saw the same images."""
    points0, points1 = view_surface(200)
    points = points0, points1 + np.random.default_rng(2).normal(0, 0.8, points1.shape)
    pair_matches = match_range(0, 40, 0.6), match_range(0, 200, 0.5)
    expected, score = verify(points, *pair_matches)
    matches, large_score = verify(points, *pair_matches, factors=factors)
    different = set(map(tuple, matches.indices)) ^ set(map(tuple, expected.indices))
    assert len(different) <= 4 < 100 < len(matches) < 200  # at the limit, by rounding
    assert large_score == pytest.approx(score, abs=0.01)
    # Limits that are not multiplied are too strict.
    pair = [make_features_at(factor * xy, SIZE) for factor, xy in zip(factors, points)]
    few, _ = scene.verify_pair(pair, *pair_matches, (1.0, 1.0), 0.28, 0.5)
    assert len(few) < len(matches)


def test_an_unsure_match_is_kept_where_its_neighbors_predict_it():
    """Sliding along its epipolar line, a wrong match fits the geometry, but no surface."""
    points = slide_along_lines(view_surface(200), 0.1 * (np.arange(200) >= 150))
    mutual_matches = join(match_range(0, 100, 0.5), match_range(100, 200, 0.05))
    matches, _ = verify(points, match_range(0, 40, 0.6), mutual_matches)
    counts = np.bincount(matches.indices[:, 0] // 50, minlength=4)  # of each 50
    assert counts[:2].tolist() == [50, 50]  # pass the ratio test
    assert counts[2] > 40 and counts[3] < 5
    unsure_scores = matches.scores[matches.indices[:, 0] >= 100]
    assert unsure_scores.min() >= 0.5 and unsure_scores.max() <= 0.6001  # means of neighbors


def test_two_keypoints_at_one_position_count_once():
    points = view_surface(60)
    copies = np.random.default_rng(0).integers(0, 60, 180)
    repeated_points = concatenate(points, [xy[copies] for xy in points])
    ratio_matches = match_range(0, 60, 0.5)
    once = match_range(0, 60, 0.6)
    repeated = join(once, match_range(60, 240, 0.5))
    _, expected = scene.fit_geometry(once, ratio_matches, points, (1.0, 1.0))
    _, evidence = scene.fit_geometry(repeated, ratio_matches, repeated_points, (1.0, 1.0))
    np.testing.assert_allclose(evidence, expected, rtol=1e-6)


# Real photographs

NAMES = ("Herz-Jesus-P25_0005.jpg", "Herz-Jesus-P25_0007.jpg", "entry-P10_0003.jpg")


@pytest.fixture(scope="module")
def matcher():
    return Matcher.load(device="cpu", max_keypoints=3000, resize=768, scene=True)


@pytest.fixture(scope="module")
def strecha(shared_data):
    folder = shared_data / "poses/strecha"
    return folder, benchmark.read_cameras(folder / "cameras_gt.txt")


def test_a_scene_has_settings_of_its_own():
    default, for_scenes = (Matcher.load(device="cpu", scene=is_scene) for is_scene in (False, True))
    settings = default.max_keypoints, default.network_keypoints, default.resize
    assert settings == (4096, 1024, 1024) and default.refines
    settings = for_scenes.max_keypoints, for_scenes.network_keypoints, for_scenes.resize
    assert settings == (8192, 512, 1600) and not for_scenes.refines
    assert dataclasses.replace(for_scenes, rules=None).refines
    # A false pair ruins a model, and a refused one costs little.
    assert for_scenes.rules.accept == 0.9


def test_photographs_of_one_place_are_accepted_and_of_two_places_are_not(strecha, matcher):
    folder, cameras = strecha
    features, near, unrelated = (matcher.extract(folder / name) for name in NAMES)
    result = matcher.match(features, near)
    rejected, accepted = matcher.match_batch([(features, unrelated), (features, near)])
    np.testing.assert_array_equal(accepted.matches, result.matches)
    assert rejected.pair_score == scene.SKIPPED and not rejected.accepted
    assert len(rejected.matches) == 0
    assert result.accepted and result.pair_score > 0.95
    assert len(result.matches) > 850  # 917; the network alone finds 474
    pair = [cameras[name] for name in NAMES[:2]]
    F = benchmark.compute_fundamental(*pair)
    distances = two_view.compute_epipolar_distances(F, result.points0, result.points1)
    assert (distances < 4).mean() > 0.95
    pose = result.estimate_relative_pose(*(camera.K for camera in pair))
    error = pose.R @ pair[0].R @ pair[1].R.T
    assert np.degrees(np.arccos((np.trace(error) - 1) / 2)) < 1 and pose.supported
    results = matcher.match_many(features, [near, unrelated], accepted_only=True)
    assert [len(accepted.matches) for accepted in results] == [len(result.matches)]


@pytest.mark.parametrize("enlarged", [2, 4])
def test_the_ratio_test_has_as_many_inliers_in_larger_files(strecha, matcher, enlarged):
    """SIFT sees the same image of 768 px, so all that differs is rounding."""
    folder, _ = strecha
    counts = []
    for scale in (1, enlarged):
        pair = []
        for name in NAMES[:2]:
            gray = cv2.imread(str(folder / name), cv2.IMREAD_GRAYSCALE)[::2, ::2]
            pair.append(matcher.extract(np.repeat(np.repeat(gray, scale, 0), scale, 1)))
        counts.append(scene.verify_ratio_matches(pair, matcher.get_limit_factors(pair))[0])
    assert counts[0] > 100 and counts[1] == pytest.approx(counts[0], rel=0.03)


def draw_date(image, number):
    """A black bar at the top with the date and time of photograph `number`."""
    image = cv2.resize(image, (640, 480))
    image[:32] = 0
    words = f"2024-03-{11 + number:02d} 14:{22 + number}:07 CAM 03"
    return cv2.putText(image, words, (8, 24), cv2.FONT_HERSHEY_SIMPLEX, 0.7, 255, 2, cv2.LINE_AA)


def test_unrelated_photographs_with_one_date_bar_are_not_accepted(shared_data, matcher):
    paths = sorted((shared_data / "coco/val").glob("*.jpg"))[3:7]
    images = [cv2.imread(str(path), cv2.IMREAD_GRAYSCALE) for path in paths]
    features = [matcher.extract(draw_date(image, number)) for number, image in enumerate(images)]
    for pair in itertools.combinations(features, 2):
        result = matcher.match(*pair)
        assert not result.accepted and result.pair_score < 0.2
    assert matcher.match(features[0], features[0]).accepted


def test_a_folder_lists_its_pairs_and_the_database_has_the_accepted_ones(strecha, tmp_path):
    pycolmap = pytest.importorskip("pycolmap")
    (tmp_path / "photos").mkdir()
    for name in NAMES:
        (tmp_path / "photos" / name).symlink_to(strecha[0] / name)
    out = tmp_path / "out"
    words = ["folder", str(tmp_path / "photos"), "--out-dir", str(out)]
    words += ["--max-keypoints", "2000", "--resize", "768", "--device", "cpu"]
    tables, keypoints = [], []
    for name in ("first.db", "resumed.db"):
        assert errors.run_main(cli.main, [*words, "--colmap", str(tmp_path / name)]) == 0
        tables.append((out / "pairs.csv").read_text())
        with pycolmap.Database.open(str(tmp_path / name)) as database:
            keypoints.append([database.read_keypoints(number) for number in (1, 2, 3)])
        min(out.glob("*_matches.npz")).unlink()
    assert tables[0] == tables[1] and all(map(np.array_equal, *keypoints))
    rows = list(csv.DictReader(tables[0].splitlines()))
    assert [row["accepted"] for row in rows] == ["1", "0", "0"]
    assert float(rows[0]["pair_score"]) > 0.95 and rows[0]["reason"] == ""
    assert all(row["reason"] for row in rows[1:])
    with pycolmap.Database.open(str(tmp_path / "resumed.db")) as database:
        assert len(database.read_all_images()) == 3
        assert database.num_verified_image_pairs() == 1
        # A few do not fit any more where the pixels agree.
        assert 0.9 < database.num_matches() / int(rows[0]["matches"]) <= 1
