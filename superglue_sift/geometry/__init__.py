"""Fit, refine and verify the geometry of matches.

two_view          fits homographies, fundamental matrices and local maps.
pose              estimates the relative pose of two cameras.
refinement        refines the positions of matches to a fraction of a pixel.
tracks            finds one position of each keypoint from the matches of many photographs.
verification      decides whether two photographs show one place, and finds their matches.

Positions of features and results are in pixels of the file. A limit of some pixels means something
else in a file of 500 px than in one of 5,000 px. So each module converts positions once, to the
frame for which its limits were chosen:

- The network and the verification work in the image that SIFT saw (`Features.as_detected`).
- Fits and tracks work in the image reduced to a longer side (`two_view.map_to_reduced`), since a
  result does not know what SIFT saw.
- Refinement works in the pixels that it reads, since more of them give more exact positions.
- Watermarks are looked for in the file, since they have their place and their size there.
"""
