"""Files of hloc have its units, and its matcher gives our matches."""

import sys
from types import ModuleType

import numpy as np
import pytest
import torch

from superglue_sift import Matcher
from superglue_sift.interop import convert, hloc

h5py = pytest.importorskip("h5py")


class BaseModel:
    """hloc's, by its documented interface: the real one is not on the package index."""

    def __init__(self, conf):
        self._init({**self.default_conf, **conf})


@pytest.fixture
def plugin(monkeypatch):
    """The class of the matcher that `register` adds to a stand-in for hloc."""
    base_module = ModuleType("hloc.utils.base_model")
    base_module.BaseModel = BaseModel
    for name in ("hloc", "hloc.utils", "hloc.matchers.superglue_sift", base_module.__name__):
        monkeypatch.setitem(sys.modules, name, base_module)
    plugin = hloc.register()
    assert issubclass(plugin, BaseModel)
    assert sys.modules["hloc.matchers.superglue_sift"].SuperGlueSIFT is plugin
    return plugin


def read_group(path, group):
    with h5py.File(path) as file:
        return {name: np.array(values) for name, values in file[group].items()}


def read_batch(path, pair):
    """What hloc passes to a matcher: arrays of its file of features, as batches of one."""
    data = {}
    for view, features in zip("01", pair):
        hloc.write_features(path, f"db/{view}.jpg", features)
        for name, values in read_group(path, f"db/{view}.jpg").items():
            data[name + view] = torch.from_numpy(values)[None]
        width, height = data[f"image_size{view}"][0].tolist()
        data[f"image{view}"] = torch.empty(1, 1, height, width)
    return data


def test_features_are_in_the_units_of_hloc(pair, tmp_path):
    hloc.write_features(tmp_path / "features.h5", "db/0.jpg", pair[0])
    arrays = read_group(tmp_path / "features.h5", "db/0.jpg")
    expected = {name: values[0].numpy() for name, values in convert.to_lightglue(pair[0]).items()}
    assert arrays["image_size"].tolist() == [420, 400]
    np.testing.assert_array_equal(arrays["keypoints"], expected["keypoints"])
    np.testing.assert_allclose(arrays["scales"], expected["scales"] / 2)  # sigma
    np.testing.assert_allclose(np.deg2rad(arrays["oris"]), expected["oris"], rtol=1e-6)  # degrees
    np.testing.assert_array_equal(arrays["descriptors"], expected["descriptors"].T)


def test_the_matcher_gets_our_features_back(pair, plugin, tmp_path, monkeypatch):
    """Sigma becomes a diameter again, and degrees stay degrees."""
    matcher = plugin({"name": "superglue_sift", "device": "cpu"})
    matched = []

    def record(self, features0, features1):
        matched.extend([features0, features1])
        raise StopIteration

    monkeypatch.setattr(Matcher, "match", record)
    with pytest.raises(StopIteration):
        matcher._forward(read_batch(tmp_path / "features.h5", pair))
    for features, expected in zip(matched, pair):
        values, expected = convert.to_lightglue(features), convert.to_lightglue(expected)
        for name in ("keypoints", "scales", "oris", "image_size"):
            np.testing.assert_allclose(values[name], expected[name], rtol=1e-5)


def test_the_matcher_gives_our_matches(pair, result, plugin, tmp_path):
    data = read_batch(tmp_path / "features.h5", pair)
    assert set(plugin.required_inputs) <= set(data)
    output = plugin({"name": "superglue_sift", "device": "cpu"})._forward(data)
    is_same = output["matches0"][0].numpy() == result.to_dense()[0]
    assert is_same.mean() > 0.95  # second orientations are lost
    assert output["matching_scores0"].shape == output["matches0"].shape


def test_the_conf_of_hloc_has_the_settings_of_the_matcher(plugin):
    conf = {"name": "superglue_sift", "device": "cpu", "scene": True, "accept": 0.98}
    assert plugin(conf).matcher.rules.accept == 0.98
    with pytest.raises(TypeError, match="treshold"):
        plugin({**conf, "treshold": 0.5})


def test_matches_are_in_the_group_of_the_pair(result, tmp_path):
    hloc.write_matches(tmp_path / "matches.h5", "db/0.jpg", "query/1.jpg", result)
    arrays = read_group(tmp_path / "matches.h5", "db-0.jpg/query-1.jpg")
    np.testing.assert_array_equal(arrays["matches0"], result.to_dense()[0])


def test_an_image_that_is_written_again_keeps_the_images_below_its_name(pair, tmp_path):
    """The group of an image `x` also has the group of an image `x/a.png`."""
    path = tmp_path / "features.h5"
    for name, features in (("x", pair[0]), ("x/a.png", pair[0]), ("x", pair[1])):
        hloc.write_features(path, name, features)
    with h5py.File(path) as file:
        assert file["x/a.png/image_size"][:].tolist() == [420, 400]
        assert file["x/image_size"][:].tolist() == [500, 400]
        assert len(file["x/keypoints"]) == len(file["x/scores"])
