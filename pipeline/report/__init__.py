"""What a person reads afterwards; `python -m pipeline.report` prints the comparison.

`document` (all that an evaluation says), `outputs` (its files), `tables`, `summary` (the verdict), `charts` and
`page` (HTML). Nothing here computes a metric.
"""
