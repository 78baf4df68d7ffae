"""SIFT keypoints of a view, and the store that training maps into memory."""
