"""Features and matches to convert."""

import numpy as np
import pytest

from superglue_sift import Matcher


@pytest.fixture(scope="session")
def matcher():
    return Matcher.load(device="cpu", max_keypoints=400)


@pytest.fixture(scope="session")
def pair(matcher, photo):
    """Features of two overlapping crops of a photograph."""
    crops = photo[:, :420], photo[:, 100:]
    return [matcher.extract(np.ascontiguousarray(crop)) for crop in crops]


@pytest.fixture(scope="session")
def result(matcher, pair):
    result = matcher.match(*pair)
    assert len(result.matches) > 50
    return result
