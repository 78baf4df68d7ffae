"""How a matcher is judged: which pairs, which matchers, which figures.

Read in this order: `pairs` (what a pair is, and SIFT on its views), `heldout` and `hpatches` (where pairs
come from), `conditions` (how hard they are), `model` and `matchers` (ours and the baselines), `scoring` (one
row per pair and matcher), `confidence`, `summary` (rows to means), `run` (all of it), `outputs` (the files).
"""
