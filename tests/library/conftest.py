"""Matchers that several tests of the library use."""

import pytest
from made_scenes import write_model

from superglue_sift import Matcher


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The file of an untrained network of two layers."""
    return write_model(tmp_path_factory.mktemp("model") / "m.safetensors", layers=2)


@pytest.fixture(scope="session")
def untrained(model):
    """A matcher with that network."""
    return Matcher.load(model, "cpu")
