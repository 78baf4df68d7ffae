"""Matches and features to OpenCV, LightGlue and hloc, and back."""

import sys
from types import ModuleType

import cv2
import numpy as np
import pytest
import torch

from superglue_sift import Matcher, RequestError
from superglue_sift.interop import convert, hloc
from superglue_sift.network.superglue import TYPICAL_SCORE


@pytest.fixture(scope="module")
def matcher():
    return Matcher.load(device="cpu", max_keypoints=400)


@pytest.fixture(scope="module")
def features(matcher, photo):
    """Features of two overlapping crops of a photograph."""
    return [
        matcher.extract(np.ascontiguousarray(crop)) for crop in (photo[:, :420], photo[:, 100:])
    ]


@pytest.fixture(scope="module")
def found(matcher, features):
    matched = matcher.match(*features)
    assert len(matched.matches) > 50
    return matched


def assert_same(found, other):
    for one, again in zip(found.dense(), other.dense()):
        assert np.allclose(one, again, atol=1e-6)
    assert np.array_equal(found.keypoints0, other.keypoints0)


def test_opencv_draws_our_matches_and_gives_them_back(found, features, photo):
    there = convert.to_dmatches(found)
    assert [(m.queryIdx, m.trainIdx) for m in there] == [tuple(pair) for pair in found.matches]
    assert np.allclose([m.distance for m in there], 1 - found.scores)
    assert_same(convert.from_dmatches(there, *features), found)
    points = [convert.to_keypoints(each) for each in features]
    assert np.allclose(cv2.KeyPoint.convert(points[0]), found.keypoints0)
    drawn = cv2.drawMatches(photo[:, :420], points[0], photo[:, 100:], points[1], there, None)
    assert drawn.shape == (400, 420 + 500, 3)


def test_dictionaries_of_lightglue_come_back(found, features, matcher):
    there = convert.to_lightglue_matches(found)
    assert_same(convert.from_lightglue_matches(there, *features), found)
    back = [convert.from_lightglue(convert.to_lightglue(each)) for each in features]
    for given, again in zip(features, back):
        assert again.size == given.size
        assert np.array_equal(again.keypoints, given.keypoints)
        assert np.allclose(again.records["angle"], given.records["angle"], atol=1e-3)
        off = np.abs(again.records["descriptor"].astype(int) - given.records["descriptor"])
        assert off.max() <= 3, "SIFT to RootSIFT and back is not the same to rounding"
    same = matcher.match(*back).dense()[0] == found.dense()[0]
    assert same.mean() > 0.95  # second orientations are lost


def test_scores_that_are_missing_or_zero_become_the_typical_one(features):
    data = convert.to_lightglue(features[0])
    zero = {**data, "keypoint_scores": 0 * data["scales"]}
    del data["keypoint_scores"]
    for given in (zero, data):
        scores = convert.from_lightglue(given).records["score"]
        assert (scores == np.float32(TYPICAL_SCORE)).all()


class BaseModel:
    """hloc's, by its documented interface: the real one is not on the package index."""

    def __init__(self, conf):
        self._init({**self.default_conf, **conf})


def test_files_of_hloc_have_its_units_and_its_matcher_answers_as_ours(
    found, features, monkeypatch, tmp_path
):
    h5py = pytest.importorskip("h5py")
    home = ModuleType("hloc.utils.base_model")
    home.BaseModel = BaseModel
    for name in ("hloc", "hloc.utils", f"hloc.matchers.{hloc.MATCHER_NAME}", home.__name__):
        monkeypatch.setitem(sys.modules, name, home)
    plugin = hloc.register()
    assert issubclass(plugin, BaseModel)
    assert sys.modules["hloc.matchers.superglue_sift"].SuperGlueSIFT is plugin
    # hloc reads its file of features, and makes batches of one.
    data = {}
    for view, each in zip("01", features):
        for _ in range(2):  # again: no error
            hloc.write_features(tmp_path / "features.h5", f"db/{view}.jpg", each)
        with h5py.File(tmp_path / "features.h5") as file:
            for name, values in file[f"db/{view}.jpg"].items():
                data[name + view] = torch.from_numpy(np.array(values))[None]
        data[f"image{view}"] = torch.empty(1, 1, *each.size[::-1])
    assert data["image_size0"].tolist() == [[420, 400]]
    np.testing.assert_allclose(data["scales0"][0], features[0].records["scale"] / 2)  # sigma
    np.testing.assert_allclose(data["oris0"][0], features[0].records["angle"])  # degrees
    assert set(plugin.required_inputs) <= set(data)
    with pytest.raises(RequestError, match="max_keypoints: not a setting; they are model, thresh"):
        plugin({"name": "superglue_sift", "max_keypoints": 100})
    answer = plugin({"name": "superglue_sift", "device": "cpu"})._forward(data)
    same = answer["matches0"][0].numpy() == found.dense()[0]
    assert same.mean() > 0.95  # second orientations are lost
    assert answer["matching_scores0"].shape == answer["matches0"].shape
    hloc.write_matches(tmp_path / "matches.h5", "db/0.jpg", "query/1.jpg", found)
    with h5py.File(tmp_path / "matches.h5") as file:
        np.testing.assert_array_equal(file["db-0.jpg/query-1.jpg/matches0"], found.dense()[0])
