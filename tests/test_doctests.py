"""Examples in docstrings print what they show."""

import doctest
import importlib

import cv2
import pytest

MODULES = (
    "superglue_sift.apps.folder",
    "superglue_sift.apps.results",
    "superglue_sift.features.features",
    "superglue_sift.geometry.two_view",
    "superglue_sift.match_result",
    "superglue_sift.matcher",
    "superglue_sift.network.batch",
    "superglue_sift.network.sinkhorn",
    "superglue_sift.network.superglue",
    "superglue_sift.network.weights",
)


def examples():
    """The docstrings with examples, without those that a module imports from another one."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    for name in MODULES:
        for example in finder.find(importlib.import_module(name), name):
            if example.examples:
                yield pytest.param(example, id=example.name)


@pytest.mark.cu111
@pytest.mark.parametrize("example", examples())
def test_an_example_prints_what_it_shows(example, tmp_path, monkeypatch, photo):
    if "relative_pose" in example.name:
        pytest.importorskip("poselib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for name, shown in (("a", photo), ("b", photo[:, 40:])):
        cv2.imwrite(f"photos/{name}.jpg", shown)
    assert doctest.DocTestRunner().run(example).failed == 0
