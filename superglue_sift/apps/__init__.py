"""Programs around the matcher.

`cli` (superglue-match), its `options`, `many` (folders, lists, videos), `retrieval`, `results`
(files of a pair), `serve` (the page).
"""
