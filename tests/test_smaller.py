"""The comparison of transformed with detected keypoints: a photograph with itself, and the printed table."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from benchmarks.dev import smaller
from superglue_sift import sift


@pytest.fixture
def view(photo):
    return np.ascontiguousarray(photo[:200, :300])


def test_at_its_own_size_every_keypoint_is_found_again(view):
    found = smaller.compare(view, sift.extract(view, smaller.MAX_KEYPOINTS), 1.0)
    assert found["moved"].all() and found["real"].all()
    assert found["position"].max() < 1e-3 and found["scale"].max() < 1e-3 and found["descriptor"].max() < 1e-3


def test_half_as_large_most_are_found_again_where_they_should_be(view):
    found = smaller.compare(view, sift.extract(view, smaller.MAX_KEYPOINTS), 2.0)
    assert found["moved"].mean() > 0.6 and found["real"].mean() > 0.6
    assert np.median(found["position"]) < 0.3 and np.median(found["descriptor"]) < 0.3


def test_keypoints_of_another_photograph_are_not_found_again(view):
    other = sift.extract(np.ascontiguousarray(view[::-1, ::-1]), smaller.MAX_KEYPOINTS)
    found = smaller.compare(view, other, 2.0)
    assert len(found["moved"]) > 30 and found["moved"].mean() < 0.1


def test_a_line_a_factor(tmp_path, view, capsys):
    cv2.imwrite(str(tmp_path / "a.png"), view)
    assert smaller.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [float(line.split()[0]) for line in lines[1:]] == list(smaller.FACTORS)
