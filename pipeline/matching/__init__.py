"""The matcher as pure functions and modules: no file, no configuration file, no process group.

Read in this order: `superglue` (the network), `attention`, `normalization`, `sinkhorn` (optimal transport),
`truth` (what the right answer is), `loss`, `homography` (plane geometry), `metrics` (how good an answer is).
"""
