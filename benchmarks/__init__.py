"""The benchmarks that `python -m benchmarks` runs; no package imports them."""
