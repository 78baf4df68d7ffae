"""The keypoints of all views: `store`, which training maps into memory."""
