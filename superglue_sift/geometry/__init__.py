"""Fit, refine and verify the geometry of matches: arrays in, arrays out.

two_view          maps points of two images, and fits homographies and fundamental matrices.
local_maps        fits affine maps around matches.
pose              estimates the relative pose of two cameras.
refinement        refines the positions of matches to a fraction of a pixel.
tracks            finds one position of each keypoint from the matches of many photographs.
verification      computes the probability that two photographs show one place.
watermarks        finds the matches of logos and dates.

Positions are in pixels of the files. A limit of some pixels means something else in a file of 500
px than in one of 5,000 px, so functions take a factor by which their limits are multiplied: px of
the file per px of the image for which the limits were chosen.
"""
