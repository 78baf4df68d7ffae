"""How a matcher is judged: which pairs, which matchers, which figures.

Read in this order: `pairs` (what is matched, and what is known of it), `heldout`, `hpatches` and `poses` (where pairs
come from), `conditions` (how hard they are), `matchers` (networks and baselines), `scoring` (a row per pair and
matcher), `confidence`, `figures` (rows to means, intervals and differences, once), `content` (what the report shows),
`protocol` (all matchers on all pairs, then all of this); `champion` (two models judged apart).
"""
