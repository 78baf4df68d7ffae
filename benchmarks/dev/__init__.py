"""Scenes and the weights of their acceptance, sizes of files, the first picture, the notebook, a
new GPU; `python -m benchmarks.dev.<name> --help`.
"""
