"""Stage 2: from photographs to a store of keypoints.

`image` (all views of one photograph), `pool` (the workers), `shards` (finished parts outlive a kill), `forecast` (disk
and hours, before it begins).
"""
