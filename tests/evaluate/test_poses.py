"""Pose metrics on synthetic scenes with exact cameras."""

import math

import cv2
import numpy as np
import pytest
from made_scenes import write_model
from reading import read_json

from pipeline import errors
from pipeline.errors import RequestError
from pipeline.evaluate import __main__ as evaluate
from pipeline.evaluate import poses
from pipeline.evaluate.estimators import Points
from pipeline.evaluate.inputs import Pose
from superglue_sift.geometry import two_view

K = np.array([[500.0, 0, 320], [0, 500, 240], [0, 0, 1]])


def pose(degrees, t):
    T = np.eye(4)
    T[:3, :3] = cv2.Rodrigues(np.radians(np.array(degrees, float)))[0]
    T[:3, 3] = t
    return T


T = pose([3, -8, 2], [1.0, 0.1, 0.2])


def scene(count=80, noise=0.0, seed=0):
    """Pixels of random points in space in both cameras."""
    rng = np.random.default_rng(seed)
    points = rng.uniform([-2, -1.5, 4], [2, 1.5, 9], (count, 3))
    other = points @ T[:3, :3].T + T[:3, 3]
    pixels = [(p / p[:, 2:]) @ K.T for p in (points, other)]
    return [p[:, :2] + rng.normal(0, noise, (count, 2)) if noise else p[:, :2] for p in pixels]


def matches_of(points, seed=0, deviations=None):
    ones = np.ones(len(points[0]))
    return Points(*points, ones, ones > 0, seed, deviations)


def error_of(points):
    """Degrees, of the pose estimated from matched pixels."""
    known = Pose(K, K, T)
    return poses.pose_error(poses.estimate(matches_of(points, 1), known), known)


def test_exact_matches_give_the_exact_pose():
    assert error_of(scene()) < 0.05
    assert poses.correct_matches(*scene(), Pose(K, K, T)).sum() == 80


def test_outliers_are_wrong_matches_and_do_not_move_the_pose():
    points = scene(noise=0.2)
    points[1][:30] = np.random.default_rng(5).uniform([0, 0], [640, 480], (30, 2))
    assert (
        error_of(points) < 2.0 and 50 <= poses.correct_matches(*points, Pose(K, K, T)).sum() <= 56
    )


@pytest.mark.parametrize("count", [0, 4])
def test_too_few_matches_are_an_infinite_error(count):
    assert math.isinf(error_of([side[:count] for side in scene()]))


@pytest.mark.parametrize("outliers", [0.0, 0.3])
def test_least_squares_over_all_matches_are_closer_than_the_best_sample(outliers):
    """Scatter as SIFT's; with a third of the matches exact, and deviations that say so, closer
    still.
    """
    errors = []
    for seed in range(8):
        points = scene(200, noise=0.5, seed=seed)
        points[1][:20] = np.random.default_rng(seed).uniform([0, 0], [640, 480], (20, 2))
        exact = scene(200, seed=seed)
        rows = np.arange(200) >= 200 * (1 - outliers)
        points = [np.where(rows[:, None], good, rough) for good, rough in zip(exact, points)]
        deviations = np.where(rows, 0.05, np.nan)
        known = Pose(K, K, T)
        given = matches_of(points, seed, deviations)
        found = [estimate(given, known) for estimate in poses.ESTIMATORS.values()]
        errors.append([poses.pose_error(pose, known) for pose in found])
    sampled, refined = np.mean(errors, axis=0)
    assert refined < (0.7 if outliers else 1.5) and refined < 0.6 * sampled


def test_epipolar_error_is_zero_on_the_truth_and_symmetric():
    flat = [poses.normalize(side, K) for side in scene()]
    assert poses.epipolar_errors(*flat, T).max() < 1e-20
    moved = flat[1] + [0, 0.01]
    there = poses.epipolar_errors(flat[0], moved, T)
    np.testing.assert_allclose(
        there, poses.epipolar_errors(moved, flat[0], np.linalg.inv(T)), rtol=1e-6
    )
    # both distances squared, summed: about twice 0.01 squared for epipolar lines that lie nearly
    # level
    assert 0.5e-4 < np.median(there) < 2.5e-4


def test_skewed_pixels_of_a_camera_are_read_with_their_skew():
    skewed = K.copy()
    skewed[0, 1] = 40.0
    rays = [two_view.transform(side, np.linalg.inv(K)) for side in scene()]
    points = [two_view.transform(side, skewed) for side in rays]
    known = Pose(skewed, skewed, T)
    assert poses.correct_matches(*points, known).all()
    errors = [
        poses.pose_error(estimate(matches_of(points), known), known)
        for estimate in poses.ESTIMATORS.values()
    ]
    assert max(errors) < 0.1
    upright = Pose(K, K, T)  # what ignoring the skew would give
    assert poses.pose_error(poses.estimate_refined(matches_of(points), upright), upright) > 0.5


def test_pose_error_is_the_larger_angle():
    base = Pose(K, K, pose([0, 0, 0], [1.0, 0, 0]))
    turned = pose([0, 7, 0], [1.0, 0, 0])
    moved = pose([0, 0, 0], [1.0, math.tan(math.radians(30)), 0])
    assert poses.pose_error((turned[:3, :3], turned[:3, 3]), base) == pytest.approx(7.0)
    # neither the length nor the sign of t can be seen
    assert poses.pose_error((turned[:3, :3], -5 * turned[:3, 3]), base) == pytest.approx(7.0)
    assert poses.pose_error((moved[:3, :3], moved[:3, 3]), base) == pytest.approx(30.0)
    assert math.isinf(poses.pose_error(None, base))


def line(name0, name1, K0=K, pose_=T):
    values = [*np.ravel(K0), *np.ravel(K), *np.ravel(pose_)]
    return f"{name0} {name1} 0 0 " + " ".join(repr(float(value)) for value in values)


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "contains no pair"),
        ("a.png b.png 0 0 1 2 3", "line 1: 7 words"),
        (line("a.png", "b.png").replace("500.0", "wide", 1), "line 1: could not convert"),
        (line("a.png", "b.png").replace(" 0 0 ", " 0 1 ", 1), "EXIF rotation"),
        (line("a.png", "b.png", pose_=np.diag([1.0, 1, 2, 1])), "does not contain a rotation"),
        (line("a.png", "b.png", K0=np.diag([0.0, 1, 1])), "focal lengths"),
    ],
)
def test_wrong_files_are_named(tmp_path, text, words):
    (tmp_path / "pairs.txt").write_text(text)
    with pytest.raises(RequestError, match=words):
        poses.read_pairs(tmp_path / "pairs.txt")
    (tmp_path / "picture.txt").write_bytes(b"\xff\xd8\xff")
    for name in ("picture.txt", "nowhere.txt"):
        with pytest.raises(RequestError, match=f"{name}: cannot be read as text"):
            poses.read_pairs(tmp_path / name)


def test_without_folders_pairs_that_share_photographs_are_one_scene():
    pairs = [("b", "c"), ("e", "f"), ("a", "b"), ("g", "f"), ("h", "i")]
    assert poses.scene_names(pairs) == ["b", "e", "b", "e", "h"]
    assert poses.scene_names([*pairs, ("c", "g")]) == ["b", "b", "b", "b", "h", "b"]
    # A pair across two folders makes them one scene
    joined = [("x/a", "y/b"), ("y/c", "y/d"), ("z/a", "z/b")]
    assert poses.scene_names(joined) == ["x", "x", "z"]
    assert poses.scene_names([]) == []


@pytest.fixture
def plane(tmp_path, photo, root):
    """Three pairs of a textured plane at depth 5 in front of camera 0; the words of a command that
    judges them.
    """
    small = pose([2, 5, 1], [0.5, 0.1, 0.0])
    H = K @ (small[:3, :3] + np.outer(small[:3, 3], [0, 0, 1]) / 5) @ np.linalg.inv(K)
    image = cv2.resize(photo, (640, 480))
    cv2.imwrite(str(tmp_path / "a.png"), image)
    cv2.imwrite(str(tmp_path / "b.png"), cv2.warpPerspective(image, H, (640, 480)))
    back = line("b.png", "a.png", pose_=np.linalg.inv(small))
    (tmp_path / "pairs.txt").write_text(
        "\n".join([line("a.png", "b.png", pose_=small), back, back])
    )
    write_model(tmp_path / "model.safetensors", layers=1)
    words = ["--model", tmp_path / "model.safetensors", "--poses", tmp_path / "pairs.txt"]
    words += ["--images", tmp_path, "--params", root / "presets/sample.yaml"]
    return [str(word) for word in (*words, "--device", "cpu", "--out")]


def test_a_textured_plane_from_end_to_end(plane, tmp_path, capsys):
    assert errors.run(evaluate.main, [*plane, str(tmp_path / "out")]) == 0
    values = read_json(tmp_path / "out/metrics.json")
    assert values["superglue.pairs"] == 3 and values["ratio_test.precision"] > 0.8
    assert values["superglue_scene.matches"] <= values["superglue.matches"]
    for name, other in (("precision", "matching_score"), ("matching_score", "precision")):
        # the operating point of the ratio test, and the best of ours there
        assert values[f"ratio_test.{name}_at_ratio_{other}"] == values[f"ratio_test.{name}"]
        assert 0 <= values[f"superglue.{name}_at_ratio_{other}"] <= 1
    assert values["superglue.estimated_pose_aligned"] == 3 and "superglue.recall" not in values
    printed = capsys.readouterr().out
    assert "AUC@5 POSE aligned" in printed and "R@P" not in printed
    page = (tmp_path / "out/index.html").read_text()
    pictures = list((tmp_path / "out/pictures").iterdir())
    assert page.count("data:image/jpeg") == len(pictures) == 5
    (tmp_path / "b.png").unlink()
    assert errors.run(evaluate.main, [*plane, str(tmp_path / "out")]) == 2
    assert "b.png: cannot be read" in capsys.readouterr().err
