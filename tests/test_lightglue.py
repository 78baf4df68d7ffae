"""LightGlue as a baseline: with a made package, so that nothing is installed or downloaded."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch

from pipeline.evaluation import lightglue
from pipeline.evaluation.pairs import Pair
from pipeline.features import sift

URL = "https://example.invalid/sift_lightglue.pth"


class Made(torch.nn.Module):
    """Asks torch's hub for weights as kornia does, and matches the nearest descriptors of what it is given."""

    def __init__(self, features, **options):
        super().__init__()
        assert features == "sift" and options == {"depth_confidence": -1, "width_confidence": -1}
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.load_state_dict(torch.hub.load_state_dict_from_url(URL, file_name="made.pth"))
        self.given = None

    def forward(self, data):
        self.given = data
        one, two = (data[name]["descriptors"] for name in ("image0", "image1"))
        scores, index = (one @ two.transpose(1, 2)).max(-1)
        index[0, 0] = -1
        return {"matches0": index, "matching_scores0": scores * self.weight}


@pytest.fixture
def made(monkeypatch, tmp_path):
    """The package `made`, and the folder of torch's hub."""
    package = types.ModuleType("made")
    package.LightGlue = Made
    monkeypatch.setitem(sys.modules, "made", package)
    monkeypatch.setattr(lightglue, "PACKAGES", ("no_such_package", "made"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "_hub_dir", None, raising=False)
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    return tmp_path / "hub" / "checkpoints"


@pytest.fixture(scope="module")
def pair(photo):
    views = (photo, np.ascontiguousarray(photo[20:, 30:]))
    keypoints = [sift.extract(view, 60) for view in views]
    return Pair("p", "p", 0, 0, *keypoints, *(view.shape[::-1] for view in views), np.eye(3), {})


needs_torch_2 = pytest.mark.skipif(torch.__version__ < "2", reason="torch 1 would run code in the weights")


def write_weights(folder):
    torch.save({"weight": torch.full((1,), 0.5)}, folder / "made.pth")


def test_without_weights_it_is_said_where_they_belong(made):
    original = torch.hub.load_state_dict_from_url
    match, said = lightglue.load("cpu")
    assert match is None and str(made / "made.pth") in said and URL in said
    assert torch.hub.load_state_dict_from_url is original


def test_without_a_package_it_is_said_which(monkeypatch):
    monkeypatch.setattr(lightglue, "PACKAGES", ("no_such_package",))
    assert lightglue.load("cpu") == (
        None,
        "neither kornia nor lightglue is installed (`pip install kornia`)",
    )


@needs_torch_2
def test_matches_come_with_its_own_scores(made, pair):
    write_weights(made)
    match, said = lightglue.load("cpu")
    assert said == "made"
    found = match(pair)
    distance = (
        lightglue.root_sift(pair.keypoints0["descriptor"])
        @ lightglue.root_sift(pair.keypoints1["descriptor"]).T
    )
    assert found.matches0[0] == -1 and found.scores0[0] == 0
    np.testing.assert_array_equal(found.matches0[1:], distance.argmax(1)[1:])
    np.testing.assert_allclose(found.scores0[1:], 0.5 * distance.max(1)[1:], rtol=1e-5)


@needs_torch_2
def test_a_file_with_code_in_it_is_not_run(made):
    torch.save({"weight": Made}, made / "made.pth")  # a class by reference: what weights-only loading refuses
    with pytest.raises(Exception, match=r"(?i)weights.only"):
        lightglue.load("cpu")


def test_it_is_given_pixels_diameters_and_radians(pair):
    given = lightglue.features(pair.keypoints0, pair.size0, "cpu")
    assert {name: tuple(value.shape) for name, value in given.items()} == {
        "keypoints": (1, 60, 2), "descriptors": (1, 60, 128), "scales": (1, 60), "oris": (1, 60), "image_size": (1, 2),
    }  # fmt: skip
    assert all(value.dtype == torch.float32 for value in given.values())
    np.testing.assert_allclose(given["oris"][0], np.radians(pair.keypoints0["angle"]), rtol=1e-5)
    np.testing.assert_array_equal(given["keypoints"][0, :, 0], pair.keypoints0["x"])
    assert given["image_size"].tolist() == [list(map(float, pair.size0))]


def test_a_view_without_keypoints_has_no_matches(pair):
    bare = Pair("p", "p", 0, 0, pair.keypoints0, pair.keypoints1[:0], (10, 10), (10, 10), np.eye(3), {})
    found = lightglue.match(None, bare, "cpu")
    assert (found.matches0 == -1).all() and len(found.matches0) == 60
