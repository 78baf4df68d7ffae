"""Scenes, and the weights of their verification; `python -m benchmarks.dev.<name> --help`."""
