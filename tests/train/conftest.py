"""Fixtures of the tests of trainings."""

import pytest
from made_trainings import request_maker

from pipeline import tracking
from pipeline.tracking.run import NullRun


@pytest.fixture
def untracked(monkeypatch):
    """No MLflow, which other tests cover: a new store takes longer than a small training."""
    monkeypatch.setattr(tracking, "open_run", lambda *_, **__: NullRun())


@pytest.fixture
def request_of(tmp_path, make_params, untracked):
    """`request_of(out, **train_keys)`: arguments of a training on synthetic views."""
    return request_maker(tmp_path, make_params)
