"""Stage 2: make a store of keypoints from photographs.

`views` renders all views of one photograph and finds their keypoints. `shards` runs worker
processes, whose finished parts survive a kill. `store` holds the keypoints of all views, which
training maps into memory.
"""
