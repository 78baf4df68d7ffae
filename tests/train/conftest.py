"""Fixtures of the tests of trainings."""

import pytest
from made_trainings import leave_records_out, make_request_function


@pytest.fixture
def untracked(monkeypatch):
    leave_records_out(monkeypatch)


@pytest.fixture
def request_of(tmp_path, make_params, untracked):
    """`request_of(out, **train_keys)`: arguments of a training on synthetic views."""
    return make_request_function(tmp_path, make_params)
