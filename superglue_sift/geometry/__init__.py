"""Fit, refine and verify the geometry of matches.

two_view          fits homographies, fundamental matrices, relative poses and local maps.
refinement        refines the positions of matches to a fraction of a pixel.
tracks            finds one position of each keypoint from the matches of many photographs.
verification      decides whether two photographs show one place, and finds their matches.
"""
