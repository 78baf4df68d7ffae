"""Stage 4: all matchers on the same pairs, and metrics of their matches.

Read in this order: `inputs` (pairs and their ground truth), `heldout`, `hpatches`, `poses` and
`zoomed` (sources of pairs), `unseen` (photographs that no model was trained on), `conditions`
(difficulty of a pair), `matchers` (networks and baselines), `estimators`, `scoring`
(a row per pair and matcher), `confidence`, `metrics` (means, intervals and differences), `content`
(the report), `protocol` (runs it all).
"""
