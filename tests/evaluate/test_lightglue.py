"""LightGlue as a baseline: with a fake package, so that nothing is installed or downloaded."""

import sys
import types

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from pipeline.errors import RequestError
from pipeline.evaluate import lightglue
from superglue_sift import sift
from superglue_sift.batch import Pair
from superglue_sift.sift import root_sift_of


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = torch.nn.Linear(1, 1)


class Made(torch.nn.Module):
    """Takes the options of kornia's class and matches the nearest descriptors of what it is
    given.
    """

    def __init__(self, features, **options):
        super().__init__()
        assert features is None, (
            "a package that is given a name of features downloads their weights"
        )
        assert options == {
            "input_dim": 128, "add_scale_ori": True, "depth_confidence": -1, "width_confidence": -1,
        }  # fmt: skip
        self.transformers = torch.nn.ModuleList([Block()])
        self.register_buffer("confidence_thresholds", torch.zeros(3))  # not in the published file

    def forward(self, data):
        one, two = (data[name]["descriptors"] for name in ("image0", "image1"))
        scores, index = (one @ two.transpose(1, 2)).max(-1)
        index[0, 0] = -1
        return {"matches0": index, "matching_scores0": scores * self.transformers[0].self_attn.bias}


@pytest.fixture
def weights(monkeypatch, tmp_path):
    """The package `made`, and a file of weights with the names of LightGlue's first version."""
    package = types.ModuleType("made")
    package.LightGlue = Made
    monkeypatch.setitem(sys.modules, "made", package)
    monkeypatch.setattr(lightglue, "PACKAGES", ("no_such_package", "made"))
    values = {
        "self_attn.0.weight": np.ones((1, 1), np.float32),
        "self_attn.0.bias": np.full(1, 0.5, np.float32),
    }
    save_file(values, str(tmp_path / "weights.safetensors"))
    return tmp_path / "weights.safetensors"


@pytest.fixture(scope="module")
def pair(photo):
    views = (photo, np.ascontiguousarray(photo[20:, 30:]))
    keypoints = [sift.extract(view, 60) for view in views]
    return Pair(*keypoints, *(view.shape[::-1] for view in views))


def test_what_is_missing_is_said(monkeypatch, weights):
    match, said = lightglue.load(weights.with_name("nowhere"), "cpu")
    assert match is None and "no weights at" in said and "nowhere" in said
    monkeypatch.setattr(lightglue, "PACKAGES", ("no_such_package",))
    match, said = lightglue.load(weights, "cpu")
    assert (
        match is None and said == "neither kornia nor lightglue is installed (`pip install kornia`)"
    )


def test_a_file_of_something_else_is_a_wrong_request(weights):
    save_file({"other": np.ones(1, np.float32)}, str(weights))
    with pytest.raises(RequestError, match=r"not LightGlue for SIFT, transformers\.0\.self_attn"):
        lightglue.load(weights, "cpu")
    save_file({"self_attn.0.weight": np.ones((2, 2), np.float32)}, str(weights))
    with pytest.raises(RequestError, match="--lightglue"):
        lightglue.load(weights, "cpu")
    weights.write_bytes(b"\x80\x02}q\x00.")  # a pickle
    with pytest.raises(RequestError, match="--lightglue"):
        lightglue.load(weights, "cpu")


def test_matches_come_with_its_own_scores(weights, pair):
    match, said = lightglue.load(weights, "cpu")
    assert said == "made"
    found = match(pair)
    first, second = (root_sift_of(keys["descriptor"]) for keys in (pair.records0, pair.records1))
    assert found.matches0[0] == -1 and found.scores0[0] == 0
    np.testing.assert_array_equal(found.matches0[1:], (first @ second.T).argmax(1)[1:])
    np.testing.assert_allclose(found.scores0[1:], 0.5 * (first @ second.T).max(1)[1:], rtol=1e-5)
