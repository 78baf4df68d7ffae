"""Train SuperGlue on SIFT keypoints, and use it."""
