"""Fixtures of the tests of trainings."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, List

import pytest
from made_trainings import request_maker

from pipeline import tracking
from pipeline.tracking.run import NullRun


@pytest.fixture
def untracked(monkeypatch: Any) -> None:
    """No MLflow, which other tests cover: a new store takes longer than a small training."""
    monkeypatch.setattr(tracking, "open_run", lambda *_, **__: NullRun())


@pytest.fixture
def request_of(tmp_path: Path, make_params: Any, untracked: None) -> Callable[..., List[str]]:
    """`request_of(out, **train_keys)`: arguments of a training on synthetic views."""
    return request_maker(tmp_path, make_params)
