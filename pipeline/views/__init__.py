"""Views of one photograph: `homography` (sampling), `render` (pixels, light, camera).

`places` and `buildings`: synthetic buildings seen by true cameras.
"""
