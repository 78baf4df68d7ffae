"""The baselines against OpenCV, networks alone and side by side, and functions of the user."""

import sys
from types import ModuleType

import cv2
import numpy as np
import pytest
from made_scenes import write_model

from pipeline.errors import RequestError
from pipeline.evaluate import matchers
from pipeline.evaluate.matchers import OURS
from superglue_sift.environment import count_usable_cores
from superglue_sift.features import nearest, sift
from superglue_sift.features.descriptors import to_root_sift


def extract_pair(*views):
    return tuple(sift.extract(np.ascontiguousarray(view), 200) for view in views)


def test_ratio_and_mutual_agree_with_opencv(photo):
    pair = extract_pair(photo, photo[20:, 30:])
    descriptors = [to_root_sift(features.descriptors[:, 0]) for features in pair]
    matches = matchers.match_baselines(pair)
    matches["ratio_test"] = matches["ratio_test"].keep_above(matchers.RATIO_THRESHOLD)
    partners = {name: dict(part.indices.tolist()) for name, part in matches.items()}
    for name, mutual in (("nn", False), ("mutual_nn", True)):
        expected = cv2.BFMatcher(cv2.NORM_L2, crossCheck=mutual).match(*descriptors)
        assert partners[name] == {m.queryIdx: m.trainIdx for m in expected}
    neighbors = cv2.BFMatcher(cv2.NORM_L2).knnMatch(*descriptors, k=2)
    passed = {(a.queryIdx, a.trainIdx) for a, b in neighbors if a.distance < 0.8 * b.distance}
    assert set(partners["ratio_test"].items()) == passed & set(partners["mutual_nn"].items())


def test_one_keypoint_or_two_equal_ones_do_not_pass_the_ratio_test():
    descriptors = np.eye(1, 128, dtype=np.float32)
    for descriptors1 in (descriptors, np.concatenate([descriptors, descriptors])):
        assert nearest.match_nearest(descriptors, descriptors1)[0].scores.tolist() == [0.0]


def test_equal_weights_are_not_evaluated_twice(tmp_path):
    """Also where the thresholds differ."""
    files = {
        OURS: write_model(tmp_path / "a.safetensors"),
        "same": write_model(tmp_path / "b.safetensors", about={"match_threshold": 0.35}),
        "other": write_model(tmp_path / "c.safetensors", sinkhorn_iterations=11),
    }
    notes = []
    networks = matchers.load_networks(files, "cpu", {}, "sift", notes)
    assert list(networks) == [OURS, "other"]
    assert len(notes) == 1 and notes[0].startswith("same ")


def test_model_file_is_read_once(tmp_path, monkeypatch):
    from superglue_sift.network import weights

    paths = []
    load = weights.load_model_file
    monkeypatch.setattr(weights, "load_model_file", lambda path: paths.append(path) or load(path))
    files = {OURS: write_model(tmp_path / "a.safetensors")}
    network = matchers.load_networks(files, "cpu", {}, "sift", [])[OURS]
    assert paths == [files[OURS]] and network.info["step"] == 7


def test_each_core_matches_a_pair(tmp_path):
    files = {OURS: write_model(tmp_path / "a.safetensors")}
    network = matchers.load_networks(files, "cpu", {}, "sift", [])[OURS]
    assert network.workers == count_usable_cores()


@pytest.mark.parametrize(
    "make_matches",
    [
        lambda count: ([999] * count, [0.5] * count),  # no such keypoint
        lambda count: ([0] * count, [1.5] * count),  # no confidence
        lambda count: ([0], [0.5]),  # too few
    ],
)
def test_wrong_matches_of_a_function_are_refused(monkeypatch, photo, make_matches):
    module = ModuleType("mine")
    module.match = lambda features0, features1: make_matches(len(features0.keypoints))
    monkeypatch.setitem(sys.modules, "mine", module)
    function = matchers.load_matcher_function("mine:match")
    with pytest.raises(RequestError, match="mine:match"):
        function(extract_pair(photo, photo[20:, 30:]))
