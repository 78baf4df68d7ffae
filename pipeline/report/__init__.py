"""The report of an evaluation; `python -m pipeline.report` prints the comparison.

`document` (the content), `outputs` (its files), `tables`, `summary` (the verdict), `charts` and
`page` (HTML). Nothing here computes a metric.
"""
