"""What a person reads afterwards: tables, curves for DVC's plots, pictures of matches.

Nothing here computes a figure; it shows those it is given. `python -m pipeline.report` prints the comparison.
"""
