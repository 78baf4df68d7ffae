"""Views of one photograph: `homography` (sampling), `render` (pixels, light, camera)."""
