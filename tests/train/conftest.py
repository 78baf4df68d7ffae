"""Fixtures of the tests of trainings."""

import pytest
from made_trainings import leave_records_out, request_maker


@pytest.fixture
def untracked(monkeypatch):
    leave_records_out(monkeypatch)


@pytest.fixture
def request_of(tmp_path, make_params, untracked):
    """`request_of(out, **train_keys)`: arguments of a training on synthetic views."""
    return request_maker(tmp_path, make_params)
