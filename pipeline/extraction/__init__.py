"""From photographs to keypoint stores: what one image gives, the pool that works, the shards that survive."""
