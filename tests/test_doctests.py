"""Examples in docstrings print what they show."""

import doctest
import importlib

import pytest

MODULES = (
    "superglue_sift.geometry.two_view",
    "superglue_sift.match_result",
    "superglue_sift.network.batch",
    "superglue_sift.network.sinkhorn",
    "superglue_sift.network.superglue",
    "superglue_sift.network.weights",
)


@pytest.mark.cu111
@pytest.mark.parametrize("name", MODULES)
def test_examples_print_what_they_show(name):
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0 and results.failed == 0
