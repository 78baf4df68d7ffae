"""Views of one photograph: `homography` (sampling), `render` (pixels, light, camera).

`places` and `buildings`: pictures of synthetic buildings by known cameras.
"""
