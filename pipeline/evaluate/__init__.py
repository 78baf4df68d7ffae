"""Stage 4: all matchers on the same pairs, and metrics of their matches.

Read in this order: `inputs` (what is matched, and what is known of it), `heldout`, `hpatches`, `poses`, `rendered` and
`magnified` (where pairs come from), `unseen` (none that a model was trained on), `conditions` (how hard they are),
`matchers` and `lightglue` (networks and baselines), `estimators`, `scoring` (a row per pair and matcher), `confidence`,
`metrics` (rows to means, intervals and differences, once), `acceptance` (limits for pairs of a scene), `content` (what
the report shows), `protocol` (all matchers on all pairs, then all of this); `champion` (compares two models that were
evaluated separately).
"""
