"""Fixtures of the tests of faults."""

import pytest

from faults.cells import Workbench


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Workbench(tmp_path_factory.mktemp("bench"))
