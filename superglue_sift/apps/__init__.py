"""Programs around the matcher.

`cli` (superglue-match; two images), `pairing` (which of folders, lists and videos), `many` (matches
them), `retrieval`, `results` (files of a pair), `serve` (the page).
"""
