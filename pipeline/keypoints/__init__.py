"""Stage 2: from photographs to a store of keypoints.

`views` (all views of one photograph and their keypoints), `shards` (worker processes; finished
parts survive a kill), `store` (the keypoints of all views, which training maps into memory).
"""
