"""benchmarks.dev.verification: made pairs with their truth, and the weights learned from them.
benchmarks.dev.scenes: cameras of a file.
"""

import cv2
import numpy as np
import pandas as pd
import pytest

from benchmarks.dev import scenes, verification
from benchmarks.photographs import photographs
from pipeline.keypoints.views import generator
from superglue_sift import errors


def likeness(image0, image1, H):
    """Correlation of both images where H maps one onto the other."""
    moved = cv2.warpPerspective(image0, H, image1.shape[::-1])
    inside = cv2.warpPerspective(np.full_like(image0, 255), H, image1.shape[::-1]) > 254
    return np.corrcoef(moved[inside], image1[inside])[0, 1] if inside.sum() > 500 else 0


@pytest.mark.parametrize("kind", verification.KINDS)
def test_made_pairs_are_the_same_every_time_and_look_alike_where_the_truth_says(kind):
    pair, again = (kind(generator(0, "a.jpg", 0), *photographs(2)) for _ in range(2))
    for one, other in zip(pair[:2], again[:2]):
        assert one.dtype == np.uint8 and one.ndim == 2
        np.testing.assert_array_equal(one, other)
    made = [kind(generator(0, "a.jpg", number), *photographs(2)) for number in range(6)]
    best = [likeness(*images, H) for *images, planes in made for H in planes]
    if kind is verification.mirrored:
        assert best == []
    else:
        assert max(best) > 0.8


def test_weights_are_learned_and_reported():
    rng = np.random.default_rng(0)
    true = np.array([1.0, 0.5, -1.0])
    evidence = rng.normal(0, 2, (4000, 3))
    right = rng.uniform(size=4000) < 1 / (1 + np.exp(-evidence @ true))
    found = verification.learn(evidence, right)
    np.testing.assert_allclose(found, [*true, 0], atol=0.2)
    evidence[:40] = 0  # pairs without a geometry
    pairs = pd.DataFrame(evidence[:400]).assign(photo=np.arange(400) % 20, kind="plane")
    lines = verification.report(pairs.assign(right=right[:400]))
    assert lines[0].startswith("WEIGHTS = np.array([")
    name, count, of_one, refused, false = lines[-1].splitlines()[-1].split()[:5]
    assert (name, count, of_one) == ("all", "360", str(right[40:400].sum()))
    assert int(refused) + int(false) < 120


def test_a_camera_file_that_is_wrong_is_named(tmp_path, capsys):
    pytest.importorskip("pycolmap")
    (tmp_path / "cameras.txt").write_text("a.jpg 1 2 3\n")
    words = [str(tmp_path), "--cameras", str(tmp_path / "cameras.txt")]
    assert errors.exit_code(scenes.main, words) == 2
    assert "cameras.txt: needs" in capsys.readouterr().err
