"""What a person reads afterwards: tables, the verdict, curves for DVC's plots, pictures of matches, the page.

Nothing here computes a figure; it shows those it is given. `python -m pipeline.report` prints the comparison.
"""
