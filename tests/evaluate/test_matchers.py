"""The baselines against OpenCV, and ours in batches."""

import cv2
import numpy as np
import torch

from pipeline.evaluate import matchers
from pipeline.evaluate.matchers import OURS
from pipeline.evaluate.pairs import LabeledPair
from superglue_sift import Matcher
from superglue_sift.features import nearest, sift
from superglue_sift.features.descriptors import to_root_sift
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig


def pair_of(*views):
    return tuple(sift.extract(np.ascontiguousarray(view), 200) for view in views)


def known_pair(matcher, *views):
    """The features of two views, without a truth."""
    features = tuple(matcher.extract(np.ascontiguousarray(view)) for view in views)
    return LabeledPair("p", "s", (0, 0, 0, 1), features, pair_of(*views), np.eye(3))


def test_ratio_and_mutual_agree_with_opencv(photo):
    pair = pair_of(photo, photo[20:, 30:])
    descriptors = [to_root_sift(features.descriptors[:, 0]) for features in pair]
    matches = matchers.match_baselines(pair)
    matches["ratio_test"] = matches["ratio_test"].above(matchers.RATIO_THRESHOLD)
    partners = {name: dict(of_one.indices.tolist()) for name, of_one in matches.items()}
    for name, mutual in (("nn", False), ("mutual_nn", True)):
        expected = cv2.BFMatcher(cv2.NORM_L2, crossCheck=mutual).match(*descriptors)
        assert partners[name] == {m.queryIdx: m.trainIdx for m in expected}
    two = cv2.BFMatcher(cv2.NORM_L2).knnMatch(*descriptors, k=2)
    passed = {(a.queryIdx, a.trainIdx) for a, b in two if a.distance < 0.8 * b.distance}
    assert set(partners["ratio_test"].items()) == passed & set(partners["mutual_nn"].items())


def test_one_keypoint_or_two_equal_ones_do_not_pass_the_ratio_test():
    rows = np.eye(1, 128, dtype=np.float32)
    for others in (rows, np.concatenate([rows, rows])):
        assert nearest.match_nearest(rows, others)[0].scores.tolist() == [0.0]


def test_the_size_of_batches_does_not_matter(photo):
    torch.manual_seed(0)
    matcher = Matcher(SuperGlue(SuperGlueConfig(layers=1)).eval(), threshold=0.2, resize=0)
    compared = matchers.MatcherSet({OURS: matchers.Network(matcher)})
    pairs = [known_pair(matcher, photo, photo[20:, 30:]), known_pair(matcher, photo[:200], photo)]
    for one, other in zip(compared.match(pairs, 1), compared.match(pairs, 2)):
        np.testing.assert_array_equal(one[OURS].indices, other[OURS].indices)
        assert len(one[OURS]) > 50
