"""Matches and features to other tools and back, each with the real package where it is
installed.
"""

import sys
from types import ModuleType
from typing import NamedTuple

import cv2
import numpy as np
import pytest
import torch

from superglue_sift.apps import cli
from superglue_sift.errors import RequestError, exit_code
from superglue_sift.features.features import Features
from superglue_sift.interop import convert, hloc
from superglue_sift.match_result import MatchResult
from superglue_sift.matcher import Matcher
from superglue_sift.network.superglue import TYPICAL_SCORE

SIZE = (640, 480)
FOCAL = 600.0


class Matched(NamedTuple):
    """Two overlapping crops of a photograph and their matches."""

    features0: Features
    features1: Features
    found: MatchResult


@pytest.fixture(scope="module")
def matcher():
    return Matcher.load(device="cpu", max_keypoints=400)


@pytest.fixture(scope="module")
def matched(matcher, photo):
    sides = [
        matcher.extract(np.ascontiguousarray(crop)) for crop in (photo[:, :420], photo[:, 100:])
    ]
    found = matcher.match(*sides)
    assert len(found.matches) > 50
    return Matched(*sides, found)


def same(found, other):
    order, other_order = (np.argsort(each.matches[:, 0]) for each in (found, other))
    assert np.array_equal(found.matches[order], other.matches[other_order])
    assert np.allclose(found.scores[order], other.scores[other_order], atol=1e-6)
    assert np.array_equal(found.keypoints0, other.keypoints0)


# OpenCV


def test_opencv_draws_our_matches_and_gives_them_back(matched, photo):
    found = matched.found
    there = convert.to_dmatches(found)
    assert [(m.queryIdx, m.trainIdx) for m in there] == [tuple(pair) for pair in found.matches]
    assert np.allclose([m.distance for m in there], 1 - found.scores)
    same(convert.from_dmatches(there, *matched[:2]), found)
    points = [convert.to_keypoints(features) for features in matched[:2]]
    assert np.allclose(cv2.KeyPoint.convert(points[0]), found.keypoints0)
    drawn = cv2.drawMatches(photo[:, :420], points[0], photo[:, 100:], points[1], there, None)
    assert drawn.shape == (400, 420 + 500, 3)


# LightGlue, glue-factory


def test_dictionaries_of_lightglue_come_back(matched, matcher):
    there = [convert.to_lightglue(features) for features in matched[:2]]
    back = [convert.from_lightglue(each) for each in there]
    for features, again in zip(matched[:2], back):
        assert again.size == features.size
        assert np.array_equal(again.keypoints, features.keypoints)
        assert np.allclose(again.records["angle"], features.records["angle"], atol=1e-3)
        off = np.abs(again.records["descriptor"].astype(int) - features.records["descriptor"])
        assert off.max() <= 3, "SIFT to RootSIFT and back is not the same to rounding"
    same(
        convert.from_lightglue_matches(convert.to_lightglue_matches(matched.found), *matched[:2]),
        matched.found,
    )
    again = matcher.match(*back)
    common = set(map(tuple, again.matches)) & set(map(tuple, matched.found.matches))
    assert len(common) > 0.95 * len(matched.found.matches)  # second orientations are lost


# hloc


def test_files_of_hloc_come_back_and_match_the_same(matched, tmp_path):
    h5py = pytest.importorskip("h5py")
    names = "db/one.jpg", "query/two.jpg"
    for name, features in zip(names, matched[:2]):
        hloc.write_features(tmp_path / "features.h5", name, features)
        hloc.write_features(tmp_path / "features.h5", name, features)  # again: no error
    hloc.write_matches(tmp_path / "matches.h5", *names, matched.found)
    with h5py.File(tmp_path / "features.h5") as file:
        group = file["db/one.jpg"]
        count = len(matched.features0.records)
        assert group["keypoints"].shape == (count, 2)
        assert group["descriptors"].shape == (128, count)
        assert tuple(group["image_size"]) == (420, 400) and group["image_size"].dtype.kind == "i"
        records = matched.features0.records  # hloc's SIFT: sigma, degrees
        np.testing.assert_allclose(group["scales"], records["scale"] / 2)
        np.testing.assert_allclose(group["oris"], records["angle"], rtol=1e-5)
    with h5py.File(tmp_path / "matches.h5") as file:
        assert file["db-one.jpg/query-two.jpg/matches0"].shape == (count,)
    back = [hloc.read_features(tmp_path / "features.h5", name) for name in names]
    same(hloc.read_matches(tmp_path / "matches.h5", *names, *back), matched.found)
    with pytest.raises(RequestError, match="nobody"):
        hloc.read_features(tmp_path / "features.h5", "nobody.jpg")


class BaseModel:
    """hloc's, by its documented interface: the real one is not on the package index."""

    def __init__(self, conf):
        self._init({**self.default_conf, **conf})


def test_scores_that_are_missing_or_zero_become_the_typical_one(matched):
    data = convert.to_lightglue(matched.features0)
    zero = convert.from_lightglue({**data, "keypoint_scores": 0 * data["scales"]})
    del data["keypoint_scores"]
    for features in (zero, convert.from_lightglue(data)):
        assert (features.records["score"] == np.float32(TYPICAL_SCORE)).all()


def test_hlocs_matcher_answers_as_ours(matched, monkeypatch):
    home = ModuleType("hloc.utils.base_model")
    home.BaseModel = BaseModel
    for name in ("hloc", "hloc.utils", f"hloc.matchers.{hloc.NAME}"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, home.__name__, home)
    plugin = hloc.register()
    assert issubclass(plugin, BaseModel)
    assert sys.modules["hloc.matchers.superglue_sift"].SuperGlueSIFT is plugin
    data = {}
    for side, features in enumerate(matched[:2]):
        own = convert.to_lightglue(features)
        own["scores"] = own.pop("keypoint_scores")
        own["descriptors"] = own["descriptors"].transpose(1, 2)
        own["scales"] = own["scales"] / 2
        own["oris"] = torch.rad2deg(own["oris"])
        width, height = features.size
        data.update({f"{name}{side}": value for name, value in own.items()})
        data[f"image{side}"] = torch.empty(1, 1, height, width)
    assert set(plugin.required_inputs) <= set(data)
    seen = []
    of = hloc.convert.from_lightglue
    monkeypatch.setattr(hloc.convert, "from_lightglue", lambda d: seen.append(of(d)) or seen[-1])
    answer = plugin({"device": "cpu"})._forward(data)
    for features, given in zip(seen, matched[:2]):
        for name in ("scale", "angle", "score"):
            np.testing.assert_allclose(features.records[name], given.records[name], rtol=1e-5)
    expected = convert.to_lightglue_matches(matched.found)["matches0"]
    assert (answer["matches0"] == expected).float().mean() > 0.95  # as above
    assert answer["matching_scores0"].shape == expected.shape


# COLMAP


def test_a_list_with_both_orders_of_a_pair_is_one_pair_of_the_database(
    photo, tmp_path, monkeypatch
):
    pycolmap = pytest.importorskip("pycolmap")
    for name, crop in (("a.png", photo[:, :420]), ("b.png", photo[:, 100:])):
        cv2.imwrite(str(tmp_path / name), np.ascontiguousarray(crop))
    (tmp_path / "pairs.txt").write_text("a.png b.png\nb.png a.png\n")
    monkeypatch.chdir(tmp_path)
    words = "--pairs pairs.txt --out-dir found --max-keypoints 300 --device cpu --colmap x.db"
    assert exit_code(cli.main, [*words.split(), "--no-scene"]) == 0
    with pycolmap.Database.open("x.db") as database:
        assert database.num_matched_image_pairs() == 1 and database.num_matches() > 50


def test_photographs_that_colmap_cannot_read_are_named_before_matching_and_get_a_guessed_camera(
    photo, tmp_path, monkeypatch, capsys
):
    pycolmap = pytest.importorskip("pycolmap")
    (tmp_path / "photos").mkdir()
    for number, crop in enumerate((photo[:, :420], photo[:, 100:520])):
        cv2.imwrite(str(tmp_path / "photos" / f"{number}.webp"), np.ascontiguousarray(crop))
    monkeypatch.chdir(tmp_path)
    words = "photos --out-dir found --no-scene --max-keypoints 300 --device cpu --colmap x.db"
    assert exit_code(cli.main, words.split()) == 0
    said = capsys.readouterr().err
    assert said.count("cannot read") == 1
    assert said.index("0.webp and 1 more: COLMAP cannot read") < said.index("matching: ")
    with pycolmap.Database.open("x.db") as database:
        assert [camera.params[0] for camera in database.read_all_cameras()] == [1.2 * 420] * 2
        assert database.num_matches() > 50
