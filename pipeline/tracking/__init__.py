"""Tracking of runs, from rank 0; it never blocks or ends the work.

A stage opens a `run` and writes to its `log`, which is its record and contains no `secrets`. One
thread (`sender`) sends the log to MLflow (`mlflow_store`), and `python -m pipeline.tracking resend`
sends what a dead server missed. `matcher_model` is the registered model, `champion` compares it
with the best.
"""

from __future__ import annotations

# ruff: noqa: F401 (the names that stages use)
from pipeline.tracking.mlflow_store import EVALUATION, HEADLINE, HIDDEN, LEADING, RUN_ID
from pipeline.tracking.run import NullRun, attach, ending, known_run, open_run, tracking_uri
