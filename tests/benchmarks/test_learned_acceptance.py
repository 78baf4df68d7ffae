"""benchmarks.dev.acceptance and places: made pairs with their truth, and the weights learned."""

import cv2
import numpy as np
import pytest

from benchmarks.dev import acceptance, places
from benchmarks.photographs import photographs
from pipeline.views.homography import generator
from superglue_sift.geometry import two_view


@pytest.mark.parametrize("kind", places.KINDS)
def test_made_pairs_are_the_same_every_time_and_their_truth_is_right(kind):
    make = places.KINDS[kind][0]
    pair, again = (make(generator(0, f"{kind} a.jpg", 1), *photographs(2)) for _ in range(2))
    for one, other in ((pair.image0, again.image0), (pair.image1, again.image1)):
        assert one.dtype == np.uint8 and one.ndim == 2
        np.testing.assert_array_equal(one, other)
    is_one_place = kind in ("plane", "depth", "one wall", "part")
    assert len(pair.planes) > 0 if is_one_place else len(pair.planes) == 0
    points = np.random.default_rng(0).uniform(0, 470, (50, 2))
    for H in pair.planes:
        moved = two_view.transform(points, H)
        assert pair.right(points, moved).all()
    assert not pair.right(points, points + 1000).any()


def test_a_plane_looks_alike_where_the_truth_says():
    pair = places.plane(generator(0, "plane a.jpg", 0), *photographs(2))
    warped = cv2.warpPerspective(pair.image0, pair.planes[0], places.VIEW)
    inside = cv2.warpPerspective(np.full_like(pair.image0, 255), pair.planes[0], places.VIEW) > 254
    assert inside.sum() > 1000
    assert np.corrcoef(warped[inside], pair.image1[inside])[0, 1] > 0.8


def test_weights_are_learned_and_reported():
    rng = np.random.default_rng(0)
    true = np.array([1.0, 0.5, -1.0, 0.0])
    features = rng.normal(0, 2, (4000, 4))
    right = rng.uniform(size=4000) < 1 / (1 + np.exp(-features @ true))
    found = acceptance.learn(features, right)
    np.testing.assert_allclose(found.values, true, atol=0.1)
    assert abs(found.bias) < 0.2
    examples = [
        acceptance.Example(f"{n % 20}.jpg", "plane" if n % 2 else "parts", features[n], right[n])
        for n in range(400)
    ]
    lines = acceptance.report(examples)
    assert lines[0] == f"400 pairs, {right[:400].sum()} right"
    assert any(line.startswith("WEIGHTS = np.array([") for line in lines)
    total = lines[-1].split()
    assert total[:3] == ["all", "400", str(right[:400].sum())]
    assert int(total[3]) + int(total[5]) < 120  # refused, and accepted wrongly
