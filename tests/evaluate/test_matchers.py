"""The baselines against OpenCV, and ours in batches."""

import cv2
import numpy as np
import torch

from pipeline.evaluate import matchers
from superglue_sift.features import nearest, sift
from superglue_sift.features.sift import root_sift_of
from superglue_sift.network.batch import Pair
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig


def pair_of(*views):
    keypoints = [sift.extract(np.ascontiguousarray(view), 200) for view in views]
    return Pair(*keypoints, *(view.shape[::-1] for view in views))


def test_ratio_and_mutual_agree_with_opencv(photo):
    pair = pair_of(photo, photo[20:, 30:])
    descriptors = [root_sift_of(keys["descriptor"]) for keys in (pair.records0, pair.records1)]
    found = matchers.match_baselines(pair)
    found["ratio_test"] = found["ratio_test"].above(matchers.RATIO_THRESHOLD)
    found = {name: dict(answer.indices.tolist()) for name, answer in found.items()}
    for name, mutual in (("nn", False), ("mutual_nn", True)):
        matches = cv2.BFMatcher(cv2.NORM_L2, crossCheck=mutual).match(*descriptors)
        assert found[name] == {m.queryIdx: m.trainIdx for m in matches}
    two = cv2.BFMatcher(cv2.NORM_L2).knnMatch(*descriptors, k=2)
    passed = {(a.queryIdx, a.trainIdx) for a, b in two if a.distance < 0.8 * b.distance}
    assert set(found["ratio_test"].items()) == passed & set(found["mutual_nn"].items())


def test_one_keypoint_or_two_equal_ones_do_not_pass_the_ratio_test():
    rows = np.eye(1, 128, dtype=np.float32)
    for others in (rows, np.concatenate([rows, rows])):
        assert nearest.neighbours(rows, others)[0].scores.tolist() == [0.0]


def test_the_size_of_batches_does_not_matter(photo):
    torch.manual_seed(0)
    network = matchers.Network(SuperGlue(SuperGlueConfig(layers=1)).eval(), 0.2)
    ours = matchers.Matchers({matchers.OURS: network}, "cpu")
    pairs = [pair_of(photo, photo[20:, 30:]), pair_of(photo[:200], photo)]
    for one, other in zip(ours.answers(pairs, 1), ours.answers(pairs, 2)):
        found = one[matchers.OURS].indices
        np.testing.assert_array_equal(found, other[matchers.OURS].indices)
        assert len(found) > 50
