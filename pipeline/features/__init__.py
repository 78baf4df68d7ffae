"""The keypoints of all views: `store`, which training maps into memory, and `inspect`, which prints its content."""
