"""Stage 2: from photographs to a store of keypoints.

`image` (all views of one photograph), `pool` (worker processes), `shards` (finished parts survive a
kill).
"""
