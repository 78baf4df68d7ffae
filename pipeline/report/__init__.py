"""The report of an evaluation; `python -m pipeline.report` prints the comparison.

`rows` (a value and what it measures), `document` (the content), `outputs` (its files and the names
in them), `tables`, `summary` (the verdict), `charts` and `page` (HTML). Nothing here computes a
metric.
"""
