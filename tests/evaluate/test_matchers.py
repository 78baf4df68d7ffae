"""The baselines against OpenCV, ours alone and in batches, and the row of scenes."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
import torch

from pipeline.evaluate import matchers
from superglue_sift import classical, sift
from superglue_sift.batch import Pair
from superglue_sift.sift import root_sift_of
from superglue_sift.superglue import SuperGlue, SuperGlueConfig


def pair_of(image0, image1, count=200):
    keypoints = [sift.extract(image, count) for image in (image0, image1)]
    sizes = [image.shape[::-1] for image in (image0, image1)]
    return Pair(*keypoints, *sizes)


@pytest.fixture(scope="module")
def pair(photo):
    return pair_of(photo, np.ascontiguousarray(photo[20:, 30:]))


def test_ratio_and_mutual_agree_with_opencv(pair):
    descriptors = [root_sift_of(keys["descriptor"]) for keys in (pair.records0, pair.records1)]
    answers = matchers.match_baselines(pair)
    found = {
        name: {i: j for i, j in enumerate(answer.matches0) if j >= 0}
        for name, answer in answers.items()
    }
    for name, mutual in (("nn", False), ("mutual_nn", True)):
        matches = cv2.BFMatcher(cv2.NORM_L2, crossCheck=mutual).match(*descriptors)
        assert found[name] == {m.queryIdx: m.trainIdx for m in matches}
    two = cv2.BFMatcher(cv2.NORM_L2).knnMatch(*descriptors, k=2)
    passed = {a.queryIdx: a.trainIdx for a, b in two if a.distance < 0.8 * b.distance}
    both = {i: j for i, j in passed.items() if found["mutual_nn"].get(i) == j}
    chosen = answers["ratio_test"].above(matchers.RATIO_THRESHOLD)
    assert {i: j for i, j in enumerate(chosen.matches0) if j >= 0} == both
    for a, b in two:  # the cosine in float32 knows smaller distances to 0.001 only
        if a.distance > 0.1:
            expected = pytest.approx(1 - a.distance / b.distance, abs=1e-3)
            assert answers["nn"].scores0[a.queryIdx] == expected


def test_one_keypoint_or_two_equal_ones_do_not_pass_the_ratio_test():
    found = classical.neighbours(np.eye(3, dtype=np.float32), np.eye(3, dtype=np.float32)[:1])
    assert found.nearest.tolist() == [0] * 3 and found.ratio.tolist() == [1] * 3
    assert found.mutual.tolist() == [True, False, False]
    row = np.eye(1, 128, dtype=np.float32)
    assert classical.neighbours(row, np.concatenate([row, row])).ratio[0] == 1.0


def test_ours_alone_and_in_a_batch(pair, photo):
    torch.manual_seed(0)
    model = SuperGlue(SuperGlueConfig(layers=2, sinkhorn_iterations=20)).eval()
    ours = matchers.Matchers({matchers.OURS: matchers.Network(model, 0.2)}, "cpu")
    blank = np.full((100, 120), 127, np.uint8)
    small = pair_of(photo[:150, :200].copy(), photo, 50)
    pairs = [pair, pair_of(photo, blank), small, pair_of(blank, blank)]
    together, alone = (
        [answer[matchers.OURS] for answer in ours.answers(pairs, batch)] for batch in (4, 1)
    )
    for first, second, one in zip(together, alone, pairs):
        assert first.matches0.shape == (len(one.records0),)
        np.testing.assert_array_equal(first.matches0, second.matches0)
        np.testing.assert_allclose(first.scores0, second.scores0, atol=1e-5)
    assert (together[0].above(0.2).matches0 >= 0).sum() > 50
