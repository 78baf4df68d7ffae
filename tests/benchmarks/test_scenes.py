"""benchmarks.dev.verification: made pairs with their truth, and the weights learned from them.
benchmarks.dev.scenes: cameras of a file.
"""

import itertools

import cv2
import numpy as np
import pandas as pd
import pytest

from benchmarks.dev import scenes, verification
from benchmarks.photographs import load_photographs
from pipeline.keypoints.views import make_generator
from superglue_sift import errors
from superglue_sift.geometry import two_view


def likeness(image0, image1, H):
    """Correlation of both images where H maps one onto the other."""
    moved = cv2.warpPerspective(image0, H, image1.shape[::-1])
    inside = cv2.warpPerspective(np.full_like(image0, 255), H, image1.shape[::-1]) > 254
    return np.corrcoef(moved[inside], image1[inside])[0, 1] if inside.sum() > 500 else 0


@pytest.mark.parametrize("kind", verification.KINDS)
def test_made_views_are_the_same_every_time_and_look_alike_where_the_truth_says(kind):
    make_views = verification.KINDS[kind]
    views, again = (
        make_views(make_generator(0, "a.jpg", 0), *load_photographs(2)) for _ in range(2)
    )
    for (image, _), (same, _) in zip(views, again):
        assert image.dtype == np.uint8 and image.ndim == 2
        np.testing.assert_array_equal(image, same)
    best = [
        likeness(image0, image1, two_view.compose(H1, two_view.inverse(H0)))
        for (image0, maps0), (image1, maps1) in itertools.combinations(views, 2)
        for H0, H1 in zip(maps0, maps1)
    ]
    assert max(best) > 0.8


def test_a_match_is_judged_by_the_plane_that_fits_best():
    moved = np.array([[1.0, 0, 30], [0, 1, 0], [0, 0, 1]])
    points = np.array([[10.0, 20], [40, 50]])
    distances = verification.measure_distances(
        [np.eye(3), moved], points, np.add(points, [[27, 0], [0, 5]])
    )
    np.testing.assert_allclose(distances, [3, 5])


def test_weights_are_learned_and_reported():
    rng = np.random.default_rng(0)
    evidence = rng.normal(0, 2, (4000, 2))
    right = rng.uniform(size=4000) < 1 / (1 + np.exp(-evidence @ [1.0, 0.5]))
    pairs = pd.DataFrame(evidence, columns=verification.EVIDENCE)
    pairs = pairs.assign(place=np.arange(4000) % verification.PLACES, kind="court", right=right)
    # Half of these pairs are right, but two thirds of a collection's, so the bias is log 2.
    np.testing.assert_allclose(verification.learn_weights(pairs), [1.0, 0.5, np.log(2)], atol=0.2)
    assert (
        verification.learn_weights(pairs.assign(log_inlier_ratio=-pairs.log_inlier_ratio))[0] == 0
    )  # never negative
    constants, learned, fresh = verification.format_report(pairs).split("\n\n")
    assert constants.startswith("WEIGHTS = np.array([")
    taught = pairs.place < verification.LEARNED
    for table, part in ((learned, pairs[taught]), (fresh, pairs[~taught])):
        name, *numbers = table.splitlines()[-1].split()
        count, of_one, refused, false = map(int, numbers[:4])
        assert (name, count, of_one) == ("all", len(part), part.right.sum())
        assert refused + false < 0.33 * count


def test_a_camera_file_that_is_wrong_is_named(tmp_path, capsys):
    pytest.importorskip("pycolmap")
    (tmp_path / "cameras.txt").write_text("a.jpg 1 2 3\n")
    words = [str(tmp_path), "--cameras", str(tmp_path / "cameras.txt")]
    assert errors.run_main(scenes.main, words) == 2
    assert "cameras.txt: needs" in capsys.readouterr().err
