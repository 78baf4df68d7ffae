"""Scenes, sizes of files, learning curves, the first picture, the notebook, a new GPU; `python -m
benchmarks.dev.<name> --help`.
"""
