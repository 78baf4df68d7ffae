"""The bench: what is measured and against what. `python -m pipeline.benchmark` runs it; no package imports it."""
