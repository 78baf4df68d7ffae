"""The benchmarks that `python -m pipeline.benchmark` runs; no package imports them."""
